"""Llama with converted attention layers: configuration and model classes for transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaPreTrainedModel

from subquad.layers import SubquadAttention
from subquad.layers.cache import cache_argument
from subquad.layers.sequence import SequenceInfo
from subquad.models.common import Conversion, ConvertedConfig, ConvertedModel, check_call

_CACHE_ARGUMENT = cache_argument(LlamaModel)


class SubquadLlamaConfig(ConvertedConfig, LlamaConfig):
    """A Llama configuration plus the mixer of every layer.

    Attributes:
        mixers: one mapping per layer (see `MixerConfig`); None, or a `softmax` mixer, leaves that layer as it was.
    """

    model_type = "subquad_llama"
    mixers: list[dict[str, Any] | None] | None = None


class _ConvertedModel(ConvertedModel, LlamaPreTrainedModel):
    """The base class of the models."""

    config: SubquadLlamaConfig


class SubquadLlamaModel(_ConvertedModel, LlamaModel):
    """A Llama decoder whose converted layers are told about padding and packed documents."""

    config_class = SubquadLlamaConfig

    def __init__(self, config: SubquadLlamaConfig) -> None:
        super().__init__(config)
        LLAMA.install_mixers(self, config.layer_mixers())

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder; arguments are those of transformers' `LlamaModel`.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, past + T]`, nonzero for real tokens.
            position_ids: `[B, T]`; without a mask and a cache they may restart, one document each time.
            cache: transformers cache.
            past_key_values: the cache, by its name before 5.24.
            inputs_embeds: `[B, T, hidden_size]` instead of `input_ids`.
            use_cache: whether to return a cache.
            **kwargs: passed to the layers.

        Returns:
            The last hidden states and the cache.

        Raises:
            ConfigError: A 4-D attention mask, which says nothing a recurrent state could use.
        """
        cache = past_key_values if cache is None else cache
        check_call(attention_mask, kwargs.get("output_attentions"))
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        sequence = None
        if tokens is not None:
            caching = cache is not None or bool(self.config.use_cache if use_cache is None else use_cache)
            sequence = SequenceInfo.from_masks(attention_mask, position_ids, tokens.shape[1], caching)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            sequence=sequence,
            **{_CACHE_ARGUMENT: cache},
            **kwargs,
        )


class SubquadLlamaForCausalLM(_ConvertedModel, LlamaForCausalLM):
    """A causal language model with converted attention layers."""

    config_class = SubquadLlamaConfig

    def __init__(self, config: SubquadLlamaConfig) -> None:
        # Not LlamaForCausalLM's own: it would build a plain LlamaModel.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SubquadLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(config: SubquadLlamaConfig, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """Keep the 2-D mask: `generate` would build a 4-D one for a static cache, which a recurrent state cannot read.

        Args:
            config: not used.
            attention_mask: `[B, past + T]`, nonzero for real tokens.
            **kwargs: what else transformers passes, not used.

        Returns:
            `attention_mask`.
        """
        return attention_mask


class SubquadLlamaForSequenceClassification(GenericForSequenceClassification, _ConvertedModel):
    """A converted Llama with a classification head on each row's last token that is not `config.pad_token_id`.

    Batches need `config.pad_token_id`; padding may be on either side and changes no logit.
    """

    config_class = SubquadLlamaConfig

    def __init__(self, config: SubquadLlamaConfig) -> None:
        # Not the head's own: it asks AutoModel, which does not know the subclass of the config in a checkpoint's code.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = SubquadLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


LLAMA = Conversion(
    config=LlamaConfig,
    student_config=SubquadLlamaConfig,
    classes={LlamaForCausalLM: SubquadLlamaForCausalLM, LlamaModel: SubquadLlamaModel},
    whole=("LlamaForCausalLM",),
    attention=SubquadAttention,
    teacher_attention=LlamaAttention,
    parent="layers.{}",
    name="self_attn",
)


def register() -> None:
    """Make `AutoConfig` and the Auto classes of models know the converted Llama."""
    AutoConfig.register(SubquadLlamaConfig.model_type, SubquadLlamaConfig, exist_ok=True)
    AutoModel.register(SubquadLlamaConfig, SubquadLlamaModel, exist_ok=True)
    AutoModelForCausalLM.register(SubquadLlamaConfig, SubquadLlamaForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        SubquadLlamaConfig, SubquadLlamaForSequenceClassification, exist_ok=True
    )
