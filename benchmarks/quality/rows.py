"""One row per finished run of a study: what it changed, what it cost, how near it came."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad.eval.niah.cells import Cell, Group, cells_of, group_cells
from subquad.eval.records import EvalRecord, load_records
from subquad.eval.results import Results
from subquad.eval.storage import load_results
from subquad.recipes.run_folder import RunFolder


@dataclass(frozen=True)
class Needle:
    """What one model found at one length.

    Attributes:
        accuracy: share of prompts answered exactly; None where nothing was generated.
        key_logprob: mean log probability of the key, nats; None where it was not scored.
        num: prompts.
        key_logprob_error: standard error of that mean over prompts; None for a single one.
        by_distance: mean log probability of the key by the tokens between its last statement and the answer.
    """

    accuracy: float | None
    key_logprob: float | None
    num: int
    key_logprob_error: float | None = None
    by_distance: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A finished run.

    Attributes:
        arm: its name.
        label: what tables call it.
        group: arms of one group share a colour.
        seed: its seed.
        changes: what it changes in the study's base.
        results: losses, by position, bytes, tokens, seconds, versions: `subquad.eval.results`.
        needle: model to length to what it found; empty where the recipe measures none.
        texts: task of another text to model to (loss, standard error).
        exact_kv_heads: layer to heads that stay softmax.
    """

    arm: str
    label: str
    group: str
    seed: int
    changes: dict[str, Any]
    results: Results
    needle: dict[str, dict[int, Needle]]
    texts: dict[str, dict[str, tuple[float, float | None]]]
    exact_kv_heads: dict[int, tuple[int, ...]]

    @property
    def gap_closed(self) -> float | None:
        """Share of the loss between control and teacher that the student recovers."""
        return self.results.loss.gap_closed

    def cache_bytes(self, length: int) -> int | None:
        """Return the bytes of the student's cache after so many tokens, if they were measured."""
        cache = self.results.cache_bytes
        return None if cache is None else cache.student.get(length)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "arm": self.arm,
            "label": self.label,
            "group": self.group,
            "seed": self.seed,
            "changes": self.changes,
            "exact_kv_heads": self.exact_kv_heads,
            "needle": {
                model: {length: dataclasses.asdict(found) for length, found in lengths.items()}
                for model, lengths in self.needle.items()
            },
            "texts": self.texts,
            **self.results.model_dump(mode="json", exclude={"samples"}),
        }


def read_row(run_dir: Path, *, arm: str, label: str, group: str, changes: dict[str, Any]) -> Row:
    """Read the row of a finished run.

    Args:
        run_dir: its folder.
        arm: name of the arm.
        label: what tables call it.
        group: its colour.
        changes: what it changes.

    Returns:
        The row.

    Raises:
        OutputError: results or records are missing or damaged.
    """
    results = load_results(run_dir)
    records = load_records(run_dir)
    chosen = RunFolder(run_dir).result("plan").get("exact_heads") or {}
    return Row(
        arm=arm,
        label=label,
        group=group,
        seed=results.seed,
        changes=changes,
        results=results,
        needle={record.model: needle_of(record) for record in records if record.task.startswith("niah")},
        texts=_texts(records),
        exact_kv_heads={int(layer): tuple(heads) for layer, heads in chosen.get("exact_kv_heads", {}).items()},
    )


def needle_of(record: EvalRecord) -> dict[int, Needle]:
    """Return what a record of the needle says, by length."""
    cells = cells_of(record)
    return {int(group.at): _found(group, cells) for group in group_cells(cells, "length")}


def _found(group: Group, cells: Sequence[Cell]) -> Needle:
    scored = {round(cell.distance): cell.log_probs for cell in cells if cell.length == group.at and cell.log_probs}
    return Needle(
        accuracy=None if group.accuracy is None else group.accuracy.value,
        key_logprob=None if group.key_logprob is None else group.key_logprob.value,
        num=next(score.num for score in (group.accuracy, group.key_logprob) if score is not None),
        key_logprob_error=None if group.key_logprob is None else group.key_logprob.standard_error,
        by_distance={distance: fmean(values) for distance, values in sorted(scored.items())},
    )


def _texts(records: list[EvalRecord]) -> dict[str, dict[str, tuple[float, float | None]]]:
    texts: dict[str, dict[str, tuple[float, float | None]]] = {}
    for record in records:
        if record.task.startswith("loss"):
            metric = record.metrics["loss"]
            texts.setdefault(record.task, {})[record.model] = (metric.value, metric.standard_error)
    return texts
