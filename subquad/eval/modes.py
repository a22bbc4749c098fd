"""Run a model in one of its attention modes, with its adapters off where the mode is the teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from torch import nn

from subquad.convert.adapters import adapters_disabled
from subquad.errors import ConfigError
from subquad.layers import AttentionMode, attention_mode

EvalMode = Literal["student", "teacher", "window_only", "student_without_far"]
# Name -> attention mode, and whether the adapters of the distillation are on.
_MODES: dict[EvalMode, tuple[AttentionMode, bool]] = {
    "student": ("student", True),
    "teacher": ("teacher", False),
    "window_only": ("window_only", False),
    "student_without_far": ("exact_only", True),
}


@contextmanager
def evaluation_mode(model: nn.Module, mode: EvalMode | None) -> Iterator[None]:
    """Put a model in `eval()` and in an evaluation mode for the length of a `with` block; restore both after it.

    `student` is the model as it stands. `teacher` is the original attention and `window_only`, the control, its window
    and sinks; both have the peft adapters off, because neither has been trained. `student_without_far` is window, sinks
    and kept keys with the adapters on. An adapter that was merged and unloaded cannot be switched off: measure teacher
    and control before merging.

    Args:
        model: A converted model, with or without adapters, or any causal language model where `mode` is None.
        mode: What to evaluate; None leaves attention and adapters as they are.

    Yields:
        Nothing; the model itself is switched.

    Raises:
        ConfigError: An unknown mode, or one that needs a window where a converted layer has none.
    """
    if mode is not None and mode not in _MODES:
        raise ConfigError(f"evaluation mode {mode!r} is unknown; use one of {', '.join(_MODES)}")
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        if mode is None:
            yield
        else:
            attention, adapters = _MODES[mode]
            with attention_mode(model, attention), nullcontext() if adapters else adapters_disabled(model):
                yield
    finally:
        for module, was_training in training.items():
            module.training = was_training
