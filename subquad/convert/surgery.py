"""Applying a conversion plan to a model in place, and undoing it."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from subquad.convert.plan import ConversionPlan
from subquad.errors import ConfigError
from subquad.layers import converted_layers
from subquad.models.llama import (
    SubquadLlamaConfig,
    SubquadLlamaForCausalLM,
    SubquadLlamaModel,
    install_mixers,
    remove_mixers,
)


def apply_plan(model: LlamaForCausalLM, plan: ConversionPlan) -> SubquadLlamaForCausalLM:
    """Turn a Llama into the planned model, in place: no weight is copied, the teacher stays available as a mode.

    Args:
        model: the teacher.
        plan: what each layer becomes; made by `plan_conversion` for this model's configuration.

    Returns:
        The same object, now a `SubquadLlamaForCausalLM`.

    Raises:
        ConfigError: The model is converted already, is not a Llama, or does not have the planned number of layers.
    """
    if isinstance(model, SubquadLlamaForCausalLM):
        raise ConfigError("this model is converted already; undo_plan(model) first, or load the teacher again")
    if type(model) is not LlamaForCausalLM:
        raise ConfigError(f"apply_plan takes a LlamaForCausalLM, got {type(model).__name__}")
    if len(plan.layers) != model.config.num_hidden_layers:
        raise ConfigError(f"the plan is for {len(plan.layers)} layers, the model has {model.config.num_hidden_layers}")
    mixers = [None if layer.mixer.score == "softmax" else layer.mixer for layer in plan.layers]
    values = model.config.to_dict()
    values.pop("model_type", None)
    config = SubquadLlamaConfig(
        **values, mixers=[None if mixer is None else mixer.model_dump(mode="json") for mixer in mixers]
    )
    config._attn_implementation = model.config._attn_implementation
    # transformers notes what a class can record (hidden states) when an instance is built; ours only change class.
    with torch.device("meta"):
        SubquadLlamaForCausalLM(config)
    _replace_config(model, config)
    model.__class__ = SubquadLlamaForCausalLM
    model.model.__class__ = SubquadLlamaModel
    install_mixers(model.model, mixers)
    for layer in converted_layers(model):
        layer.start_from_projections()
    return model


def undo_plan(model: SubquadLlamaForCausalLM) -> LlamaForCausalLM:
    """Restore the teacher in place: plain Llama attention on the same projections. New parameters are dropped.

    Args:
        model: a converted model, freshly converted or reloaded. LoRA adapters must have been merged or removed.

    Returns:
        The same object, now a `LlamaForCausalLM`; its logits are the teacher's to the bit where q, k, v, o were not
        trained.

    Raises:
        ConfigError: The model is not a converted Llama.
    """
    if not isinstance(model, SubquadLlamaForCausalLM):
        raise ConfigError(f"undo_plan takes a SubquadLlamaForCausalLM, got {type(model).__name__}")
    values = model.config.to_dict()
    for name in ("model_type", "mixers", "auto_map", "architectures"):
        values.pop(name, None)
    config = LlamaConfig(**values, architectures=["LlamaForCausalLM"])
    config._attn_implementation = model.config._attn_implementation
    remove_mixers(model, config)
    model.__class__ = LlamaForCausalLM
    model.model.__class__ = LlamaModel
    _replace_config(model, config)
    return model


def _replace_config(model: PreTrainedModel, config: LlamaConfig) -> None:
    """Give every part of the model the same configuration object, so that a later change reaches all of them."""
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
