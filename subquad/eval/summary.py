"""The tables a run prints at its end, and a report on the console."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from subquad.console import open_console
from subquad.eval.plots import crossover_sentence
from subquad.eval.report import (
    LOSS_HEAD,
    MEMORY_HEAD,
    RunData,
    compose_comparison,
    loss_table,
    measures_of,
    memory_table,
    summary_table,
)
from subquad.eval.report.blocks import Cell
from subquad.eval.report.blocks import Table as ReportTable
from subquad.eval.results import LOSS_LABELS, Results
from subquad.eval.verdict import Verdict, judge, judge_records


def print_summary(results: Results, report_path: Path, console: Console | None = None) -> None:
    """Print losses, memory, samples and the verdict of a run; the last line is the path of the report.

    Args:
        results: The run's results.
        report_path: The report to point to.
        console: Where to print; None is standard output.
    """
    console = console or open_console()
    console.print(_table("Held-out loss", LOSS_HEAD, loss_table(results)))
    if results.cache_bytes is not None:
        console.print(_table("Memory while generating", MEMORY_HEAD, memory_table(results.cache_bytes)))
        console.print(crossover_sentence(results.cache_bytes), highlight=False)
    for sample in results.samples:
        line = Text.assemble(
            (f"{LOSS_LABELS[sample.model]}: ", "bold"), sample.prompt, (re.sub(r"\s+", " ", sample.text), "italic")
        )
        console.print(line)
    _print_end(judge(results), report_path, console)


def print_report(run: RunData, report_path: Path, console: Console | None = None) -> None:
    """Print the first screen of a report: what was measured on every model; the last line is its path.

    Args:
        run: The folder's content.
        report_path: The report to point to.
        console: Where to print; None is standard output.
    """
    if run.results is not None and not run.records:
        print_summary(run.results, report_path, console)
        return
    console = console or open_console()
    console.print(_report_table("Cost and gain", summary_table(measures_of(run))))
    _print_end(judge(run.results) if run.results else judge_records(run.records), report_path, console)


def print_comparison(runs: Sequence[RunData], report_path: Path, console: Console | None = None) -> None:
    """Print the rows of several runs side by side; the last line is the path of the page.

    Args:
        runs: At least two.
        report_path: The page to point to.
        console: Where to print; None is standard output.
    """
    console = console or open_console()
    comparison = compose_comparison(runs)
    console.print(_report_table("Runs side by side", comparison.summary))
    console.print(Text("\n".join(comparison.points)))
    _print_end(None, report_path, console)


def _report_table(title: str, table: ReportTable) -> Table:
    found = Table(title=title, title_justify="left")
    for index, name in enumerate(table.head):
        found.add_column(name, justify="left" if index == 0 else "right", overflow="fold", min_width=9)
    for row in table.rows:
        found.add_row(*map(_cell_text, row))
    return found


def _cell_text(cell: Cell) -> Text:
    note = f"\n{cell.note}" if cell.note else ""
    return Text.assemble(f"{cell.text} {cell.word}".rstrip(), (note, "dim"))


def _print_end(verdict: Verdict | None, report_path: Path, console: Console) -> None:
    if verdict is not None:
        console.print(Text(verdict.headline, style="bold green" if verdict.success else "bold yellow"))
    # One line of its own, never wrapped, so that it can be copied or read by a script.
    console.print(f"Report: {report_path}", highlight=False, soft_wrap=True, markup=False)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
