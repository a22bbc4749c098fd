"""Reading recipes, overriding values, and the packaged recipes."""

import pytest
import yaml

from subquad.errors import ConfigError, OutputError
from subquad.recipes.library import copy_recipe, packaged_recipe, packaged_recipes
from subquad.recipes.loader import apply_overrides, load_recipe, parse_yaml, recipe_to_yaml

PACKAGED = (
    "demo",
    "llama3.1-8b-2mamba",
    "llama3.2-1b-2mamba",
    "smollm2-2mamba",
    "smollm2-hybrid",
    "smollm2-mamba2s",
    "smollm2-taylor",
)


def test_the_promised_recipes_are_packaged():
    assert tuple(packaged_recipes()) == PACKAGED


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_recipe_is_valid_and_says_what_it_is(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(packaged_recipe(name).summary) > 20
    assert not recipe.data.train.same_documents(recipe.data.eval) or recipe.data.train.part != recipe.data.eval.part


@pytest.mark.parametrize("name", PACKAGED)
def test_resolved_recipe_reads_back_equal(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / "resolved.yaml"
    path.write_text(recipe_to_yaml(recipe))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("name", ["llama3.2-1b-2mamba", "llama3.1-8b-2mamba"])
def test_node_recipes_stream_hub_text_sharded_and_say_how_to_launch(name):
    recipe = load_recipe(name)
    assert recipe.trainer.fsdp
    assert recipe.trainer.bf16
    assert recipe.data.train.kind == "hub"
    assert recipe.data.train.streaming
    assert "accelerate launch" in packaged_recipe(name).text


def test_overrides_set_nested_yaml_values():
    recipe = load_recipe(
        "demo",
        [
            "stage1.tokens=50000",
            "stage1.learning_rate=1e-3",
            "output_dir=runs/other",
            "stage2.lora.r=4",
            "data.train={kind: text, paths: [a.txt, b.txt]}",
            "eval.generate_prompt=a=b",
        ],
    )
    assert recipe.stage1.tokens == 50_000
    assert recipe.stage1.learning_rate == 1e-3
    assert str(recipe.run_dir) == "runs/other"
    assert recipe.stage2.lora.r == 4
    assert recipe.data.train.paths == ("a.txt", "b.txt")
    assert recipe.eval.generate_prompt == "a=b"


def test_parts_can_be_set_on_a_mixer_given_by_name():
    recipe = load_recipe("demo", ["convert.mixer.window=32", "convert.layers.0-3=taylor", "convert.layers.0-3.order=1"])
    assert (recipe.convert.mixer.decay, recipe.convert.mixer.window) == ("softplus", 32)
    assert recipe.convert.layers["0-3"].order == 1


def test_overrides_leave_their_input_alone():
    content = {"name": "x", "stage1": {"tokens": 5}}
    assert apply_overrides(content, ["stage1.tokens=6"])["stage1"] == {"tokens": 6}
    assert content["stage1"] == {"tokens": 5}


def test_all_malformed_overrides_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"name": "x"}, ["stage1", "=5", "a..b=1", "seed=[1", "name.first=2"])
    message = str(caught.value)
    for override in ("'stage1'", "'=5'", "'a..b=1'", "'seed=[1'", "'name.first=2'"):
        assert override in message
    assert "name is 'x', not a section" in message


def test_unknown_override_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"recipe demo is not valid.*\n.*stage1.token: unknown key 'token'.*'tokens'"):
        load_recipe("demo", ["stage1.token=5"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty; a recipe is a mapping"),
        ("- a", "is a list; a recipe is a mapping"),
        ("a: [1", "is not valid YAML.*line 1"),
        ("seed: 1\nseed: 2", "is not valid YAML: key 'seed' stands twice at line 2"),
        ("stage1: {tokens: 1, tokens: 2}", "is not valid YAML: key 'tokens' stands twice"),
        ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("? [a]\n: 1", "is not valid YAML"),
    ],
)
def test_bad_yaml_is_one_clear_error(text, message):
    with pytest.raises(ConfigError, match=f"my.yaml {message}"):
        parse_yaml(text, "my.yaml")


def test_missing_and_unknown_recipes(tmp_path):
    with pytest.raises(ConfigError, match=r"no recipe is called 'demmo'; did you mean 'demo'\?.*smollm2-taylor"):
        load_recipe("demmo")
    with pytest.raises(ConfigError, match=r"absent.yaml does not exist; `subquad recipes copy demo"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary.yaml cannot be read"):
        load_recipe(tmp_path / "binary.yaml")


def test_copy_keeps_comments_and_never_overwrites(tmp_path):
    path = copy_recipe("demo", tmp_path)
    assert path == tmp_path / "demo.yaml"
    assert path.read_text() == packaged_recipe("demo").text
    assert load_recipe(path) == load_recipe("demo")
    path.write_text("name: mine")
    with pytest.raises(OutputError, match="exists and is left as it is"):
        copy_recipe("demo", tmp_path)
    assert yaml.safe_load(path.read_text()) == {"name": "mine"}
    with pytest.raises(OutputError, match="cannot be written"):
        copy_recipe("demo", tmp_path / "absent" / "demo.yaml")
