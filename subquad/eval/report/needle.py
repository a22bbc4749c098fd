"""The section of a report on the needle in a haystack: heatmaps, and tables by length and by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from subquad.eval.niah import axis_table, cells_of, difference_table, write_niah_plots
from subquad.eval.niah.cells import Axis, CellScore
from subquad.eval.niah.plots import COMPARISONS
from subquad.eval.niah.tables import SCORE_LABELS, NiahTable, model_label
from subquad.eval.records import EvalRecord
from subquad.eval.report.blocks import Block, Cell, Figures, Heading, Missing, Section, Table, Text, cells
from subquad.eval.report.commands import eval_command
from subquad.eval.report.data import RunData
from subquad.eval.report.differences import conditions, differing, is_needle

_SCORES: tuple[CellScore, ...] = ("accuracy", "key_logprob")
_HAYSTACKS = {"filler": "repeated filler", "embedded": "prose of the embedded corpus", "text": "prose of given files"}
_AXES: tuple[Axis, ...] = ("length", "depth")


def needle_section(run: RunData, folder: Path) -> Section:
    """Return the section on all needle tasks.

    Args:
        run: The folder's content.
        folder: Where the heatmaps go.

    Returns:
        The section.

    Raises:
        OutputError: A record has no readable cells.
    """
    blocks: list[Block] = []
    tasks = [(task, by_model) for task, by_model in run.by_task.items() if any(map(is_needle, by_model.values()))]
    for task, by_model in tasks:
        if len(tasks) > 1:
            blocks.append(Heading(f"Task {task}"))
        blocks += _task_blocks(task, list(by_model.values()), folder)
    if not blocks:
        blocks.append(Missing("needle in a haystack", eval_command(run, "niah")))
    return Section("Needle in a haystack", blocks)


def _task_blocks(task: str, records: Sequence[EvalRecord], folder: Path) -> list[Block]:
    first = records[0]
    alike = [record for record in records if not differing(conditions(first), conditions(record))]
    others = [record for record in records if record not in alike]
    blocks: list[Block] = [Text(_words(first))]
    for record in others:
        names = ", ".join(differing(conditions(first), conditions(record)))
        text = f"{model_label(record.model)} was not measured like {model_label(first.model)} ({names}): not compared."
        blocks.append(Text(text))
    plots = write_niah_plots(alike, folder)
    for record in others:
        plots += write_niah_plots([record], folder)
    for score in _SCORES:
        # write_niah_plots names its files so
        shown = [plot for plot in plots if plot.path.name.startswith(f"{task}_{score}_")]
        if shown:
            blocks += [Heading(SCORE_LABELS[score]), Figures(shown, small=True)]
        if any(cell.samples(score) for record in alike for cell in cells_of(record)):
            blocks += [_table(axis_table(alike, axis, score)) for axis in _AXES]
    by_model = {record.model: record for record in alike}
    for pair in COMPARISONS:
        if all(name in by_model for name in pair):
            labels = [model_label(name) for name in pair]
            title = f"{labels[0]} minus {labels[1]}, on the same prompts"
            blocks += [Heading(title), _table(difference_table(by_model[pair[0]], by_model[pair[1]]))]
    notes = [f"{model_label(record.model)}: {note}" for record in records for note in record.notes]
    return [*blocks, *(Text(note, soft=True) for note in notes)]


def _words(record: EvalRecord) -> str:
    """Say what was hidden in what."""
    settings = record.settings
    needle = "a word" if settings.get("needle") == "words" else f"a number of {settings.get('key_digits')} digits"
    if settings.get("paper"):
        needle = "a number from 1 to 10,000, stated twice,"
    haystack, num = _HAYSTACKS.get(settings.get("haystack", ""), "a text"), settings.get("samples")
    return (
        f"The model is asked for {needle} hidden in {haystack}, {num} prompts per length "
        "and depth. Exact answers are what greedy decoding writes, with 95 % Wilson intervals; the log probability "
        "of the key given the prompt is smoother and shows a signal before a model answers exactly."
    )


def _table(table: NiahTable) -> Table:
    rows = [[Cell(row[0], float(row[0].replace(",", ""))), *cells(*row[1:])] for row in table.rows]
    return Table(table.head, rows)
