"""What a mixer means for a model that starts from random weights: the papers' own system, without conversion aids."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from subquad.layers.config import MixerConfig
from subquad.layers.presets import PRESETS
from subquad.recipes.sections import resolve_section_mixer

# exp(-1 / T) = 1/2, which is a = exp(-softplus(0)) = sigmoid(0)
PAPER_TIMESCALE = 1.0 / math.log(2.0)
# the start of the papers, as time constants in tokens: [C], [E]; 1 / (A dt) with A in 1 ... 16, dt in 0.001 ... 0.1 [D]
_PAPER_STARTS = {
    "softplus": (PAPER_TIMESCALE, PAPER_TIMESCALE),
    "logsigmoid": (PAPER_TIMESCALE, PAPER_TIMESCALE),
    "mamba2": (0.625, 1000.0),
}
# what a preset adds for pretrained weights and a model from random weights has no use for
_WITHOUT_AIDS: dict[str, Any] = {
    "window": 0,
    "sinks": 0,
    "kept_keys": 0,
    "temperature": False,
    "qk_maps": False,
    "offset": False,
}


def scratch_mixer(value: object) -> object:
    """Resolve a mixer for training from random weights.

    A preset stands for the papers' system: no window, sinks, learned temperature, q/k maps or offset, and no rotary
    embedding where there is a decay (no linear or squared configuration of [C] has one). What the recipe sets itself
    is kept. The decay starts as in the papers unless `decay_timescale` says otherwise: at a = 1/2 for every token and
    head (`softplus` [C], `logsigmoid` [E]), or with time constants of 0.6 to 1,000 tokens over the heads (`mamba2`
    [D]); a conversion starts at long ones because its weights expect to see far.

    Args:
        value: a preset's name, or its parts.

    Returns:
        The validated config; anything but a name or a mapping is returned as it is.

    Raises:
        ValueError: an unknown preset or key, or parts that break a rule.
    """
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, dict):
        return value
    preset = PRESETS.get(str(value.get("preset")))
    if preset is not None and preset.score != "softmax":
        rope = {"rope": "drop"} if preset.decay != "none" else {}
        aids = _WITHOUT_AIDS if not value.get("window") else {"temperature": False, "qk_maps": False, "offset": False}
        value = {**aids, **rope, **value}
    mixer = resolve_section_mixer(value)
    if isinstance(mixer, MixerConfig) and mixer.center_keys:
        raise ValueError("center_keys: true is set by calibration to a teacher, and there is none; use false")
    if isinstance(mixer, MixerConfig) and mixer.decay != "none" and mixer.decay_timescale is None:
        return mixer.model_copy(update={"decay_timescale": _PAPER_STARTS[mixer.decay]})
    return mixer


ScratchMixer = Annotated[MixerConfig, BeforeValidator(scratch_mixer)]
