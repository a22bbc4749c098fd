"""The named mixers. A preset is a filled-in `MixerConfig` and nothing else; sources are in `docs/mixers.md`."""

from __future__ import annotations

import difflib

from subquad.errors import ConfigError
from subquad.layers.config import MixerConfig, parse_mixer

_WINDOWED = {"window": 64, "sinks": 4, "temperature": True, "qk_maps": True}

PRESETS: dict[str, MixerConfig] = {
    "softmax": MixerConfig(score="softmax"),
    # [C] 2Mamba: squared score with a data-dependent decay; the offset answers "the square is even".
    "2mamba": MixerConfig(score="power", order=2, decay="softplus", conv_width=2, offset=True, **_WINDOWED),
    # [C] Mamba-2S: first-order score, decay, value step, RMS norm over the concatenated heads.
    "mamba2s": MixerConfig(
        score="power", order=1, decay="softplus", conv_width=2, value_step="softplus", normaliser="rms", **_WINDOWED
    ),
    # [A] truncated Taylor series of e^x.
    "taylor": MixerConfig(score="taylor", order=2, **_WINDOWED),
}


def resolve_mixer(value: str | dict[str, object]) -> MixerConfig:
    """Turn a preset name, or a mapping with an optional `preset` key and overrides, into a `MixerConfig`.

    Args:
        value: `"2mamba"`, or `{"preset": "taylor", "order": 3, "window": 0}`, or all parts spelled out.

    Returns:
        The validated config.

    Raises:
        ConfigError: An unknown preset (the nearest name is suggested), or parts that break a rule.
    """
    if isinstance(value, str):
        value = {"preset": value}
    parts = dict(value)
    name = parts.pop("preset", None)
    if name is None:
        return parse_mixer(parts)
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"mixer {name!r} is unknown{hint} Known: {', '.join(sorted(PRESETS))}.")
    base = PRESETS[str(name)].model_dump()
    for conflict, keys in {"window": ("sinks",), "decay": ("decay_timescale",)}.items():
        if parts.get(conflict) in (0, "none"):
            base.update({key: (0 if key == "sinks" else None) for key in keys if key not in parts})
    return parse_mixer({**base, **parts})
