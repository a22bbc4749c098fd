"""A contestant with a classification head, on a copy of its weights."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    BertForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification

from subquad.convert.adapters import adapted_layers
from subquad.convert.export import merge_adapters
from subquad.errors import ConfigError
from subquad.eval.contestants import Contestant
from subquad.eval.finetune.settings import FinetuneSettings, LoraSettings
from subquad.layers import AttentionMode, attention_mode

# the names of the decoders' head and of BERT's
HEADS = ("score", "classifier")
POOLER = "pooler"
_ADAPTER_MARK = ".lora_"


def build_classifier(
    contestant: Contestant, settings: FinetuneSettings, *, num_labels: int, pad_token_id: int, seed: int
) -> PreTrainedModel:
    """Put a new head on a copy of a contestant and make trainable what the method trains.

    The copy holds the weights the contestant computes with: adapters of the distillation are merged into it, or left
    out where the mode is one without them. Trained weights are float32, whatever the contestant's dtype.

    Args:
        contestant: The model; it is left exactly as it is.
        settings: Method and adapters.
        num_labels: Number of classes.
        pad_token_id: Token of the padding.
        seed: Start of head and adapters, the same for every contestant of one shape.

    Returns:
        A model with a head in `HEADS`, to be run inside `contestant_mode`. BERT's stands on its pooler, which a
        contestant without one (a masked language model) gets new.

    Raises:
        ConfigError: The architecture has no stock classification head, or no layer a LoRA target names.
    """
    body = _copy_body(contestant)
    if settings.method == "full" or body.dtype == torch.float16:
        body.float()
    config = body.config
    config.num_labels = num_labels
    config.pad_token_id = pad_token_id
    config.problem_type = "single_label_classification"
    config.use_cache = False
    classifier = _head_class(config)
    with torch.device("meta"):
        model = classifier(config)
    head, generator = head_name(model), torch.Generator().manual_seed(seed)
    setattr(model, head, _drawn(getattr(model, head), config, generator).to(body.device))
    pooler = getattr(model.base_model, POOLER, None)
    if pooler is not None:
        own = getattr(body, POOLER) or _drawn(pooler, config, generator)
        setattr(body, POOLER, own.to(body.device, torch.float32))
    setattr(model, model.base_model_prefix, body)
    model.requires_grad_(settings.method == "full")
    if settings.method == "lora":
        _add_adapters(model, settings.lora, head, seed)
    if settings.gradient_checkpointing:
        _recompute(model)
    return model


def contestant_mode(model: PreTrainedModel, contestant: Contestant) -> AbstractContextManager[None]:
    """Return a context in which a classifier attends as its contestant does.

    Not `Contestant.active`, which switches every adapter off for the teacher, those in training too.
    """
    if contestant.mode is None:
        return nullcontext()
    mode: AttentionMode = "exact_only" if contestant.mode == "student_without_far" else contestant.mode
    return attention_mode(model, mode)


def padding_token(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """Return the token to pad with: the tokenizer's, or its end of text where it has none the model knows.

    Args:
        tokenizer: The tokenizer.
        model: The model; its embedding bounds the tokens.

    Returns:
        The token's id.

    Raises:
        ConfigError: The tokenizer has neither token.
    """
    num_embeddings = model.get_input_embeddings().num_embeddings
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None and token < num_embeddings:
            return token
    raise ConfigError(
        "the tokenizer has neither a padding token nor an end of text among the model's "
        f"{num_embeddings} tokens, so rows cannot be batched; set tokenizer.pad_token"
    )


def head_name(model: PreTrainedModel) -> str:
    """Return the name of a classifier's head."""
    return next(name for name in HEADS if hasattr(model, name))


def _copy_body(contestant: Contestant) -> PreTrainedModel:
    """Copy a contestant without its language model head and without adapters beside its weights."""
    source = contestant.model
    model = copy.deepcopy(source.get_base_model() if isinstance(source, PeftModel) else source)
    if contestant.mode in ("teacher", "window_only"):
        _drop_adapters(model)
    else:
        merge_adapters(model)
    return model.base_model


def _drop_adapters(model: PreTrainedModel) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def _head_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    # a checkpoint's own code may have subclassed a configuration that is known
    known = [kind for kind in type(config).__mro__ if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING]
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[known[0]] if known else None
    if found is None or not issubclass(found, (GenericForSequenceClassification, BertForSequenceClassification)):
        raise ConfigError(
            f"transformers has no decoder or BERT with a classification head for {type(config).__name__}, so it "
            "cannot be fine-tuned on GLUE; leave this model out"
        )
    return found


def _drawn(blank: nn.Module, config: PreTrainedConfig, generator: torch.Generator) -> nn.Module:
    """Give a part without memory weights, drawn on the CPU, where one seed gives the same numbers everywhere."""
    part = blank.to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in part.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    return part


def _add_adapters(model: PreTrainedModel, lora: LoraSettings, head: str, seed: int) -> None:
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in lora.target_modules if name not in linear - {head}]
    if missing or not lora.target_modules:
        raise ConfigError(
            f"lora.target_modules {missing or '[]'} match no linear layer; the model has "
            f"{', '.join(sorted(linear - {head}))}"
        )
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.target_modules)
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    assert adapted_layers(model), "the targets were checked"
    for name, parameter in model.named_parameters():
        # peft has decided for itself what it freezes; the head is trained as well, and what stands under it alone
        trained = name.startswith(f"{head}.") or f".{POOLER}." in name
        parameter.requires_grad_(_ADAPTER_MARK in name or trained)
        if _ADAPTER_MARK in name:
            parameter.data = parameter.data.float()


def _recompute(model: PreTrainedModel) -> None:
    """Recompute each block in the backward pass, without the reentrant form, which gives adapters no gradient."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        # the name before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
