"""Mixer configurations: what is refused and what the message says; presets."""

import pytest

from subquad.errors import ConfigError
from subquad.layers import PRESETS, parse_mixer, resolve_mixer


def test_all_problems_in_one_message():
    with pytest.raises(ConfigError) as error:
        parse_mixer({"score": "cubic", "order": 11, "windw": 3})
    message = str(error.value)
    assert all(word in message for word in ("score", "order", "windw", "'cubic'", "11"))


@pytest.mark.parametrize(
    "parts, words",
    [
        ({"score": "taylor", "offset": True}, ["offset", "score: power"]),
        ({"score": "power", "decay_timescale": (64, 128)}, ["decay_timescale", "decay is none"]),
        ({"score": "power", "decay": "softplus", "decay_timescale": (128, 64)}, ["shortest"]),
        ({"score": "power", "sinks": 4}, ["sinks", "window"]),
        ({"score": "power", "feature_map": "learned"}, ["feature_dim"]),
        ({"score": "power", "score_clamp": 5.0}, ["score_clamp"]),
        ({"score": "power", "exact_kv_heads": (1, 1)}, ["duplicates"]),
        ({"score": "power", "conv_activation": "silu"}, ["conv_activation: silu", "conv_width: 1"]),
        ({"score": "power", "normaliser": "gated_rms"}, ["gated_rms", "needs an output_gate"]),
        ({"score": "power", "normaliser": "count", "window": 8}, ["count", "window: 0"]),
        ({"score": "power", "skip": True, "window": 8}, ["skip", "window: 0"]),
        ({"score": "taylor", "feature_map": "learned", "feature_dim": 4, "qk_maps": True}, ["maps of its own"]),
        ({"score": "exp", "window": 8}, ["window: 8", "an exp score is exact already"]),
        ({"score": "exp", "order": 3}, ["order: 3", "power and taylor"]),
        ({"score": "exp", "normaliser": "rms"}, ["normaliser: rms", "head_rms"]),
        ({"score": "exp", "normaliser": "count"}, ["score_clamp", "overflows"]),
        ({"score": "exp", "precision": "high"}, ["precision: high", "score: exp"]),
        ({"score": "softmax", "decay": "softplus", "skip": True}, ["no effect: decay, skip"]),
    ],
)
def test_impossible_combinations(parts, words):
    with pytest.raises(ConfigError) as error:
        parse_mixer(parts)
    assert all(word in str(error.value) for word in words)


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean '2mamba'"):
        resolve_mixer("2mambo")


def test_window_zero_and_decay_none_take_their_dependants_along():
    pure = resolve_mixer({"preset": "2mamba", "window": 0})
    assert (pure.window, pure.sinks) == (0, 0)
    assert resolve_mixer({"preset": "2mamba", "decay": "none"}).decay_timescale is None


def test_presets_can_run():
    for name, mixer in PRESETS.items():
        assert mixer.impossible() == [], name
        assert resolve_mixer(name) is not None
        assert resolve_mixer(mixer.model_dump()) == mixer
