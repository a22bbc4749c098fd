"""The plots of a study of conversions: loss and needle over the bytes of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter

from benchmarks.quality.rows import Row
from benchmarks.quality.table import kv_bytes, longest
from subquad.eval.niah.stats import wilson_interval
from subquad.eval.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, new_figure, save_figure

_COLORS = (BLUE, ORANGE, GREEN, RED, GREY)
_MARKERS = ("o", "s", "^", "D")
_MIB = 2**20
# A loss so far above every control (nats) would press all others into a line.
_MOST_ABOVE_CONTROL = 0.5


class Point(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


def plot_frontier(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw loss, and accuracy of the needle, over the bytes of the cache.

    The interval of a loss is one standard error of its difference from the teacher's, over the same rows; that of an
    accuracy is Wilson's at 95 %.

    Args:
        rows: finished runs.
        folder: where to write `frontier-loss.png` and, where it was measured, `frontier-needle.png`.

    Returns:
        The files.
    """
    loss = {index: loss_point(row) for index, row in enumerate(rows)}
    controls = [row.results.loss.window_only for row in rows if row.results.loss.window_only is not None]
    limit = max(controls) + _MOST_ABOVE_CONTROL if controls else float("inf")
    shown = {index: point for index, point in loss.items() if point.value <= limit}
    beyond = [f"{rows[index].label} {point.value:.2f}" for index, point in loss.items() if index not in shown]
    note = f"\nnot shown: {', '.join(beyond)}" if beyond else ""
    lines = {
        "teacher": rows[0].results.loss.teacher,
        **({"window alone, at most": max(controls)} if controls else {}),
    }
    label = "Loss (nats per token)"
    paths = [_plot(rows, shown, lines, label, folder / "frontier-loss.png", note)]
    found = {index: accuracy_point(row, "student") for index, row in enumerate(rows)}
    accuracy = {index: point for index, point in found.items() if point is not None}
    if accuracy:
        teacher = accuracy_point(rows[0], "teacher")
        lines = {} if teacher is None else {"teacher": teacher.value}
        label = "Needle: exact answers, all lengths"
        paths.append(_plot(rows, accuracy, lines, label, folder / "frontier-needle.png"))
    return paths


def loss_point(row: Row) -> Point:
    """Return the student's loss and one standard error of its difference from the teacher's."""
    value, paired = row.results.loss.student, row.results.difference("student", "teacher")
    error = 0.0 if paired is None else paired.standard_error or 0.0
    return Point(value, value - error, value + error)


def accuracy_point(row: Row, model: str) -> Point | None:
    """Return the share of exact answers over all lengths with Wilson's interval, or None where none were asked for."""
    found = [needle for needle in row.needle.get(model, {}).values() if needle.accuracy is not None]
    if not found:
        return None
    num, right = sum(needle.num for needle in found), sum(round((n.accuracy or 0) * n.num) for n in found)
    return Point(right / num, *wilson_interval(right, num))


def _plot(
    rows: Sequence[Row],
    points: dict[int, Point],
    lines: dict[str, float],
    label: str,
    path: Path,
    note: str = "",
) -> Path:
    """Draw one value over bytes; `lines` are what models without a place on the axis have."""
    length = longest(rows)
    title = f"{path.stem.removeprefix('frontier-').capitalize()} against bytes of the cache"
    figure, axes = new_figure(
        title, f"Cache at {length:,} tokens (MiB); dotted: keys and values of the teacher{note}", label
    )
    groups = list(dict.fromkeys(rows[index].group for index in points))
    named: set[str] = set()
    # labels of neighbours stand above and below in turn
    by_size = sorted(points, key=lambda index: rows[index].cache_bytes(length) or 0)
    for place, index in enumerate(by_size):
        row, (value, low, high), below = rows[index], points[index], place % 2
        turn, which = divmod(groups.index(row.group), len(_COLORS))
        color, marker = _COLORS[which], _MARKERS[turn % len(_MARKERS)]
        size = (row.cache_bytes(length) or 0) / _MIB
        bars = [[value - low], [high - value]]
        style = {"marker": marker, "color": color, "linestyle": "none", "elinewidth": 1, "capsize": 2}
        axes.errorbar([size], [value], yerr=bars, label=None if row.group in named else row.group, **style)
        named.add(row.group)
        axes.annotate(
            row.label,
            (size, value),
            textcoords="offset points",
            xytext=(5, -10 if below else 4),
            fontsize=7,
            color=color,
        )
    for (name, height), style in zip(lines.items(), ("-", "--"), strict=False):
        axes.axhline(height, color=BLACK, linewidth=1, linestyle=style, label=name)
    axes.axvline(kv_bytes(rows[0], length) / _MIB, color=BLACK, linewidth=1, linestyle=":")
    axes.legend(fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if f"{size:e}"[0] in "235" else ""))
    save_figure(figure, path)
    return path
