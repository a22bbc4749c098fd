"""The recipe of a training from random weights, and what a preset means there."""

import pytest

from subquad.errors import ConfigError
from subquad.layers import resolve_mixer
from subquad.layers.presets import PRESETS
from subquad.pretrain.mixers import PAPER_TIMESCALE, scratch_mixer
from subquad.pretrain.schema import PretrainRecipe, load_pretrain_recipe
from subquad.recipes.library import packaged_recipes
from subquad.recipes.loader import recipe_to_yaml
from subquad.recipes.schema import parse_section


def problems(**content) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_section(PretrainRecipe, content, origin="recipe")
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_a_preset_is_the_papers_system():
    mixer = scratch_mixer("2mamba")
    assert (mixer.window, mixer.sinks, mixer.temperature, mixer.qk_maps, mixer.offset) == (0, 0, False, False, False)
    assert mixer.rope == "drop"
    assert mixer.decay_timescale == (PAPER_TIMESCALE, PAPER_TIMESCALE)
    # the conversion keeps its own
    assert PRESETS["2mamba"].window == 64


def test_what_the_recipe_sets_is_kept():
    mixer = scratch_mixer({"preset": "2mamba", "window": 8, "sinks": 2, "rope": "keep", "decay_timescale": [2, 50]})
    assert (mixer.window, mixer.sinks, mixer.rope, mixer.decay_timescale) == (8, 2, "keep", (2, 50))


@pytest.mark.parametrize(
    "decay, timescale",
    [("softplus", (PAPER_TIMESCALE,) * 2), ("logsigmoid", (PAPER_TIMESCALE,) * 2), ("mamba2", (0.625, 1000.0))],
)
def test_every_decay_starts_as_in_its_paper(decay, timescale):
    assert scratch_mixer({"score": "power", "order": 1, "decay": decay}).decay_timescale == timescale
    given = scratch_mixer({"score": "power", "order": 1, "decay": decay, "decay_timescale": [3, 9]})
    assert given.decay_timescale == (3, 9)


def test_parts_without_a_preset_keep_the_rotary_embedding():
    assert scratch_mixer({"score": "taylor", "order": 3}).rope == "keep"
    assert scratch_mixer("taylor").rope == "keep"
    assert scratch_mixer("softmax") == resolve_mixer("softmax")


def test_a_mean_key_needs_a_teacher():
    found = "\n".join(problems(mixer={"preset": "2mamba", "center_keys": True}))
    assert "set by calibration to a teacher, and there is none" in found


def test_all_problems_come_in_one_message():
    found = problems(
        model={"hidden_size": 30, "num_heads": 4, "layers": 3},
        mixer="2mmba",
        tokenizer={"source": "x", "vocab_size": 500},
        training={"tokens": 0, "learning_rte": 1},
        bogus=1,
    )
    text = "\n".join(found)
    for part in (
        "name: is required",
        "model.layers: unknown key",
        "mixer: mixer '2mmba' is unknown; did you mean '2mamba'?",
        "tokenizer: source 'x' is an existing tokenizer",
        "training.tokens",
        "training.learning_rte: unknown key 'learning_rte'; did you mean 'learning_rate'?",
        "bogus: unknown key",
    ):
        assert part in text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": {"hidden_size": 30, "num_heads": 4}}, "hidden_size 30 over num_heads 4 is not an even whole number"),
        ({"model": {"num_heads": 4, "num_kv_heads": 3}}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"eval": {"position_buckets": [64, 32]}}, "eval.position_buckets: must be ascending without repeats"),
        ({"model": {"rope_theta": float("inf")}}, "model.rope_theta: Input should be a finite number"),
        ({"mixer": {"preset": ["2mamba"]}}, "mixer: preset must be the name of a mixer, got ['2mamba']"),
        ({"training": {"tokens": 100}}, "training.tokens is 100, less than one row of 256 tokens"),
        ({"model": {"context_length": 64}}, "model.context_length is 64, but rows have up to 256 tokens"),
        ({"recall": {"num_pairs": 5, "num_keys": 4}}, "num_pairs 5 needs as many different keys, num_keys is 4"),
        ({"recall": {"num_pairs": 2, "num_queries": 3}}, "num_queries 3 asks for more than num_pairs 2"),
        ({"recall": {"eval_lengths": [64, 32]}}, "eval_lengths must be ascending"),
        ({"recall": {"eval_lengths": [8]}}, "eval_lengths starts at 8; a row has at least 20"),
        ({"recall": {}, "tokenizer": {"vocab_size": 300}}, "recall makes its own tokens, so tokenizer is not used"),
        ({"recall": {}, "data": {"seq_len": 16}}, "data.seq_len is 16, but a row of recall has at least 20 tokens"),
    ],
)
def test_values_that_do_not_go_together_are_refused(changes, message):
    assert any(message in line for line in problems(name="x", **changes))


@pytest.mark.parametrize("name", packaged_recipes("pretrain"))
def test_packaged_recipes_are_valid_and_read_back_equal(name, tmp_path):
    recipe = load_pretrain_recipe(name)
    assert recipe.name == name
    assert recipe.mixer.window == 0
    path = tmp_path / "resolved.yaml"
    path.write_text(recipe_to_yaml(recipe))
    assert load_pretrain_recipe(path) == recipe


def test_a_name_of_another_kind_says_which_command_takes_it():
    with pytest.raises(ConfigError, match="'demo' is a recipe of another command: subquad run demo"):
        load_pretrain_recipe("demo")


def test_overrides_reach_the_parts_of_a_mixer_given_by_name():
    recipe = load_pretrain_recipe("tiny-2mamba", ["mixer.conv_width=4", "training.tokens=1e6"])
    assert (recipe.mixer.conv_width, recipe.mixer.order, recipe.training.tokens) == (4, 2, 1_000_000)
