"""The plots of a study of conversions: loss and needle over the bytes of the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter

from benchmarks.quality.rows import Row
from benchmarks.quality.table import kv_bytes, longest
from subquad.eval.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, new_figure, save_figure

_COLORS = (BLUE, ORANGE, GREEN, RED, GREY)
_MARKERS = ("o", "s", "^", "D")
_MIB = 2**20
# A loss so far above every control (nats) would press all others into a line.
_MOST_ABOVE_CONTROL = 0.5
# A key less likely than this is not known at all.
_LEAST_LOG_PROBABILITY = -20.0


class Point(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


def plot_frontier(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw loss, and log probability of the needle's key, over the bytes of the cache.

    The interval of a loss is one standard error of its difference from the teacher's, over the same rows; that of a log
    probability is one standard error over prompts.

    Args:
        rows: finished runs.
        folder: where to write `frontier-loss.png` and, where it was measured, `frontier-needle.png`.

    Returns:
        The files.
    """
    loss = {index: loss_point(row) for index, row in enumerate(rows)}
    controls = [row.results.loss.window_only for row in rows if row.results.loss.window_only is not None]
    limit = max(controls) + _MOST_ABOVE_CONTROL if controls else float("inf")
    lines = {
        "teacher": rows[0].results.loss.teacher,
        **({"window alone, at most": max(controls)} if controls else {}),
    }
    shown = {index: point for index, point in loss.items() if point.value <= limit}
    note = _left_out(rows, loss, shown)
    paths = [_plot(rows, shown, lines, "Loss (nats per token)", folder / "frontier-loss.png", note)]
    found = {index: needle_point(row, "student") for index, row in enumerate(rows)}
    needle = {index: point for index, point in found.items() if point is not None}
    if needle:
        teacher = needle_point(rows[next(iter(needle))], "teacher")
        lines = {} if teacher is None else {"teacher": teacher.value}
        shown = {index: point for index, point in needle.items() if point.value >= _LEAST_LOG_PROBABILITY}
        note = _left_out(rows, needle, shown)
        label = "Log probability of the key, mean (nats)"
        paths.append(_plot(rows, shown, lines, label, folder / "frontier-needle.png", note))
    return paths


def loss_point(row: Row) -> Point:
    """Return the student's loss and one standard error of its difference from the teacher's."""
    value, paired = row.results.loss.student, row.results.difference("student", "teacher")
    error = 0.0 if paired is None else paired.standard_error or 0.0
    return Point(value, error)


def needle_point(row: Row, model: str) -> Point | None:
    """Return the key's mean log probability over all lengths and its standard error, or None where none was scored."""
    found = [needle for needle in row.needle.get(model, {}).values() if needle.key_logprob is not None]
    if not found:
        return None
    error = math.hypot(*(needle.key_logprob_error or 0.0 for needle in found)) / len(found)
    return Point(fmean(needle.key_logprob or 0.0 for needle in found), error)


def _left_out(rows: Sequence[Row], found: dict[int, Point], shown: dict[int, Point]) -> str:
    """Say what lies too far off to be shown."""
    named = [f"{rows[index].label} {point.value:.2f}" for index, point in found.items() if index not in shown]
    return f"\nnot shown: {', '.join(named)}" if named else ""


def _plot(
    rows: Sequence[Row],
    points: dict[int, Point],
    lines: dict[str, float],
    label: str,
    path: Path,
    note: str = "",
) -> Path:
    """Draw one value over bytes, a colour per group; `lines` are what models without a place on the axis have."""
    length = longest(rows)
    title = f"{path.stem.removeprefix('frontier-').capitalize()} against bytes of the cache"
    figure, axes = new_figure(
        title, f"Cache at {length:,} tokens (MiB); dotted: the teacher's; bars: a standard error{note}", label
    )
    groups = list(dict.fromkeys(rows[index].group for index in points))
    # points are numbered by size, above and below in turn; the legend says what they are
    by_size = sorted(points, key=lambda index: rows[index].cache_bytes(length) or 0)
    for place, index in enumerate(by_size):
        row, (value, error), below = rows[index], points[index], place % 2
        turn, which = divmod(groups.index(row.group), len(_COLORS))
        color, marker = _COLORS[which], _MARKERS[turn % len(_MARKERS)]
        size = (row.cache_bytes(length) or 0) / _MIB
        style = {"marker": marker, "color": color, "linestyle": "none", "elinewidth": 1, "capsize": 2}
        axes.errorbar([size], [value], yerr=[error], label=f"{place + 1}  {row.label}", **style)
        offset = (5, -10 if below else 4)
        axes.annotate(str(place + 1), (size, value), textcoords="offset points", xytext=offset, fontsize=8, color=color)
    for (name, height), style in zip(lines.items(), ("-", "--"), strict=False):
        axes.axhline(height, color=BLACK, linewidth=1, linestyle=style, label=name)
    axes.axvline(kv_bytes(rows[0], length) / _MIB, color=BLACK, linewidth=1, linestyle=":")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if f"{size:e}"[0] in "235" else ""))
    save_figure(figure, path)
    return path
