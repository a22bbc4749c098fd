"""Hugging Face model classes with converted layers; importing this registers them with the Auto classes."""

from subquad.models import bert, llama
from subquad.models.bert import (
    SubquadBertConfig,
    SubquadBertForMaskedLM,
    SubquadBertForPreTraining,
    SubquadBertForSequenceClassification,
    SubquadBertModel,
)
from subquad.models.common import Conversion, ConvertedConfig, ConvertedModel
from subquad.models.llama import (
    SubquadLlamaConfig,
    SubquadLlamaForCausalLM,
    SubquadLlamaForSequenceClassification,
    SubquadLlamaModel,
)

llama.register()
bert.register()

# How the models of each family are converted, by the names in `convert/families`.
CONVERSIONS: dict[str, Conversion] = {"llama": llama.LLAMA, "bert": bert.BERT}

__all__ = [
    "CONVERSIONS",
    "Conversion",
    "ConvertedConfig",
    "ConvertedModel",
    "SubquadBertConfig",
    "SubquadBertForMaskedLM",
    "SubquadBertForPreTraining",
    "SubquadBertForSequenceClassification",
    "SubquadBertModel",
    "SubquadLlamaConfig",
    "SubquadLlamaForCausalLM",
    "SubquadLlamaForSequenceClassification",
    "SubquadLlamaModel",
]
