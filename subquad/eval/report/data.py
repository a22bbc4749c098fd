"""Read what a run or an evaluation left in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from subquad.errors import OutputError
from subquad.eval.records import RECORDS_FOLDER, EvalRecord
from subquad.eval.report.details import load_checked_records
from subquad.eval.report.differences import Difference, metric_differences
from subquad.eval.results import LOSS_LABELS, Results
from subquad.eval.storage import RESULTS_FILE, load_results
from subquad.eval.training_log import TrainingCurve, read_curves

RECIPE_FILE = "recipe.yaml"
ByModel = dict[str, EvalRecord]
ByMetric = dict[str, Difference]


@dataclass(frozen=True)
class RunData:
    """The content of a folder.

    Attributes:
        folder: The folder.
        results: What the run itself measured; None for an evaluation without a run.
        records: Records of the evaluation tasks.
        curves: Training curves.
        log_notes: What could not be read of the training log.
        recipe: The recipe's text; None without one.
    """

    folder: Path
    results: Results | None
    records: Sequence[EvalRecord] = ()
    curves: Sequence[TrainingCurve] = ()
    log_notes: Sequence[str] = ()
    recipe: str | None = None

    @cached_property
    def by_task(self) -> dict[str, ByModel]:
        """Records by task and model, in the order of the tables."""
        by_task: dict[str, ByModel] = {}
        for record in self.records:
            by_task.setdefault(record.task, {})[record.model] = record
        return {task: {name: found[name] for name in in_order(found)} for task, found in by_task.items()}

    @cached_property
    def costs(self) -> dict[str, ByMetric]:
        """Student minus teacher, by task and metric."""
        return self._differences("teacher")

    @cached_property
    def gains(self) -> dict[str, ByMetric]:
        """Student minus window-only control, by task and metric."""
        return self._differences("window_only")

    def _differences(self, other: str) -> dict[str, ByMetric]:
        found = {}
        for task, by_model in self.by_task.items():
            first, second = by_model.get("student"), by_model.get(other)
            found[task] = metric_differences(first, second, self.folder) if first and second else {}
        return found

    @property
    def name(self) -> str:
        """Name of the run, or of the folder."""
        return self.results.name if self.results else self.folder.resolve().name

    @property
    def models(self) -> list[str]:
        """Models of all records and of the run, in the order of the tables."""
        names = {record.model for record in self.records}
        if self.results:
            names |= {name for name in ("teacher", "window_only", "student") if name in self.results.loss.measured()}
        return in_order(names)


def in_order(models: Iterable[str]) -> list[str]:
    """Return names of models: teacher, controls and student first, then the others by name."""
    names = set(models)
    known = [name for name in LOSS_LABELS if name in names]
    return known + sorted(names - set(known))


def load_run(folder: Path) -> RunData:
    """Read a run's folder, or the folder of an evaluation without a run.

    Args:
        folder: The folder.

    Returns:
        What is there.

    Raises:
        OutputError: Neither results nor records are there, or one of them is damaged.
    """
    if not folder.is_dir():
        raise OutputError(f"{folder} is no folder, so there is nothing to report; give that of a run or an evaluation")
    records = load_checked_records(folder)
    if not (folder / RESULTS_FILE).exists():
        if not records:
            raise OutputError(
                f"{folder} has no {RESULTS_FILE} and no {RECORDS_FOLDER}/, so there is nothing to report. Finish the "
                "run, evaluate a checkpoint (subquad eval CHECKPOINT --tasks … --output FOLDER), or give the folder "
                "of a finished one."
            )
        return RunData(folder, None, records, recipe=_recipe_text(folder))
    results = load_results(folder)
    curves, notes = read_curves(folder)
    return RunData(folder, results, records, curves, notes, _recipe_text(folder))


def _recipe_text(folder: Path) -> str | None:
    path = folder / RECIPE_FILE
    return path.read_text(encoding="utf-8", errors="replace").rstrip() if path.is_file() else None
