"""The models of one evaluation: teacher, controls, student and others, all measured with the same settings."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.eval.fingerprint import fingerprint
from subquad.eval.modes import EvalMode, evaluation_mode
from subquad.eval.records import EvalRecord, Provenance, load_record, record_path
from subquad.eval.storage import collect_versions, git_commit


@dataclass(frozen=True)
class Contestant:
    """A model in one attention mode; several may share one set of weights.

    Attributes:
        name: `teacher`, `student`, `window_only`, `student_without_far`, or the name of another checkpoint.
        checkpoint: Folder, hub id or name it was loaded from.
        model: The model, on its device.
        tokenizer: Its tokenizer.
        mode: Attention mode; None is the model as it stands.
    """

    name: str
    checkpoint: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    mode: EvalMode | None = None

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes in this mode, in `eval()`."""
        return evaluation_mode(self.model, self.mode)

    @property
    def context_length(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    @cached_property
    def weights(self) -> str:
        """Fingerprint of config and weights: a checkpoint made anew under the same name is another one."""
        return fingerprint(self.model, teacher=self.mode == "teacher")

    def finished_record(self, folder: Path, task: str, settings: Mapping[str, Any]) -> EvalRecord | None:
        """Return the record of a task that was measured on these weights with equal settings before, or None."""
        path = record_path(folder, task, self.name)
        if not path.is_file():
            return None
        record = load_record(path)
        same = record.settings == json.loads(json.dumps(settings)) and record.provenance.weights == self.weights
        return record if same else None


class Clock(NamedTuple):
    """When a measurement began."""

    started: float

    @classmethod
    def start(cls) -> Clock:
        """Return a clock that starts now."""
        return cls(time.monotonic())

    def provenance(
        self, contestant: Contestant, *, seed: int, batch_size: int, prompts_hash: str, command: str
    ) -> Provenance:
        """Return the provenance of a measurement that has just ended.

        Args:
            contestant: The model.
            seed: Seed of everything drawn.
            batch_size: Sequences per forward pass.
            prompts_hash: From `hash_prompts`.
            command: Command that repeats it.

        Returns:
            The provenance.
        """
        device, dtype = contestant.model.device, contestant.model.dtype
        return Provenance(
            checkpoint=contestant.checkpoint,
            mode=contestant.mode,
            weights=contestant.weights,
            versions=collect_versions(),
            commit=git_commit(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            dtype=str(dtype).removeprefix("torch."),
            seed=seed,
            batch_size=batch_size,
            prompts_hash=prompts_hash,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            wall_seconds=time.monotonic() - self.started,
        )
