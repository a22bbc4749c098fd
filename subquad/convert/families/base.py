"""`Family`: the names a model family uses for what a conversion touches. Data only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Names of one model family.

    Attributes:
        name: Short name, used in messages.
        architecture: The Hugging Face class, as `config.json` has it in `architectures`.
        other_architectures: Further classes that are loaded as what they are.
        model_type: `model_type` of its config.
        student_model_type: `model_type` of the converted model.
        fields: Our name of a size to the config's. Without `num_kv_heads` there is one per query head, without
            `head_dim` the heads divide the hidden size.
        causal: Whether a token sees only itself and the past.
        rotary: Whether queries and keys carry a rotary embedding.
        ignored_keys: Regular expressions of checkpoint keys that are dropped on purpose.
        renamed_keys: Pairs of an old spelling in a checkpoint's keys and the one that transformers loads it as.
        fuller: Triples of a class, a tensor it lacks, and the class that has it too.
    """

    name: str
    architecture: str
    model_type: str
    student_model_type: str
    fields: Mapping[str, str]
    other_architectures: tuple[str, ...] = ()
    causal: bool = True
    rotary: bool = True
    ignored_keys: tuple[str, ...] = ()
    renamed_keys: tuple[tuple[str, str], ...] = ()
    fuller: tuple[tuple[str, str, str], ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """All classes that can be converted, the usual one first."""
        return (self.architecture, *self.other_architectures)

    def ignores(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint is dropped on purpose where the model has no such tensor."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored_keys)

    def complete_architecture(self, architecture: str, names: Iterable[str]) -> str:
        """Return the class that holds all of a checkpoint's tensors.

        Args:
            architecture: The class that the checkpoint's config names, which may lack a head that the file has.
            names: The checkpoint's tensors.

        Returns:
            The class of the first entry of `fuller` that fits, else `architecture`.
        """
        present = set(names)
        for named, key, fuller in self.fuller:
            if architecture == named and key in present:
                return fuller
        return architecture

    def size(self, hf_config: object, field: str) -> int:
        """Return one of the sizes in `fields` from a Hugging Face config."""
        if field not in self.fields and field == "num_kv_heads":
            return self.size(hf_config, "num_heads")
        if field not in self.fields and field == "head_dim":
            return self.size(hf_config, "hidden_size") // self.size(hf_config, "num_heads")
        return int(getattr(hf_config, self.fields[field]))
