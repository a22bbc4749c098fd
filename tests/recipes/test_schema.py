"""A recipe is validated as a whole: every problem in one message, unknown keys with the nearest known one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.errors import ConfigError
from subquad.layers.presets import PRESETS
from subquad.recipes.schema import Recipe, parse_recipe


def problems(content: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(content)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_name_alone_is_a_recipe():
    recipe = parse_recipe({"name": "small"})
    assert recipe.model.source == "smollm2-135m"
    assert recipe.convert.mixer == PRESETS["2mamba"]
    assert (recipe.data.train.part, recipe.data.eval.part) == ("train", "eval")
    assert str(recipe.run_dir) == "runs/small"


def test_all_problems_come_in_one_message():
    found = problems(
        {
            "stage1": {"tokens": -1, "learning_rte": 1e-3},
            "data": {"seq_len": 1, "train": {"kind": "text"}},
            "convert": {"mixer": "2mmba"},
            "bogus": 1,
        }
    )
    paths = {line.split(":")[0] for line in found}
    assert paths == {
        "name",
        "stage1.tokens",
        "stage1.learning_rte",
        "data.seq_len",
        "data.train.paths",
        "convert.mixer",
        "bogus",
    }


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            {"stage1": {"learning_rte": 1}},
            "stage1.learning_rte: unknown key 'learning_rte'; did you mean 'learning_rate'?",
        ),
        ({"calibrate": {"seq_len": 8}}, "calibrate.seq_len: unknown key here; it belongs at "),
        ({"stage2": {"lora": {"rr": 8}}}, "stage2.lora.rr: unknown key 'rr'; did you mean 'r'?"),
        ({"convert": {"mixer": "2mmba"}}, "convert.mixer: mixer '2mmba' is unknown; did you mean '2mamba'?"),
        (
            {"convert": {"mixer": {"preset": "taylor", "ordr": 1}}},
            "convert.mixer: unknown key 'ordr'; did you mean 'order'?",
        ),
        ({"convert": {"layers": {5: {"preset": "taylr"}}}}, "convert.layers.5: mixer 'taylr' is unknown; did you mean"),
        (
            {"data": {"train": {"kind": "text", "path": "a"}}},
            "data.train.path: unknown key 'path'; did you mean 'paths'?",
        ),
        ({"data": {"eval": {"kind": "huub"}}}, "data.eval.kind: must be one of 'embedded', 'text'"),
        ({"model": []}, "model: must be a mapping of keys to values (got [])"),
        (
            {"stage2": {"lora": "none"}},
            "stage2.lora: must be a mapping of keys to values, or null for none (got 'none')",
        ),
        ({"stage1": {"learning_rate": float("nan")}}, "stage1.learning_rate: "),
        ({"eval": {"memory_lengths": [8, 8]}}, "eval.memory_lengths: must be ascending without repeats, got [8, 8]"),
        ({"stage2": {"kl_weight": 0}}, "stage2: kl_weight, ce_weight and hidden_weight are all 0"),
        ({"stage2": {"full": True, "lora": {"r": 4}}}, "stage2: full: true trains every weight, so lora is not used"),
        ({"stage2": {"lora": {"target_modules": ["qproj"]}}}, "stage2.lora.target_modules.0: "),
    ],
)
def test_message_names_path_value_and_fix(content, expected):
    found = problems({"name": "x", **content})
    assert any(line.startswith(expected) for line in found), found


def test_amounts_below_one_row_are_refused():
    found = problems({"name": "x", "data": {"seq_len": 512}, "stage1": {"tokens": 100}, "eval": {"tokens": 511}})
    assert "stage1.tokens is 100, less than one row of 512 tokens" in found[0]
    assert "eval.tokens is 511" in found[0]


def test_rows_of_a_stage_may_have_a_length_of_their_own():
    recipe = parse_recipe({"name": "x", "data": {"seq_len": 512}, "stage1": {"seq_len": 128, "tokens": 128}})
    assert [recipe.stage_seq_len(stage) for stage in ("calibrate", "stage1", "stage2")] == [512, 128, 512]
    found = problems({"name": "x", "data": {"seq_len": 64}, "stage2": {"seq_len": 256, "tokens": 255}})
    assert "stage2.tokens is 255, less than one row of 256 tokens" in found[0]
    data = {"seq_len": 256, "recall": {"share": 0.5}}
    found = problems({"name": "x", "data": data, "stage1": {"seq_len": 64}})
    assert "stage1.seq_len 64 is too short for data.recall" in found[0]
    parse_recipe({"name": "x", "data": data, "stage1": {"seq_len": 64, "tokens": 0}})


def test_zero_tokens_leave_a_stage_out():
    recipe = parse_recipe({"name": "x", "stage1": {"tokens": 0}, "stage2": {"tokens": 0}})
    assert recipe.stage1.tokens == recipe.stage2.tokens == 0


@pytest.mark.parametrize("text, number", [("1e6", 1_000_000), ("5.0e4", 50_000), ("20480", 20_480)])
def test_scientific_notation_counts(text, number):
    assert parse_recipe({"name": "x", "stage1": {"tokens": text}}).stage1.tokens == number


@pytest.mark.parametrize("text", ["1.5", "1e-3", "many", ""])
def test_other_text_is_no_count(text):
    assert problems({"name": "x", "stage1": {"tokens": text}})[0].startswith("stage1.tokens: ")


@pytest.mark.parametrize(
    "train, evaluated",
    [
        ({"kind": "embedded", "part": "all"}, {"kind": "embedded"}),
        ({"kind": "text", "paths": ["a.txt"]}, {"kind": "text", "paths": ["a.txt"]}),
        ({"kind": "text", "paths": ["a.txt"], "part": "train"}, {"kind": "text", "paths": ["a.txt"]}),
    ],
)
def test_held_out_text_must_not_be_trained_on(train, evaluated):
    found = problems({"name": "x", "data": {"train": train, "eval": evaluated}})
    assert "overlap, so the held-out loss would be measured on training text" in found[0]


def test_one_source_can_be_divided_in_two_parts():
    files = {"kind": "jsonl", "paths": ["a.jsonl"]}
    recipe = parse_recipe(
        {"name": "x", "data": {"train": {**files, "part": "train"}, "eval": {**files, "part": "eval"}}}
    )
    assert recipe.data.train.same_documents(recipe.data.eval)


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b"])
def test_name_must_be_a_folder_name(name):
    assert problems({"name": name})[0].startswith("name: ")


def test_recipe_is_frozen():
    recipe = parse_recipe({"name": "x"})
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    seed=st.integers(0, 2**32 - 1),
    mixer=st.sampled_from(sorted(PRESETS)),
    window=st.integers(1, 256),
    rate=st.floats(1e-8, 10),
)
def test_plain_form_reads_back(name, seed, mixer, window, rate):
    mixers = {"mixer": mixer, "layers": {"0-1": {"preset": "taylor", "window": window}}}
    recipe = parse_recipe({"name": name, "seed": seed, "convert": mixers, "stage1": {"learning_rate": rate}})
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
