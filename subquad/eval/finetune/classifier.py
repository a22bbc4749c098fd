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

HEAD = "score"
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
        A model with `.score`, to be run inside `contestant_mode`.

    Raises:
        ConfigError: The architecture has no stock classification head, or no layer a LoRA target names.
    """
    decoder = _copy_decoder(contestant)
    if settings.method == "full" or decoder.dtype == torch.float16:
        decoder.float()
    config = decoder.config
    config.num_labels = num_labels
    config.pad_token_id = pad_token_id
    config.problem_type = "single_label_classification"
    config.use_cache = False
    classifier = _head_class(config)
    with torch.device("meta"):
        model = classifier(config)
    setattr(model, model.base_model_prefix, decoder)
    model.score = _new_head(config, num_labels, seed).to(decoder.device)
    model.requires_grad_(settings.method == "full")
    if settings.method == "lora":
        _add_adapters(model, settings.lora, seed)
    if settings.gradient_checkpointing:
        _recompute(model)
    return model


def contestant_mode(model: PreTrainedModel, contestant: Contestant) -> AbstractContextManager[None]:
    """Return a context in which a classifier attends as its contestant does.

    Not `Contestant.active`, which switches every adapter off for the teacher, those in training too.
    """
    if contestant.mode is None:
        return nullcontext()
    mode: AttentionMode = "window_only" if contestant.mode == "student_without_far" else contestant.mode
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


def _copy_decoder(contestant: Contestant) -> PreTrainedModel:
    """Copy a contestant without its language model head and without adapters beside its weights."""
    source = contestant.model
    model = copy.deepcopy(source.get_base_model() if isinstance(source, PeftModel) else source)
    if contestant.mode in ("teacher", "window_only"):
        _drop_adapters(model)
    else:
        merge_adapters(model)
    return getattr(model, model.base_model_prefix)


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
    if found is None or not issubclass(found, GenericForSequenceClassification):
        raise ConfigError(
            f"transformers has no decoder with a classification head for {type(config).__name__}, so it cannot be "
            "fine-tuned on GLUE; leave this model out"
        )
    return found


def _new_head(config: PreTrainedConfig, num_labels: int, seed: int) -> nn.Linear:
    """Draw a head on the CPU, where one seed gives the same numbers everywhere."""
    head = nn.Linear(config.hidden_size, num_labels, bias=False, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        head.weight.normal_(0.0, config.initializer_range, generator=torch.Generator().manual_seed(seed))
    return head


def _add_adapters(model: PreTrainedModel, lora: LoraSettings, seed: int) -> None:
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in lora.target_modules if name not in linear - {HEAD}]
    if missing or not lora.target_modules:
        raise ConfigError(
            f"lora.target_modules {missing or '[]'} match no linear layer; the model has "
            f"{', '.join(sorted(linear - {HEAD}))}"
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
        # peft has decided for itself what it freezes; the head is trained as well
        parameter.requires_grad_(_ADAPTER_MARK in name or name.startswith(f"{HEAD}."))
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
