"""Mixer configurations: what is refused and what the message says; presets."""

import pytest
import torch

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
        ({"score": "power", "window": 4, "kept_recency": 1.0}, ["orders kept keys, and kept_keys is 0"]),
        ({"score": "exp", "center_keys": True}, ["takes out again"]),
        ({"score": "taylor", "order": 0, "center_keys": True}, ["do not depend on the keys"]),
        ({"score": "taylor", "center_keys": True, "causal": False}, ["calibration sets the mean"]),
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
        ({"score": "exp", "score_clamp": float("nan")}, ["score_clamp", "finite"]),
        ({"score": "exp", "score_clamp": float("inf")}, ["score_clamp", "finite"]),
        ({"score": "exp", "score_clamp": 80.5}, ["score_clamp must be at most 80, got 80.5", "overflows"]),
        ({"score": "power", "scale": float("inf")}, ["scale", "finite"]),
        ({"score": "power", "decay": "softplus", "decay_timescale": (1, float("inf"))}, ["decay_timescale", "finite"]),
        ({"score": "exp", "precision": "high"}, ["precision: high", "score: exp"]),
        ({"score": "softmax", "decay": "softplus", "skip": True}, ["no effect: decay, skip"]),
    ],
)
def test_impossible_combinations(parts, words):
    with pytest.raises(ConfigError) as error:
        parse_mixer(parts)
    assert all(word in str(error.value) for word in words)


def test_the_largest_clamp_leaves_room_for_sums():
    clamp = parse_mixer({"score": "exp", "normaliser": "count", "score_clamp": 80}).score_clamp
    weights = torch.full((4096,), clamp).exp()
    assert torch.isfinite(weights.sum())
    assert not torch.isfinite(torch.tensor(89.0).exp())


@pytest.mark.parametrize("name", [["2mamba"], 2, {"a": 1}])
def test_a_preset_that_is_no_text_is_refused(name):
    with pytest.raises(ConfigError, match="preset must be the name of a mixer"):
        resolve_mixer({"preset": name})


@pytest.mark.parametrize(
    "parts, words",
    [
        ({"decay": "softplus"}, "a decay says how much of the past is left"),
        ({"conv_width": 2}, "the convolution reads the tokens before"),
        ({"kv_shift": True}, "it mixes in the token before"),
        ({"window": 8}, "a window is of the last tokens"),
        ({"precision": "high"}, "sums over all tokens are computed in float32"),
    ],
)
def test_what_needs_an_order_in_time_is_refused_without_one(parts, words):
    parse_mixer({"score": "power", **parts})
    with pytest.raises(ConfigError, match=words):
        parse_mixer({"score": "power", **parts, "causal": False})
    with pytest.raises(ConfigError, match="no effect: causal"):
        parse_mixer({"score": "softmax", "causal": False})


def test_causal_false_takes_a_presets_window_along_but_not_a_given_one():
    taylor = resolve_mixer({"preset": "taylor", "causal": False})
    assert (taylor.window, taylor.sinks, taylor.temperature) == (0, 0, True)
    with pytest.raises(ConfigError, match="window: 4 with causal: false"):
        resolve_mixer({"preset": "taylor", "causal": False, "window": 4})
    with pytest.raises(ConfigError, match="decay: softplus with causal: false"):
        resolve_mixer({"preset": "2mamba", "causal": False})


def test_which_presets_an_encoder_can_have():
    refused = set()
    for name in PRESETS:
        try:
            resolve_mixer({"preset": name, "causal": False})
        except ConfigError:
            refused.add(name)
    with_decay = {name for name, mixer in PRESETS.items() if mixer.decay != "none"}
    assert refused == with_decay | {"softmax"}


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
