"""Heatmaps of length by depth: one per model and score, and the difference of two models."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from subquad.eval.niah.cells import CellScore, cells_of
from subquad.eval.niah.tables import SCORE_LABELS, check_comparable, model_label
from subquad.eval.plots import Plot
from subquad.eval.records import EvalRecord
from subquad.eval.style import GREY, new_figure, save_figure

logger = logging.getLogger(__name__)

# (minuend, subtrahend): what the conversion cost, and what it gains over throwing the far past away.
COMPARISONS = (("student", "teacher"), ("student", "window_only"))
_PLOTTED: tuple[CellScore, ...] = ("accuracy", "key_logprob")
# Narrow and high: the page of a phone shows it at full width, and the figures in the cells stay readable.
_WIDTH, _ROW_HEIGHT, _FRAME_HEIGHT = 5.2, 0.33, 2.1
_MOST_COLUMNS_WITH_TEXT = 8
_UNITS: dict[CellScore, str] = {"accuracy": "% of prompts", "key_rank1": "% of prompts", "key_logprob": "nats"}
_WORST_LOG_PROB = -12.0

Grid = Mapping[tuple[int, float], float]


class _Scale(NamedTuple):
    """Colours of a heatmap; a diverging one has its middle at 0, one in percent shows shares."""

    colors: str
    low: float
    high: float
    label: str
    percent: bool
    diverging: bool = False

    def write(self, value: float) -> str:
        """Return a value as it stands in its cell."""
        text = f"{100 * value:.0f}" if self.percent else f"{value:.1f}"
        if float(text) == 0:
            return text.lstrip("-")
        return text.replace("-", "−") if value < 0 or not self.diverging else f"+{text}"


def write_niah_plots(records: Sequence[EvalRecord], folder: Path) -> list[Plot]:
    """Draw every heatmap the records have data for.

    Args:
        records: Records of one task, one per model.
        folder: Where the PNG files go; created if missing.

    Returns:
        Per score: the models in order, then the differences of `COMPARISONS`. A difference of records with different
        settings is left out with a warning.

    Raises:
        OutputError: A record has no cells.
    """
    by_model = {record.model: record for record in records}
    plots = []
    for score in _PLOTTED:
        shown = [record for record in records if _grid(record, score)]
        plots += [plot_heatmap(record, score, folder) for record in shown]
        for first, second in COMPARISONS:
            pair = [by_model[name] for name in (first, second) if by_model.get(name) in shown]
            if len(pair) < 2:
                continue
            if pair[0].settings != pair[1].settings:
                logger.warning("needle: no difference of %s and %s, whose settings differ", first, second)
                continue
            plots.append(plot_difference(pair[0], pair[1], score, folder))
    return plots


def plot_heatmap(record: EvalRecord, score: CellScore, folder: Path) -> Plot:
    """Draw one score of one model over length and depth.

    Args:
        record: The model's record.
        score: What to draw.
        folder: Where the PNG goes.

    Returns:
        The plot.

    Raises:
        OutputError: The record has no cells.
    """
    cells = cells_of(record)
    percent = score != "key_logprob"
    low = 0.0 if percent else min(record.baselines.get("key_logprob", _WORST_LOG_PROB), -1.0)
    scale = _Scale("cividis", low, 1.0 if percent else 0.0, f"{SCORE_LABELS[score]} ({_UNITS[score]})", percent)
    title = f"Needle, {SCORE_LABELS[score].lower()}:\n{model_label(record.model)}"
    path = folder / f"{record.task}_{score}_{record.model}.png"
    _draw(record, _grid(record, score), scale, title, path)
    nearest = min(cell.distance for cell in cells)
    caption = (
        f"{record.settings['samples']} prompts per cell. Depth 0 is right after the introduction, depth 1 right before "
        f"the question. The nearest needles stand {nearest:.0f} tokens before the answer: a window longer than that "
        "finds them without any memory."
    )
    if not percent:
        caption += f" The darkest colour is {low:.1f} nats or less: a guess among all keys of that form."
    return Plot(path, title.replace("\n", " "), caption)


def plot_difference(first: EvalRecord, second: EvalRecord, score: CellScore, folder: Path) -> Plot:
    """Draw how much higher one model's score is than another's, over length and depth.

    Args:
        first: Record of one model.
        second: Record of the other, with equal settings.
        score: What to draw.
        folder: Where the PNG goes.

    Returns:
        The plot.

    Raises:
        ConfigError: They were measured with different settings.
        OutputError: A record has no cells.
    """
    check_comparable([first, second])
    mine, theirs = _grid(first, score), _grid(second, score)
    grid = {place: mine[place] - theirs[place] for place in mine if place in theirs}
    percent = score != "key_logprob"
    most = 1.0 if percent else max([1.0, *map(abs, grid.values())])
    names = model_label(first.model), model_label(second.model)
    title = f"Needle, {SCORE_LABELS[score].lower()}:\n{names[0]} − {names[1]}"
    path = folder / f"{first.task}_{score}_{first.model}_minus_{second.model}.png"
    _draw(
        first, grid, _Scale("PuOr", -most, most, f"Difference ({_UNITS[score]})", percent, diverging=True), title, path
    )
    caption = f"Purple: {names[0]} is better on the same prompts; orange: {names[1]} is better."
    return Plot(path, title.replace("\n", " "), caption)


def _grid(record: EvalRecord, score: CellScore) -> dict[tuple[int, float], float]:
    cells = ((cell, cell.samples(score)) for cell in cells_of(record))
    return {(cell.length, cell.depth): fmean(samples) for cell, samples in cells if samples is not None}


def _draw(record: EvalRecord, grid: Grid, scale: _Scale, title: str, path: Path) -> None:
    lengths, depths = record.settings["lengths"], record.settings["depths"]
    values = np.array([[grid.get((length, depth), math.nan) for length in lengths] for depth in depths])
    figure, axes = new_figure(title, "Prompt length (tokens)", "Depth of the needle")
    figure.set_size_inches(_WIDTH, _FRAME_HEIGHT + _ROW_HEIGHT * max(len(depths), 4))
    axes.grid(visible=False)
    image = axes.imshow(values, cmap=scale.colors, vmin=scale.low, vmax=scale.high, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.2g}" for depth in depths])
    axes.tick_params(length=0)
    for row, column in np.argwhere(np.isnan(values)):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#eeeeee", edgecolor=GREY, hatch="//"))
    if len(lengths) <= _MOST_COLUMNS_WITH_TEXT:
        _write_values(axes, values, scale)
    bar = figure.colorbar(image, ax=axes, orientation="horizontal", pad=0.03, aspect=30)
    bar.set_label(scale.label + ("; hatched: not measured" if np.isnan(values).any() else ""), fontsize=11)
    bar.ax.tick_params(labelsize=10)
    if scale.percent:
        bar.ax.xaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    save_figure(figure, path)


def _write_values(axes: Axes, values: np.ndarray, scale: _Scale) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        share = (value - scale.low) / (scale.high - scale.low)
        # White on the dark colours: the low end of a sequential map, both ends of a diverging one.
        dark = abs(share - 0.5) > 0.3 if scale.diverging else share < 0.5
        color = "white" if dark else "black"
        axes.text(column, row, scale.write(value), ha="center", va="center", fontsize=11, color=color)
