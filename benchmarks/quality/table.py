"""The table and the plots of a study of conversions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.ticker import FuncFormatter

from benchmarks.quality.rows import Needle, Row
from subquad.eval.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    format_bytes,
    format_seconds,
    new_figure,
    save_figure,
    with_error,
)

_COLORS = (BLUE, ORANGE, GREEN, RED, GREY)
_MARKERS = ("o", "s", "^", "D")
_MIB = 2**20
# A loss so far above every control (nats) would press all others into a line.
_MOST_ABOVE_CONTROL = 0.5
_TRAINING = ("calibrate", "stage1", "stage2", "keys")
_MODELS = ("teacher", "window_only", "student")


def render_table(name: str, rows: Sequence[Row]) -> str:
    """Return the study as Markdown, a line for every run.

    Args:
        name: of the study.
        rows: finished runs, at least one.

    Returns:
        The table of losses and bytes, and one of the needle where it was measured.
    """
    first = rows[0].results
    length = longest(rows)
    parts = [
        f"# Study {name}",
        f"Held-out text: {first.data}, {first.loss.num_tokens:,} tokens. Losses in nats per token ± standard error "
        f"over rows; student − control on the same rows. The cache is that of one sequence after {length:,} tokens, "
        f"{first.dtype} (the teacher's: {format_bytes(_kv_bytes(rows[0], length))}).",
        _losses(rows, length),
    ]
    if any(row.needle for row in rows):
        parts += ["## Needle: share of exact answers / log probability of the key", _needles(rows)]
    return "\n\n".join(parts) + "\n"


def longest(rows: Sequence[Row]) -> int:
    """Return the longest length at which every row has its cache's bytes."""
    lengths = [set(row.results.cache_bytes.student) for row in rows if row.results.cache_bytes is not None]
    return max(set.intersection(*lengths))


def _kv_bytes(row: Row, length: int) -> int:
    assert row.results.cache_bytes is not None, "longest saw to it"
    return row.results.cache_bytes.kv[length]


def _losses(rows: Sequence[Row], length: int) -> str:
    texts = sorted({task for row in rows for task in row.texts})
    heads = ["arm", "seed", "teacher", "window only", "student", "student − control", "gap closed"]
    heads += [f"{task}: teacher / control / student" for task in texts]
    heads += ["far part off", "exact heads", "cache", "tokens", "time"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        loss, tokens = row.results.loss, row.results.tokens
        cells = [row.label, str(row.seed), f"{loss.teacher:.4f}", _number(loss.window_only)]
        cells += [f"{loss.student:.4f}", _difference(row), "–" if row.gap_closed is None else f"{row.gap_closed:.0%}"]
        cells += [_text(row, task) for task in texts]
        cells.append(_number(loss.student_without_far))
        cells.append(str(sum(map(len, row.exact_kv_heads.values()))))
        cells.append(format_bytes(row.cache_bytes(length) or 0))
        cells.append(f"{tokens.stage1 + tokens.stage2:,}")
        cells.append(format_seconds(sum(row.results.wall_seconds.get(step, 0.0) for step in _TRAINING)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _difference(row: Row) -> str:
    for pair in row.results.differences:
        if (pair.first, pair.second) == ("student", "window_only"):
            return with_error(pair.difference, pair.standard_error, sign="+")
    return "–"


def _text(row: Row, task: str) -> str:
    found = row.texts.get(task, {})
    return " / ".join(_number(found[model][0] if model in found else None) for model in _MODELS)


def _needles(rows: Sequence[Row]) -> str:
    lengths = sorted({length for row in rows for model in row.needle.values() for length in model})
    lines = ["| model | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" + "|---:" * len(lengths) + "|"]
    named = [("teacher", rows[0].needle.get("teacher", {}))]
    controls: list[dict[int, Needle]] = []
    for row in rows:
        # a record handed over by another arm is no control of a run without a window
        control = row.needle.get("window_only") if row.results.loss.window_only is not None else None
        if control and control not in controls:
            controls.append(control)
            named.append((f"window only, as {row.label}", control))
        named.append((f"{row.label}, seed {row.seed}", row.needle.get("student", {})))
    for name, found in named:
        cells = [_found(found, length) for length in lengths]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _found(found: dict[int, Needle], length: int) -> str:
    if length not in found:
        return "–"
    needle = found[length]
    accuracy = "–" if needle.accuracy is None else f"{needle.accuracy:.2f}"
    return accuracy if needle.key_logprob is None else f"{accuracy} / {needle.key_logprob:.1f}"


def plot_frontier(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw loss, and accuracy of the needle, over the bytes of the cache.

    Args:
        rows: finished runs.
        folder: where to write `frontier-loss.png` and, where it was measured, `frontier-needle.png`.

    Returns:
        The files.
    """
    length = longest(rows)
    loss = {index: row.results.loss.student for index, row in enumerate(rows)}
    controls = [row.results.loss.window_only for row in rows if row.results.loss.window_only is not None]
    limit = max(controls) + _MOST_ABOVE_CONTROL if controls else float("inf")
    shown = {index: value for index, value in loss.items() if value <= limit}
    teacher_loss = rows[0].results.loss.teacher
    beyond = [f"{rows[index].label} {value:.2f}" for index, value in loss.items() if index not in shown]
    note = f"\nnot shown: {', '.join(beyond)}" if beyond else ""
    lines = {"teacher": teacher_loss, **({"window alone, at most": max(controls)} if controls else {})}
    paths = [_plot(rows, shown, length, lines, "Loss (nats per token)", folder / "frontier-loss.png", note)]
    found = {index: _mean_accuracy(row, "student") for index, row in enumerate(rows)}
    accuracy = {index: value for index, value in found.items() if value is not None}
    if accuracy:
        teacher = _mean_accuracy(rows[0], "teacher")
        label = "Needle: exact answers, mean over lengths"
        lines = {} if teacher is None else {"teacher": teacher}
        paths.append(_plot(rows, accuracy, length, lines, label, folder / "frontier-needle.png"))
    return paths


def _mean_accuracy(row: Row, model: str) -> float | None:
    values = [found.accuracy for found in row.needle.get(model, {}).values() if found.accuracy is not None]
    return fmean(values) if values else None


def _plot(
    rows: Sequence[Row],
    values: dict[int, float],
    length: int,
    lines: dict[str, float],
    label: str,
    path: Path,
    note: str = "",
) -> Path:
    """Draw one value over bytes; `lines` are what models without a place on the axis have."""
    title = f"{path.stem.removeprefix('frontier-').capitalize()} against bytes of the cache"
    figure, axes = new_figure(
        title, f"Cache at {length:,} tokens (MiB); dotted: keys and values of the teacher{note}", label
    )
    groups = list(dict.fromkeys(rows[index].group for index in values))
    named: set[str] = set()
    # labels of neighbours stand above and below in turn
    by_size = sorted(values, key=lambda index: rows[index].cache_bytes(length) or 0)
    for place, index in enumerate(by_size):
        row, value, below = rows[index], values[index], place % 2
        turn, which = divmod(groups.index(row.group), len(_COLORS))
        color, marker = _COLORS[which], _MARKERS[turn % len(_MARKERS)]
        size = (row.cache_bytes(length) or 0) / _MIB
        label = None if row.group in named else row.group
        named.add(row.group)
        axes.plot(size, value, marker=marker, color=color, linestyle="none", label=label)
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
    axes.axvline(_kv_bytes(rows[0], length) / _MIB, color=BLACK, linewidth=1, linestyle=":")
    axes.legend(fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if f"{size:e}"[0] in "235" else ""))
    save_figure(figure, path)
    return path
