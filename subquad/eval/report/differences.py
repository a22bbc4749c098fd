"""How two models differ on a task: paired where the record allows it, and only where both were measured alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from subquad.errors import ConfigError, OutputError
from subquad.eval.finetune import compare_finetuned
from subquad.eval.finetune.run import TASK_PREFIX as FINETUNE_PREFIX
from subquad.eval.harness import paired_difference
from subquad.eval.loss import compare_losses
from subquad.eval.loss_record import is_loss, unpack_loss
from subquad.eval.niah import cells_of
from subquad.eval.niah.cells import Cell as GridCell
from subquad.eval.niah.cells import CellScore, measured_lengths
from subquad.eval.niah.samples import sample_difference
from subquad.eval.niah.stats import mean_and_error
from subquad.eval.records import EvalRecord
from subquad.eval.report.blocks import Cell, Mark
from subquad.eval.results import CLEAR_ERRORS
from subquad.eval.speed.run import CALL
from subquad.eval.speed.timings import TIMINGS, median_error, timings_of

# What a record calls settings but what names the model.
_OF_THE_MODEL = ("checkpoint", "mode")
# Of a needle grid, those a model has room for: a condition of its totals, not of what is paired by prompt.
MEASURED_LENGTHS = "measured lengths"
_GRID_SCORES: tuple[CellScore, ...] = ("accuracy", "key_rank1", "key_logprob")


@dataclass(frozen=True)
class Difference:
    """A metric of one model minus that of another.

    Attributes:
        value: The difference.
        standard_error: Its standard error; None where there is none.
        higher_is_better: Direction of the metric.
        paired: Whether it was taken example by example.
    """

    value: float
    standard_error: float | None
    higher_is_better: bool
    paired: bool

    @property
    def mark(self) -> Mark:
        """What it says: `tie` below two standard errors, `open` without one."""
        if self.standard_error is None:
            return "open"
        if self.value == 0 or abs(self.value) < CLEAR_ERRORS * self.standard_error:
            return "tie"
        return "better" if (self.value > 0) == self.higher_is_better else "worse"

    def cell(self, decimals: int) -> Cell:
        """Return it as a cell, such as `-0.0278 ± 0.0022` with its mark."""
        return Cell(format_number(self.value, self.standard_error, decimals, "+"), self.value, self.mark)


def format_number(value: float, standard_error: float | None, decimals: int, sign: str = "") -> str:
    """Return a number with its standard error, such as `0.560 ± 0.035`; an error of 0 is not shown."""
    error = ""
    if standard_error:
        text = f"{standard_error:.{decimals}f}"
        error = f" ± <{10**-decimals:.{decimals}f}" if float(text) == 0 else f" ± {text}"
    return f"{value:{sign},.{decimals}f}{error}"


def decimals_of(metric: str) -> int:
    """Return how many decimals a metric is shown with."""
    if "perplexity" in metric or "logprob" in metric:
        return 2
    return 4 if metric in ("loss", "bits_per_byte", "relative_error") else 3


def conditions(record: EvalRecord) -> dict[str, Any]:
    """Return everything two records must share to be compared: settings, prompts and data type."""
    settings = {name: value for name, value in record.settings.items() if name not in _OF_THE_MODEL}
    settings.setdefault("dtype", record.provenance.dtype)
    return {**settings, "prompts": record.provenance.prompts_hash}


def measured_on(record: EvalRecord) -> dict[str, Any]:
    """Return what two records' totals must share beyond `conditions`: the lengths of a needle grid, else nothing."""
    return {MEASURED_LENGTHS: measured_lengths(record)} if is_needle(record) else {}


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names of the conditions that are not equal."""
    names = list(dict.fromkeys([*first, *second]))
    return [name for name in names if _plain(first.get(name)) != _plain(second.get(name))]


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def metric_differences(first: EvalRecord, second: EvalRecord, folder: Path) -> dict[str, Difference]:
    """Return first - second for every metric both have; nothing where they were not measured alike.

    They are compared example by example. Where the examples are not kept (lm-eval's sample files were removed), the
    standard error takes the two models as independent, which is on the safe side.

    Args:
        first: Record of one model.
        second: Record of another, of the same task.
        folder: The evaluation folder both are from.

    Returns:
        Differences by metric.

    Raises:
        OutputError: A record of the needle task has no readable cells.
    """
    if differing(conditions(first), conditions(second)):
        return {}
    if is_speed(first) and is_speed(second):
        return _speed_differences(first, second)
    found = {}
    for name, metric in first.metrics.items():
        other = second.metrics.get(name)
        if other is None:
            continue
        errors = (metric.standard_error, other.standard_error)
        error = None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
        found[name] = Difference(metric.value - other.value, error, metric.higher_is_better, paired=False)
    return {**found, **_paired(first, second, folder)}


def _paired(first: EvalRecord, second: EvalRecord, folder: Path) -> dict[str, Difference]:
    if is_loss(first) and is_loss(second):
        return _loss_differences(first, second)
    if is_needle(first) and is_needle(second):
        return _needle_differences(first, second, folder)
    if first.task.startswith(FINETUNE_PREFIX) and first.metrics and second.metrics:
        metrics = compare_finetuned(first, second)
        return {name: Difference(m.value, m.standard_error, True, paired=True) for name, m in metrics.items()}
    return _lm_eval_differences(first, second, folder)


def _lm_eval_differences(first: EvalRecord, second: EvalRecord, folder: Path) -> dict[str, Difference]:
    found = {}
    for name, metric in first.metrics.items():
        try:
            pair = paired_difference(folder, first, second, name)
        except (ConfigError, OutputError):
            # No metric by document: another kind of task, or the documents' scores are not here.
            continue
        found[name] = Difference(pair.difference, pair.standard_error, metric.higher_is_better, paired=True)
    return found


def _loss_differences(first: EvalRecord, second: EvalRecord) -> dict[str, Difference]:
    pair = compare_losses(unpack_loss(first.details), unpack_loss(second.details))
    mine, theirs = first.metrics["perplexity"].value, second.metrics["perplexity"].value
    # The error of exp(loss) to first order; what both perplexities share cancels in the paired difference.
    error = None if pair.standard_error is None else pair.standard_error * mine
    return {
        "loss": Difference(pair.difference, pair.standard_error, False, paired=True),
        "perplexity": Difference(mine - theirs, error, False, paired=True),
    }


def _needle_differences(first: EvalRecord, second: EvalRecord, folder: Path) -> dict[str, Difference]:
    pairs = common_cells([first, second])
    found: dict[str, Difference] = {}
    for score in _GRID_SCORES:
        values = [
            mine - theirs
            for one, other in zip(*pairs, strict=True)
            for mine, theirs in zip(one.samples(score) or (), other.samples(score) or (), strict=False)
        ]
        if values:
            value, error = mean_and_error(values)
            found[score] = Difference(value, error, True, paired=True)
    # The cells do not hold the others by prompt; the samples do.
    for name in [name for name in first.metrics if name in second.metrics and name not in found]:
        pair = sample_difference(folder, first, second, name)
        if pair is not None:
            found[name] = Difference(*pair, higher_is_better=True, paired=True)
    return found


def _speed_differences(first: EvalRecord, second: EvalRecord) -> dict[str, Difference]:
    """Return by how much two ratios to the teacher differ, round by round; the teacher's own is 1."""
    if first.details[CALL] != second.details[CALL]:
        return {}
    theirs = {timing.metric_name: timing.ratios for timing in timings_of(second)}
    found = {}
    for timing in timings_of(first):
        name = timing.metric_name
        if not timing.ratios or name not in theirs:
            continue
        others = theirs[name] or (1.0,) * len(timing.ratios)
        values = [mine - other for mine, other in zip(timing.ratios, others, strict=True)]
        found[name] = Difference(median(values), median_error(values), True, paired=True)
    return found


def common_cells(records: Sequence[EvalRecord]) -> list[list[GridCell]]:
    """Return the cells of a needle grid that were measured for all of several models.

    Args:
        records: Records of one needle task.

    Returns:
        For each record its cells at the same lengths and depths, in the same order.

    Raises:
        OutputError: A record has no readable cells.
    """
    grids = [{(cell.length, cell.depth): cell for cell in cells_of(record)} for record in records]
    shared = [place for place in grids[0] if all(place in grid for grid in grids)]
    return [[grid[place] for place in shared] for grid in grids]


def is_needle(record: EvalRecord) -> bool:
    """Return whether it is a record of `run_niah`."""
    return "cells" in record.details


def is_speed(record: EvalRecord) -> bool:
    """Return whether it is a record of `run_speed`."""
    return TIMINGS in record.details and CALL in record.details
