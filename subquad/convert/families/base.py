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
        gguf_architecture: `general.architecture` of its GGUF files.
        student_model_type: `model_type` of the converted model.
        attention: Path of an attention layer; `{i}` is the layer index.
        projections: Names of the query, key, value and output projections inside the attention layer.
        fields: Our name of a size to the config's.
        ignored_keys: Regular expressions of checkpoint keys that are dropped on purpose.
    """

    name: str
    architecture: str
    model_type: str
    gguf_architecture: str
    student_model_type: str
    attention: str
    projections: tuple[str, str, str, str]
    fields: Mapping[str, str]
    ignored_keys: tuple[str, ...] = ()

    def size(self, hf_config: object, field: str) -> int:
        """Return one of the sizes in `fields` from a Hugging Face config."""
        return int(getattr(hf_config, self.fields[field]))
