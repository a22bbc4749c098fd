"""The section of a report with every number of every task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from subquad.eval.finetune import plot_finetuned
from subquad.eval.finetune.run import TASK_PREFIX as FINETUNE_PREFIX
from subquad.eval.glue import LM_EVAL_TASKS
from subquad.eval.metric_text import extreme_interval, metric_text
from subquad.eval.niah.tables import model_label
from subquad.eval.records import EvalRecord, Metric
from subquad.eval.report.blocks import NOTHING, Block, Bullets, Cell, Figures, Heading, Missing, Section, Table
from subquad.eval.report.commands import eval_command
from subquad.eval.report.data import ByModel, RunData
from subquad.eval.report.differences import MEASURED_LENGTHS, Difference, decimals_of, differing, is_needle
from subquad.eval.report.measures import metric_rows, mismatches
from subquad.eval.report.rows import Measure
from subquad.eval.results import CLEAR_ERRORS

AT_BASELINE = "°"
_LAYERS = "layers"


def task_section(run: RunData, folder: Path) -> Section:
    """Return the table of every task and metric, with what is missing of GLUE.

    Args:
        run: The folder's content.
        folder: Where the plot of fine-tuned GLUE goes.

    Returns:
        The section.
    """
    blocks: list[Block] = []
    tasks = {task: by_model for task, by_model in run.by_task.items() if task != _LAYERS}
    models = [name for name in run.models if any(name in by_model for by_model in tasks.values())]
    if tasks:
        blocks.append(_table(run, tasks, models))
    finetuned = [r for r in run.records if r.task.startswith(FINETUNE_PREFIX) and r.metrics]
    if finetuned:
        blocks += [Heading("GLUE after fine-tuning"), Figures([plot_finetuned(finetuned, folder / "finetuned.png")])]
    else:
        blocks.append(Missing("GLUE, fine-tuned", eval_command(run, "glue-finetune")))
    if not any(record.task in LM_EVAL_TASKS and record.metrics for record in run.records):
        blocks.append(Missing("GLUE, zero-shot", eval_command(run, "glue")))
    notes = _notes(run, tasks)
    if notes:
        blocks += [Heading("Notes on these numbers"), Bullets(notes)]
    return Section("Every task", blocks)


def _table(run: RunData, tasks: dict[str, ByModel], models: Sequence[str]) -> Table:
    head = ["Task", "Metric", "n", "Baseline", *map(model_label, models), "Student − teacher", "Student − control"]
    rows: list[list[Cell]] = []
    for task, by_model in tasks.items():
        measured = metric_rows(run, task, None)
        for row in measured:
            name = row.label.removeprefix(f"{task}: ")
            metrics = {model: r.metrics[name] for model, r in by_model.items() if name in r.metrics}
            baselines = {r.baselines[name] for r in by_model.values() if name in r.baselines}
            numbers = [_score(metrics.get(m), by_model.get(m), name) for m in models]
            baseline = min(baselines) if len(baselines) == 1 else None
            shown = NOTHING if baseline is None else Cell(_short(baseline, decimals_of(name)), baseline)
            num = max(metric.num for metric in metrics.values())
            differences = [row.cost or NOTHING, row.gain or NOTHING]
            rows.append([Cell(task), Cell(name), Cell(f"{num:,}", num), shown, *numbers, *differences])
        if not measured:
            rows.append([Cell(task), Cell("not measured"), *[NOTHING] * (len(models) + 4)])
    caption = (
        f"± is one standard error. A difference is called better or worse from {CLEAR_ERRORS:g} standard errors on, "
        "and a tie below; it is open where there is no standard error. The baseline is what one and the same answer to "
        f"every question scores, or a guess; {AT_BASELINE}: within {CLEAR_ERRORS:g} standard errors of it, or in the "
        "95 % interval (brackets) that a share of 0 or 1 has in place of an error. Models are "
        "compared example by example; where a metric has no examples on file, the error of a difference takes the "
        "models as independent, which is on the safe side."
    )
    return Table(head, rows, text_columns=2, caption=caption)


def _short(value: float, decimals: int) -> str:
    """Return a baseline; one that rounds to 0 shows its size."""
    text = f"{value:.{decimals}f}"
    return f"{value:.1g}" if value and float(text) == 0 else text


def _score(metric: Metric | None, record: EvalRecord | None, name: str) -> Cell:
    if metric is None or record is None:
        return NOTHING
    decimals = decimals_of(name)
    mark = AT_BASELINE if _at_baseline(name, metric, record.baselines.get(name)) else ""
    if extreme_interval(name, metric):
        return Cell(metric_text(name, metric, decimals) + mark, metric.value)
    error = f" ± {metric.standard_error:.{decimals}f}" if metric.standard_error else ""
    return Cell(f"{_short(metric.value, decimals)}{error}{mark}", metric.value)


def _at_baseline(name: str, metric: Metric, baseline: float | None) -> bool:
    if baseline is None:
        return False
    interval = extreme_interval(name, metric)
    if interval is not None:
        return interval[0] <= baseline <= interval[1]
    difference = metric.value - baseline
    return difference == 0 or Difference(difference, metric.standard_error, True, False).mark == "tie"


def _notes(run: RunData, tasks: dict[str, ByModel]) -> list[str]:
    """Return the notes of all records, once each with the models they are of, and what was not measured alike."""
    found = []
    for task, by_model in tasks.items():
        if any(is_needle(record) for record in by_model.values()):
            continue
        said: dict[str, list[str]] = {}
        for model, record in by_model.items():
            for note in record.notes:
                said.setdefault(note, []).append(model_label(model))
        found += [f"{task} ({_names(names, by_model)}): {note}" for note, names in said.items()]
    for task in tasks:
        rows = metric_rows(run, task, None)
        problem = mismatches(rows[0]) if rows else ""
        if problem and _only_lengths(rows[0]):
            text = "scores are over the lengths each model has room for, differences over those both have"
            found.append(f"{task}: {text}: {problem}.")
        elif problem:
            found.append(f"{task} was not measured alike, so there is no difference: {problem}.")
    return found


def _only_lengths(row: Measure) -> bool:
    """Return whether the models of a row differ in nothing but the lengths of a needle grid."""
    first, *others = row.conditions.values()
    return all(set(differing(first, other)) <= {MEASURED_LENGTHS} for other in others)


def _names(names: Sequence[str], by_model: ByModel) -> str:
    return "all models" if len(names) == len(by_model) > 1 else ", ".join(names)
