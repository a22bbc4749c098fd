"""Fine-tuned GLUE in one picture: every score with its error beside what a constant answer scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from matplotlib.ticker import PercentFormatter

from subquad.errors import ConfigError
from subquad.eval.finetune.run import TASK_PREFIX
from subquad.eval.plots import Plot
from subquad.eval.records import EvalRecord
from subquad.eval.results import LOSS_LABELS, LossName
from subquad.eval.style import GREY, new_figure, save_figure, series_look

_SPREAD = 0.6


def plot_finetuned(records: Sequence[EvalRecord], path: Path) -> Plot:
    """Draw every metric of every task for every model, with standard errors and the constant answer's score.

    Args:
        records: Records of any tasks; those that are not of fine-tuned GLUE are left out.
        path: PNG to write.

    Returns:
        The plot.

    Raises:
        ConfigError: There is no record of fine-tuned GLUE.
    """
    records = [record for record in records if record.task.startswith(TASK_PREFIX)]
    if not records:
        raise ConfigError(f"there is nothing to plot: no record's task begins with {TASK_PREFIX}")
    slots = sorted({(record.task, name) for record in records for name in record.metrics})
    models = _in_order({record.model for record in records})
    title = "GLUE after fine-tuning with the same budget"
    figure, axes = new_figure(title, "Task and metric", "Score")
    for place, model in enumerate(models):
        color, marker, _ = series_look(model, models)
        offset = _SPREAD * ((place + 0.5) / len(models) - 0.5)
        points = [
            (slots.index((record.task, name)) + offset, metric.value, metric.standard_error or 0.0)
            for record in records
            if record.model == model
            for name, metric in record.metrics.items()
        ]
        x, y, errors = zip(*points, strict=True)
        label = LOSS_LABELS.get(cast(LossName, model), model)
        axes.errorbar(x, y, errors, color=color, marker=marker, linestyle="none", capsize=3, markersize=7, label=label)
    baselines = {(record.task, name): value for record in records for name, value in record.baselines.items()}
    for index, slot in enumerate(slots):
        line = axes.hlines(baselines[slot], index - 0.45, index + 0.45, color=GREY, linestyle="--", linewidth=1.5)
        if index == 0:
            line.set_label("one answer to every row")
    names = [(task.removeprefix(TASK_PREFIX).replace("_", "\n"), name) for task, name in slots]
    axes.set_xticks(range(len(slots)), [f"{task}\n{name}" for task, name in names])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=10)
    save_figure(figure, path)
    return Plot(path, title, "Bars are standard errors; dashed is the best score of one and the same answer.")


def _in_order(models: set[str]) -> list[str]:
    known = [name for name in LOSS_LABELS if name in models]
    return known + sorted(models - set(known))
