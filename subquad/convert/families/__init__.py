"""Model families that can be converted. A new one is a file with its names and one entry in `FAMILIES`."""

from __future__ import annotations

from subquad.convert.families.base import Family
from subquad.convert.families.bert import BERT
from subquad.convert.families.llama import LLAMA
from subquad.errors import ConfigError, SourceError

FAMILIES: tuple[Family, ...] = (LLAMA, BERT)

__all__ = ["FAMILIES", "Family", "find_family", "require_decoder"]


def require_decoder(model_type: str, what: str) -> None:
    """Refuse what only a model that predicts the next token can do.

    Args:
        model_type: `model_type` of a config, of a teacher or of a student.
        what: What was asked for, as the subject of the message.

    Raises:
        ConfigError: The model is an encoder.
    """
    for family in FAMILIES:
        if not family.causal and model_type in (family.model_type, family.student_model_type):
            raise ConfigError(
                f"{what} needs a model that predicts the next token, and this one (model_type {model_type!r}) is an "
                "encoder. Its conversion can be planned, exported and fine-tuned on GLUE (docs/bert.md)"
            )


def find_family(model_type: str | None, architecture: str | None = None, source: str = "this model") -> Family:
    """Return the family of a checkpoint.

    Args:
        model_type: `model_type` of its config, or `general.architecture` of its GGUF metadata.
        architecture: First entry of the config's `architectures`; None skips that check.
        source: What to call the checkpoint in the message.

    Returns:
        The family.

    Raises:
        SourceError: No family has these names; the message lists the supported ones.
    """
    for family in FAMILIES:
        if model_type == family.student_model_type:
            raise SourceError(
                f"{source} is already a subquad student (model_type {model_type!r}). Evaluate, generate with or distil "
                "it directly, or give the teacher it came from."
            )
        if model_type == family.model_type and architecture in (None, *family.architectures):
            return family
    supported = ", ".join(
        f"{' or '.join(family.architectures)} (model_type {family.model_type!r})" for family in FAMILIES
    )
    found = f"{architecture or 'no architecture'} (model_type {model_type!r})"
    raise SourceError(f"{source} is a {found}, which cannot be converted. Supported: {supported}.")
