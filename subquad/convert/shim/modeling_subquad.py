"""Lets transformers' `trust_remote_code=True` find the model classes, which are in the package subquad."""

from .configuration_subquad import SubquadBertConfig, SubquadLlamaConfig

try:
    from subquad.models import SubquadBertForMaskedLM as _SubquadBertForMaskedLM
    from subquad.models import SubquadBertForPreTraining as _SubquadBertForPreTraining
    from subquad.models import SubquadBertForSequenceClassification as _SubquadBertForSequenceClassification
    from subquad.models import SubquadBertModel as _SubquadBertModel
    from subquad.models import SubquadLlamaForCausalLM as _SubquadLlamaForCausalLM
    from subquad.models import SubquadLlamaForSequenceClassification as _SubquadLlamaForSequenceClassification
except ImportError as error:
    raise ImportError(
        f"this model needs the package subquad ({error}). Install it with: pip install subquad"
    ) from error


# classes of this file, not aliases: transformers copies the file of the class when the model is saved again
class SubquadLlamaForCausalLM(_SubquadLlamaForCausalLM):
    """A causal language model with converted attention layers."""

    config_class = SubquadLlamaConfig


class SubquadLlamaForSequenceClassification(_SubquadLlamaForSequenceClassification):
    """A converted Llama with a classification head."""

    config_class = SubquadLlamaConfig


class SubquadBertModel(_SubquadBertModel):
    """A converted BERT encoder."""

    config_class = SubquadBertConfig


class SubquadBertForMaskedLM(_SubquadBertForMaskedLM):
    """A converted BERT with a masked language model's head."""

    config_class = SubquadBertConfig


class SubquadBertForPreTraining(_SubquadBertForPreTraining):
    """A converted BERT with both heads of its pretraining."""

    config_class = SubquadBertConfig


class SubquadBertForSequenceClassification(_SubquadBertForSequenceClassification):
    """A converted BERT with a classification head."""

    config_class = SubquadBertConfig
