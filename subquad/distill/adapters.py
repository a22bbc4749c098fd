"""LoRA adapters (Hu et al. 2021, through peft) on a converted model."""

from __future__ import annotations

from collections.abc import Sequence

from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from subquad.convert.adapters import adapted_layers
from subquad.errors import ConfigError

ADAPTER_MARK = ".lora_"


def add_lora(model: nn.Module, rank: int, alpha: float, dropout: float, target_modules: Sequence[str]) -> int:
    """Put LoRA adapters into a model in place; the model keeps its class, so its attention modes keep working.

    Args:
        model: Any model; afterwards only the adapters require gradients.
        rank: Rank of each adapter, at least 1.
        alpha: Scale; the adapter's output is multiplied by `alpha / rank`.
        dropout: Dropout on the adapter's input, in [0, 1).
        target_modules: Names of the linear layers to adapt, such as `q_proj`.

    Returns:
        Number of adapter parameters added, all float32 whatever the model's dtype: bfloat16 would lose small updates.

    Raises:
        ConfigError: No module of the model has one of the names, or the model already has adapters.
    """
    if adapted_layers(model):
        raise ConfigError("the model already has adapters; merge them first (subquad.convert.export.merge_adapters)")
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [target for target in target_modules if target not in names]
    if missing or not target_modules:
        raise ConfigError(
            f"target_modules {missing or '[]'} match no linear layer; the model has {', '.join(sorted(names))}"
        )
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules))
    inject_adapter_in_model(config, model)
    count = 0
    for name, parameter in model.named_parameters():
        if ADAPTER_MARK in name:
            parameter.data = parameter.data.float()
            count += parameter.numel()
    return count
