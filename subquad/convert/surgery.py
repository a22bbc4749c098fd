"""Applying a conversion plan to a model in place, and undoing it."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from subquad.convert.plan import ConversionPlan
from subquad.errors import ConfigError
from subquad.layers import converted_layers
from subquad.models import CONVERSIONS, Conversion, ConvertedModel


def apply_plan(model: PreTrainedModel, plan: ConversionPlan) -> PreTrainedModel:
    """Turn a Llama or a BERT into the planned model, in place: no weight is copied, the teacher stays a mode.

    Args:
        model: the teacher: a `LlamaForCausalLM`, or one of BERT's models with a head or without.
        plan: what each layer becomes; made by `plan_conversion` for this model's configuration.

    Returns:
        The same object, now of the converted class, such as `SubquadLlamaForCausalLM`.

    Raises:
        ConfigError: The model is converted already, cannot be converted, is not of the plan's family, or does not have
            the planned number of layers.
    """
    if isinstance(model, ConvertedModel):
        raise ConfigError("this model is converted already; undo_plan(model) first, or load the teacher again")
    conversion = CONVERSIONS[plan.family.name]
    if type(model) not in conversion.classes or type(model).__name__ not in conversion.whole:
        takes = ", ".join(name for known in CONVERSIONS.values() for name in known.whole)
        raise ConfigError(
            f"apply_plan takes a {' or '.join(conversion.whole)} for a plan of the family {plan.family.name}, got "
            f"{type(model).__name__} (all that can be converted: {takes})"
        )
    if len(plan.layers) != model.config.num_hidden_layers:
        raise ConfigError(f"the plan is for {len(plan.layers)} layers, the model has {model.config.num_hidden_layers}")
    mixers = [None if layer.mixer.score == "softmax" else layer.mixer for layer in plan.layers]
    values = model.config.to_dict()
    values.pop("model_type", None)
    config = conversion.student_config(
        **values, mixers=[None if mixer is None else mixer.model_dump(mode="json") for mixer in mixers]
    )
    config._attn_implementation = model.config._attn_implementation
    # transformers notes what a class can record (hidden states) when an instance is built; ours only change class.
    with torch.device("meta"):
        conversion.classes[type(model)](config)
    _replace_config(model, config)
    _change_classes(model, conversion.classes)
    conversion.install_mixers(model.base_model, mixers)
    for layer in converted_layers(model):
        layer.start_from_projections()
    return model


def undo_plan(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the teacher in place: plain attention on the same projections. New parameters are dropped.

    Args:
        model: a converted model, freshly converted or reloaded. LoRA adapters must have been merged or removed.

    Returns:
        The same object, now of the teacher's class; its logits are the teacher's to the bit where the projections were
        not trained.

    Raises:
        ConfigError: The model is not a converted one.
    """
    conversion = _conversion_of(model)
    values = model.config.to_dict()
    for name in ("model_type", "mixers", "auto_map", "architectures"):
        values.pop(name, None)
    before = {student: teacher for teacher, student in conversion.classes.items()}
    config = conversion.config(**values, architectures=[before[_student_class(model, conversion)].__name__])
    config._attn_implementation = model.config._attn_implementation
    conversion.remove_mixers(model.base_model, config)
    _change_classes(model, before)
    _replace_config(model, config)
    return model


def _conversion_of(model: PreTrainedModel) -> Conversion:
    for conversion in CONVERSIONS.values():
        if isinstance(model, tuple(conversion.classes.values())):
            return conversion
    raise ConfigError(f"undo_plan takes a converted model, got {type(model).__name__}")


def _student_class(model: PreTrainedModel, conversion: Conversion) -> type[PreTrainedModel]:
    """Return the package's class of a model; a checkpoint's own code may have subclassed it."""
    return next(kind for kind in type(model).__mro__ if kind in conversion.classes.values())


def _change_classes(model: PreTrainedModel, classes: dict[type[PreTrainedModel], type[PreTrainedModel]]) -> None:
    """Change the class of a model and of the stack of layers in it, which may be the model itself."""
    inside = model.base_model
    for part in {id(part): part for part in (model, inside)}.values():
        known = next(kind for kind in type(part).__mro__ if kind in classes)
        part.__class__ = classes[known]


def _replace_config(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Give every part of the model the same configuration object, so that a later change reaches all of them."""
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
