"""Switching every converted layer of a model between student, teacher, window-only and transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from torch import Tensor, nn

from subquad.errors import ConfigError
from subquad.layers.attention import SubquadAttention

AttentionMode = Literal["student", "teacher", "window_only", "exact_only", "transfer"]


def converted_layers(model: nn.Module) -> list[SubquadAttention]:
    """Return the model's converted attention layers in order (whatever wraps the model)."""
    return [module for module in model.modules() if isinstance(module, SubquadAttention)]


@contextmanager
def attention_mode(model: nn.Module, mode: AttentionMode) -> Iterator[None]:
    """Run every converted layer in the given mode inside the `with` block, then as before.

    Args:
        model: a converted model, wrapped or not. Without converted layers this does nothing.
        mode: `student`, `teacher` (original softmax), `window_only` (window and sinks alone; the control), `exact_only`
            (these and the kept keys, no far part) or `transfer` (teacher's output, student's error in
            `collect_local_losses`). Heads that stay softmax do so in each.

    Yields:
        Nothing.

    Raises:
        ConfigError: An unknown mode, or one without far part for a model with a layer that has no window.
    """
    if mode not in get_args(AttentionMode):
        raise ConfigError(f"attention mode {mode!r} is unknown; use one of {', '.join(get_args(AttentionMode))}")
    layers = converted_layers(model)
    if mode in ("window_only", "exact_only"):
        require_window(model, f"mode {mode}")
    before = [layer.mode for layer in layers]
    try:
        for layer in layers:
            layer.mode = mode
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.mode = old


def require_window(model: nn.Module, what: str) -> None:
    """Refuse a model with a converted layer that has no window, for which there is no window-only control.

    Args:
        model: a converted model, wrapped or not.
        what: what needs the control, for the message.

    Raises:
        ConfigError: a converted layer has `window: 0`.
    """
    layers = converted_layers(model)
    pure = [layer.layer_idx for layer in layers if layer.mixer is not None and not layer.mixer_config.window]
    if pure:
        raise ConfigError(f"{what}: layers {pure} have window: 0, so there is no window-only control for them")


def collect_local_losses(model: nn.Module) -> dict[int, Tensor]:
    """Return and clear the local losses of the last forward in `transfer` mode.

    Args:
        model: a converted model, wrapped or not.

    Returns:
        Layer index to scalar loss, differentiable with respect to that layer's mixer parameters.

    Raises:
        ConfigError: No forward ran in `transfer` mode.
    """
    losses = {}
    for layer in converted_layers(model):
        if layer.local_loss is not None:
            losses[layer.layer_idx], layer.local_loss = layer.local_loss, None
    if not losses:
        raise ConfigError("no local losses: run a forward inside attention_mode(model, 'transfer') first")
    return losses
