"""Lets transformers' `trust_remote_code=True` find the model class, which is in the package subquad."""

from .configuration_subquad import SubquadLlamaConfig

try:
    from subquad.models import SubquadLlamaForCausalLM as _SubquadLlamaForCausalLM
    from subquad.models import SubquadLlamaForSequenceClassification as _SubquadLlamaForSequenceClassification
except ImportError as error:
    raise ImportError(
        f"this model needs the package subquad ({error}). Install it with: pip install subquad"
    ) from error


# a class of this file, not an alias: transformers copies the file of the class when the model is saved again
class SubquadLlamaForCausalLM(_SubquadLlamaForCausalLM):
    """A causal language model with converted attention layers."""

    config_class = SubquadLlamaConfig


class SubquadLlamaForSequenceClassification(_SubquadLlamaForSequenceClassification):
    """A converted Llama with a classification head."""

    config_class = SubquadLlamaConfig
