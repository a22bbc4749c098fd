"""`Family`: the names a model family uses for what a conversion touches. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Names of one model family.

    Attributes:
        name: Short name, used in messages.
        architecture: The Hugging Face class, as `config.json` has it in `architectures`.
        model_type: `model_type` of its config.
        student_model_type: `model_type` of the converted model.
        fields: Our name of a size to the config's.
        ignored_keys: Regular expressions of checkpoint keys that are dropped on purpose.
    """

    name: str
    architecture: str
    model_type: str
    student_model_type: str
    fields: Mapping[str, str]
    ignored_keys: tuple[str, ...] = ()

    def size(self, hf_config: object, field: str) -> int:
        """Return one of the sizes in `fields` from a Hugging Face config."""
        return int(getattr(hf_config, self.fields[field]))
