"""BERT with converted self-attention: configuration and model classes for transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.bert.modeling_bert import (
    BertOnlyMLMHead,
    BertPreTrainedModel,
    BertPreTrainingHeads,
    BertSelfAttention,
)

from subquad.layers import SubquadBertAttention
from subquad.layers.sequence import SequenceInfo
from subquad.models.common import Conversion, ConvertedConfig, ConvertedModel, check_call


class SubquadBertConfig(ConvertedConfig, BertConfig):
    """A BERT configuration plus the mixer of every layer.

    Attributes:
        mixers: one mapping per layer (see `MixerConfig`); None, or a `softmax` mixer, leaves that layer as it was.
    """

    model_type = "subquad_bert"
    mixers: list[dict[str, Any] | None] | None = None


class _ConvertedModel(ConvertedModel, BertPreTrainedModel):
    """The base class of the models."""

    config: SubquadBertConfig
    config_class = SubquadBertConfig


class SubquadBertModel(_ConvertedModel, BertModel):
    """A BERT encoder whose converted layers are told about padding."""

    def __init__(self, config: SubquadBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        BERT.install_mixers(self, config.layer_mixers())

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Run the encoder; arguments are those of transformers' `BertModel`.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, nonzero for real tokens.
            token_type_ids: `[B, T]`, 0 for the first text and 1 for the second.
            position_ids: `[B, T]`.
            inputs_embeds: `[B, T, hidden_size]` instead of `input_ids`.
            **kwargs: passed to the layers.

        Returns:
            The last hidden states and the pooled first one.

        Raises:
            ConfigError: A mask that is not 2-D, which says nothing that a sum over all tokens could use.
        """
        check_call(attention_mask, kwargs.get("output_attentions"))
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        sequence = None
        if tokens is not None and attention_mask is not None:
            sequence = SequenceInfo.from_masks(attention_mask, None, tokens.shape[1], cached=False)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence=sequence,
            **kwargs,
        )


# The heads build a converted encoder, where their own constructors would build a plain one.


class SubquadBertForMaskedLM(_ConvertedModel, BertForMaskedLM):
    """A converted BERT with a masked language model's head."""

    def __init__(self, config: SubquadBertConfig) -> None:
        super(BertForMaskedLM, self).__init__(config)
        self.bert = SubquadBertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()


class SubquadBertForPreTraining(_ConvertedModel, BertForPreTraining):
    """A converted BERT with both heads of its pretraining, and so with the pooler that classification starts from."""

    def __init__(self, config: SubquadBertConfig) -> None:
        super(BertForPreTraining, self).__init__(config)
        self.bert = SubquadBertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()


class SubquadBertForSequenceClassification(_ConvertedModel, BertForSequenceClassification):
    """A converted BERT with a classification head on the pooled first token."""

    def __init__(self, config: SubquadBertConfig) -> None:
        super(BertForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.bert = SubquadBertModel(config)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


BERT = Conversion(
    config=BertConfig,
    student_config=SubquadBertConfig,
    classes={
        BertModel: SubquadBertModel,
        BertForMaskedLM: SubquadBertForMaskedLM,
        BertForPreTraining: SubquadBertForPreTraining,
        BertForSequenceClassification: SubquadBertForSequenceClassification,
    },
    whole=("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"),
    attention=SubquadBertAttention,
    teacher_attention=BertSelfAttention,
    parent="encoder.layer.{}.attention",
    name="self",
)


def register() -> None:
    """Make `AutoConfig` and the Auto classes of models know the converted BERT."""
    AutoConfig.register(SubquadBertConfig.model_type, SubquadBertConfig, exist_ok=True)
    AutoModel.register(SubquadBertConfig, SubquadBertModel, exist_ok=True)
    AutoModelForMaskedLM.register(SubquadBertConfig, SubquadBertForMaskedLM, exist_ok=True)
    AutoModelForPreTraining.register(SubquadBertConfig, SubquadBertForPreTraining, exist_ok=True)
    AutoModelForSequenceClassification.register(SubquadBertConfig, SubquadBertForSequenceClassification, exist_ok=True)
