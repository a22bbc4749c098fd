"""GLUE through lm-eval: its tasks, their local files, and the average over them.

Wang et al. 2018, "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding". Scores are
those of the paper: Matthews correlation for CoLA, accuracy and F1 for MRPC and QQP, accuracy for the others, MNLI on
its matched and its mismatched half. STS-B is a regression and has no lm-eval task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.eval.data_files import LocalData, SplitFiles, find_split
from subquad.eval.glue_data import GLUE_TASKS, GlueSplit, GlueTask, load_glue
from subquad.eval.records import EvalRecord

if TYPE_CHECKING:
    pass

# lm-eval's task -> GLUE's task and the split that is scored
LM_EVAL_TASKS: Mapping[str, tuple[GlueTask, GlueSplit]] = {
    "cola": ("cola", "validation"),
    "sst2": ("sst2", "validation"),
    "mrpc": ("mrpc", "validation"),
    "qqp": ("qqp", "validation"),
    "mnli": ("mnli", "validation_matched"),
    "mnli_mismatch": ("mnli", "validation_mismatched"),
    "qnli": ("qnli", "validation"),
    "rte": ("rte", "validation"),
    "wnli": ("wnli", "validation"),
}
_METRICS: Mapping[str, tuple[str, ...]] = {"cola": ("mcc",), "mrpc": ("acc", "f1"), "qqp": ("acc", "f1")}


def glue_metrics(task: str) -> tuple[str, ...]:
    """Return the metrics GLUE reports for a task, by lm-eval's names."""
    return _METRICS.get(task, ("acc",))


def load_glue_task(task: str, data_dirs: Sequence[Path], *, train: bool) -> LocalData:
    """Read the data of one of lm-eval's GLUE tasks from local files.

    Args:
        task: A name in `LM_EVAL_TASKS`.
        data_dirs: Folders to search, in order; `subquad.eval.glue_data.load_glue` has the layouts.
        train: Whether the training split is needed.

    Returns:
        The splits under the hub's names.

    Raises:
        MissingFilesError: A split is in none of the folders.
        DataError: A file is damaged, lacks a column, or holds a label that is none.
    """
    name, scored = LM_EVAL_TASKS[task]
    wanted: tuple[GlueSplit, ...] = (scored, "train") if train else (scored,)
    found = {split: _files(name, split, data_dirs) for split in wanted}
    from datasets import DatasetDict

    dataset = DatasetDict({split: load_glue(name, split, files.folder) for split, files in found.items()})
    return LocalData(dataset, scored, {split: files.hashes() for split, files in found.items()})


def _files(name: GlueTask, split: GlueSplit, data_dirs: Sequence[Path]) -> SplitFiles:
    official = split.replace("validation", "dev")
    patterns = [
        f"{folder}/{file}"
        for folder in (name, GLUE_TASKS[name].folder)
        for file in (f"{split}-*.parquet", f"{split}.parquet", f"{split}.jsonl", f"{official}.tsv")
    ]
    return find_split(name, split, data_dirs, patterns)


@dataclass(frozen=True)
class GlueAverage:
    """The mean over GLUE's tasks of one model; only averages over the same tasks can be compared.

    Attributes:
        value: Mean of the tasks' scores, each the mean of its metrics; MNLI is the mean of its halves.
        standard_error: Of `value`, at most: what is measured on one task counts as fully correlated. None where a
            metric has none.
        tasks: What it is made of, by lm-eval's names.
        absent: The tasks that were not measured.
    """

    value: float
    standard_error: float | None
    tasks: tuple[str, ...]
    absent: tuple[str, ...]


def glue_average(records: Iterable[EvalRecord], *, prefix: str = "") -> dict[str, GlueAverage]:
    """Average GLUE over its tasks, as its paper does.

    Args:
        records: Records of any tasks.
        prefix: What stands before the task in a record's name; empty for the zero- and few-shot tasks.

    Returns:
        The average by model, for every model that has a task of GLUE.
    """
    found: dict[str, dict[str, EvalRecord]] = {}
    for record in records:
        task = record.task.removeprefix(prefix)
        if (
            record.task.startswith(prefix)
            and task in LM_EVAL_TASKS
            and all(m in record.metrics for m in glue_metrics(task))
        ):
            found.setdefault(record.model, {})[task] = record
    return {model: _average(by_task) for model, by_task in found.items()}


def _average(records: Mapping[str, EvalRecord]) -> GlueAverage:
    halves: dict[str, list[tuple[float, float | None]]] = {}
    for task, record in records.items():
        metrics = [record.metrics[name] for name in glue_metrics(task)]
        score = sum(metric.value for metric in metrics) / len(metrics)
        halves.setdefault(LM_EVAL_TASKS[task][0], []).append((score, _mean([m.standard_error for m in metrics])))
    scores = [sum(value for value, _ in parts) / len(parts) for parts in halves.values()]
    errors = [_mean([error for _, error in parts]) for parts in halves.values()]
    known = [error for error in errors if error is not None]
    return GlueAverage(
        value=sum(scores) / len(scores),
        standard_error=math.hypot(*known) / len(scores) if len(known) == len(errors) else None,
        tasks=tuple(task for task in LM_EVAL_TASKS if task in records),
        absent=tuple(task for task in LM_EVAL_TASKS if task not in records),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
