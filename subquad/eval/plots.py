"""The plots of a report: training curves, loss by position, memory over length. All are drawn from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from subquad.eval.results import LOSS_LABELS, CacheTable
from subquad.eval.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    RED,
    format_bytes,
    format_positions,
    new_figure,
    save_figure,
    series_look,
)
from subquad.eval.training_log import TrainingCurve

STAGE_LABELS = {
    "stage1": ("Stage 1: each layer matches its teacher", "Squared error (share of the teacher's output)"),
    "stage2": ("Stage 2: the model matches its teacher", "Distillation loss (nats per token)"),
}


@dataclass(frozen=True)
class Plot:
    """A plot on disk.

    Attributes:
        path: The PNG.
        alt: What it shows, for a reader who does not see it.
        caption: What to take from it.
    """

    path: Path
    alt: str
    caption: str


@dataclass(frozen=True)
class PositionRow:
    """Losses of several models on the tokens at `start <= position < end` in their document.

    Attributes:
        start: First position.
        end: One past the last position; None for no bound.
        num_tokens: Predicted tokens.
        loss: Nats per token, by model.
        error_to_teacher: Standard error of (model - teacher), by model; empty where there is none.
    """

    start: int
    end: int | None
    num_tokens: int
    loss: Mapping[str, float]
    error_to_teacher: Mapping[str, float]


def plot_training(curve: TrainingCurve, path: Path) -> Plot:
    """Draw the training loss of a stage over tokens, with a running mean where there are enough points.

    Args:
        curve: The curve.
        path: PNG to write.

    Returns:
        The plot.
    """
    title, y_label = STAGE_LABELS.get(curve.stage, (f"Training: {curve.stage}", "Loss"))
    figure, axes = new_figure(title, "Training tokens", y_label)
    losses = np.asarray(curve.losses)
    width = max(1, len(losses) // 6)
    axes.plot(curve.tokens, losses, color=BLUE, linewidth=1, alpha=0.4 if width > 1 else 1.0, label="each log line")
    if width > 1:
        means = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(curve.tokens[width - 1 :], means, color=BLUE, linewidth=2.2, label=f"mean of the last {width} lines")
        axes.legend(frameon=False, fontsize=10)
    if losses.min() > 0 and losses.max() / losses.min() > 20:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.02)
    save_figure(figure, path)
    story = f"From {losses[0]:.4g} on the first log line to {losses[-1]:.4g} after {curve.tokens[-1]:,} tokens."
    return Plot(path, title, f"{story} Every point is measured on other text, so they scatter.")


def plot_loss_by_position(rows: Sequence[PositionRow], path: Path) -> Plot:
    """Draw the loss above the teacher's, by position in the document.

    The losses themselves differ far more between positions than between models, so the plot shows the difference; a
    teacher alone, or models without one, are shown as they are.

    Args:
        rows: Losses by position.
        path: PNG to write.

    Returns:
        The plot.
    """
    names = [name for name in rows[0].loss if all(name in row.loss for row in rows)]
    compared = "teacher" in names and len(names) > 1
    title, y_label, caption = "Loss by position", "Loss (nats per token)", "Held-out loss in buckets; lower is better."
    if compared:
        title = "What each model loses against the teacher, by position"
        y_label = "Loss above the teacher (nats per token)"
        caption = (
            "Held-out loss minus the teacher's on the same tokens, in buckets of the number of tokens before the "
            "predicted one; bars are standard errors of the paired difference. The teacher is the line at zero; lower "
            "is better."
        )
    figure, axes = new_figure(title, "Position in the document (tokens)", y_label)
    slots = range(len(rows))
    labels = {str(name): label for name, label in LOSS_LABELS.items()}
    for name in names:
        color, marker, dash = series_look(name, names)
        values = [row.loss[name] - (row.loss["teacher"] if compared else 0.0) for row in rows]
        errors = [row.error_to_teacher.get(name, 0.0) for row in rows]
        label = labels.get(name, name)
        axes.errorbar(slots, values, errors, color=color, marker=marker, linestyle=dash, linewidth=2, label=label)
    ticks = [format_positions(row.start, row.end) for row in rows]
    crowded = len(rows) > 6
    axes.set_xticks(list(slots), ticks, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.legend(frameon=False, fontsize=10)
    save_figure(figure, path)
    return Plot(path, title, caption)


def plot_layers(layers: Sequence[int], errors: Sequence[float], far_shares: Sequence[float | None], path: Path) -> Plot:
    """Draw the relative error and the far share of every layer.

    Args:
        layers: Numbers of the layers.
        errors: Relative squared error of each.
        far_shares: Mean share of the attention in the far part; None where there is none.
        path: PNG to write.

    Returns:
        The plot.
    """
    title = "Each converted layer: its error, and how much it looks far back"
    figure, axes = new_figure(title, "Layer", "Share")
    axes.plot(layers, errors, color=RED, marker="s", linewidth=2, label="relative error of the output")
    known = [(layer, share) for layer, share in zip(layers, far_shares, strict=True) if share is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=BLUE, marker="o", linestyle="--", linewidth=2, label="far share")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=10)
    save_figure(figure, path)
    return Plot(path, title, "Squared error against the layer's own softmax on the same input; both are shares of 1.")


def plot_memory(table: CacheTable, path: Path) -> Plot:
    """Draw the bytes of the student's cache and of the key/value cache over length, with their crossover.

    Args:
        table: The bytes.
        path: PNG to write.

    Returns:
        The plot.
    """
    title = "Memory held while generating"
    figure, axes = new_figure(title, "Tokens in the context", "Cache size")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for label, sizes, color, marker in (
        ("Teacher: key/value cache", table.kv, BLACK, "o"),
        ("Student: state and exact keys", table.student, BLUE, "D"),
    ):
        lengths = sorted(sizes)
        measured = [length for length in lengths if length in table.measured_lengths]
        axes.plot(lengths, [sizes[n] for n in lengths], color=color, linewidth=2, label=label)
        axes.plot(measured, [sizes[n] for n in measured], color=color, marker=marker, linestyle="none", markersize=7)
    axes.plot([], [], color=GREY, marker="o", linestyle="none", label="measured on a real cache")
    axes.plot([], [], color=GREY, linewidth=2, label="computed from the layers' sizes")
    if table.crossover_length is not None:
        _mark_crossover(axes, table)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.legend(frameon=False, fontsize=10, loc="upper left")
    save_figure(figure, path)
    caption = (
        f"Batch of {table.batch_size}, keys and values in {table.dtype}, states in float32. Points were read from a "
        "real cache; the lines are computed."
    )
    return Plot(path, title, caption)


def crossover_sentence(table: CacheTable) -> str:
    """Say in words from which length on the student needs less memory than the key/value cache."""
    if table.crossover_length is None:
        return "The student's cache never becomes smaller than the key/value cache."
    return f"The student's cache is the smaller one from {table.crossover_length:,} tokens on."


def _mark_crossover(axes: Axes, table: CacheTable) -> None:
    length = table.crossover_length
    lengths = sorted(table.student)
    if length is None or not lengths[0] <= length <= lengths[-1]:
        return
    size = 2 ** np.interp(np.log2(length), np.log2(lengths), [np.log2(table.student[n]) for n in lengths])
    bottom = axes.get_ylim()[0]
    axes.plot([length, length], [bottom, size], color=ORANGE, linestyle="--", linewidth=2)
    axes.set_ylim(bottom=bottom)
    axes.annotate(
        f"crossover: {length:,} tokens", (length, bottom), xytext=(8, 10), textcoords="offset points", fontsize=10
    )
