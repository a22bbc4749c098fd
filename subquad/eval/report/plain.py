"""The figures of a report as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subquad.eval.report.data import RunData


def report_to_dict(run: RunData) -> dict[str, Any]:
    """Return the content of `results.json` with the metrics of all records under `evals`: task, model, metric."""
    results = {} if run.results is None else run.results.model_dump(mode="json")
    evals = {
        task: {
            model: {name: metric.model_dump(mode="json") for name, metric in record.metrics.items()}
            for model, record in by_model.items()
        }
        for task, by_model in run.by_task.items()
    }
    return {"name": run.name, **results, "evals": evals}


def comparison_to_dict(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return `report_to_dict` of several runs by their folders."""
    return {str(run.folder): report_to_dict(run) for run in runs}
