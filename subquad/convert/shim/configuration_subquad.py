"""Lets transformers' `trust_remote_code=True` find the configuration classes, which are in the package subquad."""

try:
    from subquad.models import SubquadBertConfig as _SubquadBertConfig
    from subquad.models import SubquadLlamaConfig as _SubquadLlamaConfig
except ImportError as error:
    raise ImportError(
        f"this model needs the package subquad ({error}). Install it with: pip install subquad"
    ) from error


# classes of this file, not aliases: transformers copies the file of the class when the model is saved again
class SubquadLlamaConfig(_SubquadLlamaConfig):
    """A Llama configuration plus the mixer of every layer."""


class SubquadBertConfig(_SubquadBertConfig):
    """A BERT configuration plus the mixer of every layer."""
