"""The table a run prints at its end."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from subquad.eval.plots import crossover_sentence
from subquad.eval.report import loss_table, memory_table
from subquad.eval.results import LOSS_LABELS, Results
from subquad.eval.verdict import judge


def print_summary(results: Results, report_path: Path, console: Console | None = None) -> None:
    """Print losses, memory, samples and the verdict of a run; the last line is the path of the report.

    Args:
        results: The run's results.
        report_path: The report to point to.
        console: Where to print; None is standard output.
    """
    console = console or Console()
    console.print(
        _table("Held-out loss", ["Model", "Nats/token", "Perplexity", "Student minus this"], loss_table(results))
    )
    if results.cache_bytes is not None:
        head = ["Tokens", "Key/value cache", "Student", "KV ÷ student", ""]
        console.print(_table("Memory while generating", head, memory_table(results.cache_bytes)))
        console.print(crossover_sentence(results.cache_bytes), highlight=False)
    for sample in results.samples:
        line = Text.assemble(
            (f"{LOSS_LABELS[sample.model]}: ", "bold"), sample.prompt, (re.sub(r"\s+", " ", sample.text), "italic")
        )
        console.print(line)
    verdict = judge(results)
    console.print(Text(verdict.headline, style="bold green" if verdict.success else "bold yellow"))
    # One line of its own, never wrapped, so that it can be copied or read by a script.
    console.print(f"Report: {report_path}", highlight=False, soft_wrap=True, markup=False)


def _table(title: str, head: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
