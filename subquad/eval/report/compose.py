"""Put the parts of a report together: the first screen, then the sections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from subquad.eval.niah.tables import model_label
from subquad.eval.plots import crossover_sentence
from subquad.eval.report.blocks import NOTHING, Bullets, Cell, Report, Section, Table
from subquad.eval.report.data import RunData, in_order
from subquad.eval.report.facts import facts_section, notes_section, sample_section, training_section
from subquad.eval.report.layers import layer_section
from subquad.eval.report.losses import loss_section, memory_section
from subquad.eval.report.measures import Measure, measures_of, mismatches, missing_of, told
from subquad.eval.report.needle import needle_section
from subquad.eval.report.tasks import task_section
from subquad.eval.verdict import Verdict, judge, judge_records

_CAPTION = (
    "± is one standard error, brackets are 95 % intervals; “better” and “worse” are from two standard errors on, "
    "“tie” is below, “open” has no standard error."
)


def compose_report(run: RunData, plots: Path) -> Report:
    """Make the report of one folder.

    Args:
        run: The folder's content.
        plots: Where plots go.

    Returns:
        The report; its plots are written.

    Raises:
        OutputError: A record of the needle task has no readable cells.
    """
    measures = measures_of(run)
    verdict = judge(run.results) if run.results else judge_records(run.records)
    sections = [training_section(run, plots), _with_verdict(loss_section(run, plots), verdict)]
    sections += [needle_section(run, plots), task_section(run, plots), layer_section(run, plots)]
    sections.append(memory_section(run.results, plots))
    if run.results and run.results.samples:
        sections.append(sample_section(run.results))
    sections += [facts_section(run), notes_section(run)]
    return Report(
        title=f"subquad report: {run.name}",
        subtitle=_subtitle(run),
        headline=verdict.headline if verdict else "An evaluation without a converted model.",
        success=verdict.success if verdict else None,
        points=_points(run, measures),
        summary=summary_table(measures),
        missing=missing_of(run),
        sections=sections,
    )


def summary_table(measures: Sequence[Measure]) -> Table:
    """Return the rows of the first screen as a table: a column per model, then what was lost and gained."""
    models = in_order({model for measure in measures for model in measure.values})
    compared = "student" in models
    rows = []
    for measure in measures:
        problem = mismatches(measure)
        note = measure.note + (f"; not measured alike, not compared: {problem}" if problem else "")
        row = [Cell(measure.label, note=note), *(measure.values.get(model, NOTHING) for model in models)]
        rows.append([*row, measure.cost or NOTHING, measure.gain or NOTHING] if compared else row)
    head = ["Measure", *map(model_label, models)]
    return Table([*head, "Cost: student − teacher", "Gain: student − control"] if compared else head, rows, 1, _CAPTION)


def _points(run: RunData, measures: Sequence[Measure]) -> list[str]:
    cost, gain = told(measures, lambda row: row.cost), told(measures, lambda row: row.gain)
    points = [f"Cost against the teacher: {cost}."] if cost else []
    points += [f"Gain over the window-only control: {gain}."] if gain else []
    points += _mixed_weights(run)
    if run.results is None:
        return points
    memory = run.results.cache_bytes
    return [*points, "Memory was not measured." if memory is None else crossover_sentence(memory)]


def _mixed_weights(run: RunData) -> list[str]:
    """Warn of a model that was trained again between two evaluations."""
    found: dict[str, dict[str, list[str]]] = {}
    for record in run.records:
        found.setdefault(record.model, {}).setdefault(record.provenance.weights, []).append(record.task)
    return [
        f"Careful: the records of {model_label(model)} are of different weights: "
        + "; ".join(f"{', '.join(tasks)} of {weights}" for weights, tasks in by_weights.items())
        + ". Evaluate it again."
        for model, by_weights in found.items()
        if len(by_weights) > 1
    ]


def _subtitle(run: RunData) -> str:
    if run.results:
        return f"{run.results.source}, {run.results.created}"
    sources = dict.fromkeys(record.provenance.checkpoint for record in run.records)
    return f"{', '.join(sources)}, {max(record.provenance.created for record in run.records)}"


def _with_verdict(section: Section, verdict: Verdict | None) -> Section:
    return Section(section.title, [*([Bullets(verdict.details)] if verdict else []), *section.blocks])
