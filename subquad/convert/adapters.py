"""LoRA adapters (peft) on a model, whoever put them there: find them, switch them off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def adapted_layers(model: nn.Module) -> list[BaseTunerLayer]:
    """Return the model's layers that carry an adapter."""
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run the model without its adapters inside the `with` block; without adapters this does nothing.

    Unlike peft's own switch this leaves every `requires_grad` alone. FSDP copies that flag to a parameter's gathered
    form at its first use, so an adapter switched off during that use would never receive a gradient.

    Args:
        model: A model, wrapped or not.

    Yields:
        Nothing.
    """
    layers = [layer for layer in adapted_layers(model) if not layer.disable_adapters]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
