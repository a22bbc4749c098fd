"""A row of the first screen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from subquad.eval.metric_text import extreme_interval, metric_text
from subquad.eval.records import Metric
from subquad.eval.report.blocks import Cell
from subquad.eval.report.differences import format_number


@dataclass(frozen=True)
class Measure:
    """A row of the summary.

    Attributes:
        label: What it is.
        values: A cell per model.
        note: On what it was measured.
        cost: Student minus teacher.
        gain: Student minus the window-only control.
        told: What the sentences above the table call it; empty where they leave it out.
        task: The task, where the label does not say it.
        conditions: What must be equal to compare models and runs, by model.
    """

    label: str
    values: dict[str, Cell]
    note: str = ""
    cost: Cell | None = None
    gain: Cell | None = None
    told: str = ""
    task: str = ""
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The label with the task: what tells it from the other rows."""
        return f"{self.label} ({self.task})" if self.task else self.label


def metric_cell(name: str, metric: Metric, decimals: int) -> Cell:
    """Return a metric with its standard error as a cell; a share at 0 or 1 with its interval."""
    if extreme_interval(name, metric):
        return Cell(metric_text(name, metric, decimals), metric.value)
    return Cell(format_number(metric.value, metric.standard_error, decimals), metric.value)
