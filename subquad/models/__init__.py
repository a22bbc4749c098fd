"""Hugging Face model classes with converted layers; importing this registers them with the Auto classes."""

from subquad.models.llama import (
    SubquadLlamaConfig,
    SubquadLlamaForCausalLM,
    SubquadLlamaForSequenceClassification,
    SubquadLlamaModel,
    register,
)

register()

__all__ = [
    "SubquadLlamaConfig",
    "SubquadLlamaForCausalLM",
    "SubquadLlamaForSequenceClassification",
    "SubquadLlamaModel",
]
