"""Load a checkpoint to use it: a converted one as exported, or a teacher that has not been converted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from subquad.convert.source import load_teacher
from subquad.errors import SourceError
from subquad.models import CONVERSIONS


@dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to use.

    Attributes:
        model: the model, in evaluation mode, on the CPU.
        tokenizer: its tokenizer; None where it has none.
        converted: whether it has converted layers.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    converted: bool


def load_checkpoint(source: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Load a converted checkpoint, or a teacher by any name `load_teacher` knows.

    Args:
        source: folder of an exported student, or a teacher's folder, `.gguf` file, hub id or name.
        dtype: data type of the weights.

    Returns:
        Model and tokenizer.

    Raises:
        SourceError: the source is missing, damaged, or of an architecture that cannot be used.
    """
    model_class = _converted_class(Path(source))
    if model_class is None:
        teacher = load_teacher(source, dtype)
        return Checkpoint(teacher.model, teacher.tokenizer, converted=False)
    try:
        model = model_class.from_pretrained(source, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise SourceError(
            f"{source} cannot be loaded: {first_line.rstrip('.')}. Remove it and run its recipe again: "
            "that writes it anew."
        ) from error
    return Checkpoint(model.eval(), tokenizer, converted=True)


def _converted_class(folder: Path) -> type[PreTrainedModel] | None:
    """Return the class of a converted checkpoint, or None where it is not one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # no folder or a damaged config: loading it as a teacher says what is wrong
        return None
    for conversion in CONVERSIONS.values():
        if isinstance(config, dict) and config.get("model_type") == conversion.student_config.model_type:
            named = (config.get("architectures") or [None])[0]
            students = list(conversion.classes.values())
            return next((student for student in students if student.__name__ == named), students[0])
    return None
