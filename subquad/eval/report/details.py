"""Check what records hold beside their metrics, so that a damaged one is named before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from subquad.errors import OutputError
from subquad.eval.finetune.run import TASK_PREFIX as FINETUNE_PREFIX
from subquad.eval.layers import TASK as LAYERS_TASK
from subquad.eval.layers import layers_of
from subquad.eval.loss_record import unpack_loss
from subquad.eval.niah import cells_of
from subquad.eval.records import EvalRecord, load_record, record_files
from subquad.eval.speed.run import CALL
from subquad.eval.speed.run import TASK as SPEED_TASK
from subquad.eval.speed.timings import timings_of

_SAME_LOSS = 1e-6


def load_checked_records(folder: Path) -> list[EvalRecord]:
    """Read all records of an evaluation folder, and check their details.

    Args:
        folder: The evaluation folder.

    Returns:
        The records by task and model.

    Raises:
        OutputError: One of them is damaged; names its file and what is wrong.
    """
    records = []
    for path in record_files(folder):
        record = load_record(path)
        try:
            _check(record)
        except OutputError as error:
            raise OutputError(f"{path} is damaged: {error} Remove it and evaluate again.") from error
        records.append(record)
    return records


def _check(record: EvalRecord) -> None:
    for belongs, check in _CHECKS:
        if belongs(record):
            check(record)


def _check_loss(record: EvalRecord) -> None:
    """Hold the sums of every row against the metric that was made of them."""
    if "perplexity" not in record.metrics:
        raise OutputError("it has no metric perplexity.")
    result = unpack_loss(record.details)
    metric = record.metrics["loss"]
    if result.num_tokens != metric.num:
        raise OutputError(f"its rows hold {result.num_tokens:,} tokens, its loss is of {metric.num:,}.")
    if not math.isclose(result.loss, metric.value, rel_tol=_SAME_LOSS):
        raise OutputError(f"its rows give a loss of {result.loss:.6g}, its metric is {metric.value:.6g}.")


def _check_needle(record: EvalRecord) -> None:
    missing = [name for name in ("lengths", "depths", "samples") if name not in record.settings]
    if missing:
        raise OutputError(f"its settings lack {', '.join(missing)}.")
    num = record.settings["samples"]
    for cell in cells_of(record):
        for name in ("exact", "rank1", "log_probs"):
            values = getattr(cell, name)
            if values is not None and len(values) != num:
                place = f"length {cell.length:,} and depth {cell.depth:g}"
                raise OutputError(f"the cell of {place} has {len(values)} values of {name}, it must have {num}.")


def _check_speed(record: EvalRecord) -> None:
    if CALL not in record.details:
        raise OutputError(f"details.{CALL} is missing.")
    timings = timings_of(record)
    lacking = [name for name in record.metrics if name not in {t.metric_name for t in timings if t.ratios}]
    if lacking:
        raise OutputError(f"details.timings has no ratios for {', '.join(lacking)}.")
    for timing in timings:
        if len(timing.ratios) not in (0, len(timing.seconds)):
            raise OutputError(f"{timing.metric_name}: {len(timing.ratios)} ratios of {len(timing.seconds)} rounds.")


def _check_layers(record: EvalRecord) -> None:
    layers_of(record)
    if not isinstance(record.settings.get("tokens"), int):
        raise OutputError("its settings lack the number of tokens.")


def _check_finetuned(record: EvalRecord) -> None:
    labels, seeds = record.details.get("labels"), record.details.get("seeds")
    if not isinstance(labels, str) or not isinstance(seeds, list) or not seeds:
        raise OutputError("its details lack labels or seeds.")
    rows = [labels, *(seed.get("predictions") if isinstance(seed, dict) else None for seed in seeds)]
    # a digit for each row of the data
    if not all(isinstance(row, str) and row.isdecimal() and len(row) == len(labels) for row in rows):
        raise OutputError(f"its predictions must be {len(labels)} digits for each seed, as many as its labels.")


# What tells a kind is not what may be damaged.
_CHECKS: tuple[tuple[Callable[[EvalRecord], bool], Callable[[EvalRecord], None]], ...] = (
    (lambda record: "rows_hash" in record.settings and "loss" in record.metrics, _check_loss),
    (lambda record: "haystack" in record.settings or "cells" in record.details, _check_needle),
    (lambda record: record.task == SPEED_TASK, _check_speed),
    (lambda record: record.task == LAYERS_TASK, _check_layers),
    (lambda record: record.task.startswith(FINETUNE_PREFIX) and bool(record.metrics), _check_finetuned),
)
