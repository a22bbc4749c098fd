"""Lets transformers' `trust_remote_code=True` find the configuration class, which is in the package subquad."""

try:
    from subquad.models import SubquadLlamaConfig as _SubquadLlamaConfig
except ImportError as error:
    raise ImportError(
        f"this model needs the package subquad ({error}). Install it with: pip install subquad"
    ) from error


# a class of this file, not an alias: transformers copies the file of the class when the model is saved again
class SubquadLlamaConfig(_SubquadLlamaConfig):
    """A Llama configuration plus the mixer of every layer."""
