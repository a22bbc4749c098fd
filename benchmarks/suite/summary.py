"""The compact tables at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.suite.rows import Row

_WIDTH = 150
_REASON_CHARACTERS = 220


def print_summary(rows: list[Row], console: Console | None = None) -> None:
    """Print what a reader wants to know first: what failed, then errors, speeds and ratios.

    Args:
        rows: All rows of the run.
        console: Where to; None is standard output, 150 columns wide.
    """
    console = console or Console(width=_WIDTH, highlight=False)
    for title, make in _TABLES.items():
        table = make(rows)
        if table.row_count:
            console.print(f"\n{title}")
            console.print(table)
    console.print()
    _print_failures(rows, console)
    counts = Counter(row.status for row in rows)
    console.print("rows: " + ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "error", "skipped")))


def _print_failures(rows: list[Row], console: Console) -> None:
    for row in rows:
        if row.failed:
            reason = row.reason.splitlines()[0] if row.reason else ""
            text = f"{row.status.upper()} {row.section} / {row.case} / {row.what}: {reason[:_REASON_CHARACTERS]}"
            console.print(text, markup=False)
    wrong = [row for row in rows if row.failed and ("worst" in row.metrics or row.section in ("correctness", "models"))]
    if wrong and any("median_ms" in row.metrics for row in rows):
        console.print(f"{len(wrong)} checks did not hold: the speeds above are those of wrong or failing kernels.")
    late = Counter(row.section for row in rows if row.status == "skipped" and "time was up" in row.reason)
    for section, count in late.items():
        console.print(f"{section}: {count} cases were not started, the section's time was up")


def _errors(rows: list[Row]) -> Table:
    table = _table("section", "dtype", "rows", "worst", "of", "failed")
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if "worst" in row.metrics:
            groups[row.section, row.config["dtype"]].append(row)
    for (section, dtype), members in groups.items():
        worst = max(members, key=lambda row: row.metrics["worst"])
        failed = sum(row.failed for row in members)
        _add(table, section, dtype, len(members), worst.metrics["worst"], f"{worst.case} {worst.what}", failed)
    return table


def _speeds(rows: list[Row]) -> Table:
    passes = [row for row in rows if row.section == "timings" and row.what == "subquad" and row.status == "ok"]
    lengths = sorted({row.config["tokens"] for row in passes})
    columns = [_tokens(length) for length in lengths]
    table = _table("pass", "d", "G", *columns)
    for key, members in _grouped(passes, ("pass", "head_dim", "groups")).items():
        cells = {row.config["tokens"]: _ratio_and_share(row) for row in members}
        _add(table, *key, *(cells.get(length, "") for length in lengths))
    return table


def _ratio_and_share(row: Row) -> str:
    ratio = row.metrics.get("speedup_vs_sdpa")
    share = row.metrics.get("share_of_matmul")
    return f"{'-' if ratio is None else f'{ratio:.2f}'} ({'-' if share is None else f'{100 * share:.0f}'})"


def _decoding(rows: list[Row]) -> Table:
    steps = [row for row in rows if row.what in ("subquad_step", "subquad_buffered") and row.status == "ok"]
    table = _table("kind", "d", "G", "batch", "us", "GB/s", "time / bandwidth floor", "enqueue us")
    for row in steps:
        metrics = row.metrics
        times = 1e3 * metrics["median_ms"], metrics["gbps"], metrics.get("over_bandwidth_floor")
        sizes = (row.config[name] for name in ("head_dim", "groups", "batch"))
        _add(table, row.what, *sizes, *times, 1e3 * metrics["enqueue_ms"])
    return table


def _ends(rows: list[Row]) -> Table:
    table = _table("case", "mode", "tokens/s", "against teacher", "prefill ms", "peak GiB")
    for row in rows:
        if row.section == "end_to_end" and row.status == "ok":
            metrics = row.metrics
            peak = metrics.get("peak_bytes")
            _add(
                table,
                row.case,
                row.what,
                metrics["tokens_per_s"],
                metrics.get("speedup_vs_teacher"),
                metrics.get("prefill_ms"),
                None if peak is None else peak / 2**30,
            )
    return table


def _lengths(rows: list[Row]) -> Table:
    table = _table("what", "pass", "d", "G", "batch", "kind", "from")
    for row in rows:
        if row.case == "summary" and "length" in row.metrics:
            sizes = (row.config.get(name, "") for name in ("pass", "head_dim", "groups", "batch", "kind"))
            length = row.metrics["length"]
            longest = max(row.metrics["ratios"], default=0)
            _add(table, row.what, *sizes, f"beyond {longest}" if length is None else round(length))
    return table


def _targets(rows: list[Row]) -> Table:
    table = _table("target", "measured", "wanted", "reached")
    for row in rows:
        if row.what == "target":
            reached = "yes" if row.metrics["reached"] else "no"
            _add(table, row.config["target"], row.metrics["value"], row.metrics["wanted"], reached)
    return table


def _grouped(rows: Iterable[Row], names: tuple[str, ...]) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.config[name] for name in names)].append(row)
    return groups


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _add(table: Table, *cells: Any) -> None:
    table.add_row(*("-" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))


def _tokens(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


_TABLES: Mapping[str, Callable[[list[Row]], Table]] = {
    "errors over their limits (above 1 fails)": _errors,
    "speed against flash attention, and (share of the matmul peak in %), by tokens": _speeds,
    "decoding one token": _decoding,
    "1B model": _ends,
    "faster from so many tokens on": _lengths,
    "targets (H200, bf16, d = 64, G = 4)": _targets,
}
