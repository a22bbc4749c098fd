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
        assert mixer.not_built() == [], name
        assert resolve_mixer(name) is not None
        assert resolve_mixer(mixer.model_dump()) == mixer
