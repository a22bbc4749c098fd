"""The plots of a study: every arm with its seeds, and recall over length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from subquad.eval.plots import Plot
from subquad.eval.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, new_figure, plain_label, save_figure
from subquad.pretrain.study.schema import StudyRecipe
from subquad.pretrain.study.summary import ArmSummary

_COLORS = (BLUE, ORANGE, GREEN, RED, GREY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_ROW_HEIGHT = 0.32


def plot_losses(study: StudyRecipe, arms: Sequence[ArmSummary], path: Path) -> Plot:
    """Draw the held-out loss of every arm: mean, standard deviation over seeds, and each seed.

    Args:
        study: the study.
        arms: what was measured, with losses.
        path: PNG to write.

    Returns:
        The plot.
    """
    title = f"{study.name}: held-out loss of every arm"
    figure, axes = new_figure(title, "Loss (nats per token, lower is better)", "")
    figure.set_size_inches(8, 1.6 + _ROW_HEIGHT * len(arms))
    colors = _group_colors([arm for arm in arms if arm.arm != study.reference])
    for row, arm in enumerate(arms):
        assert arm.loss is not None, "plot_losses is for text"
        color = BLACK if arm.arm == study.reference else colors[arm.group]
        axes.plot(arm.loss.values, [row] * len(arm.loss.values), color=color, marker="|", linestyle="none", alpha=0.7)
        axes.errorbar(arm.loss.mean, row, xerr=arm.loss.deviation or 0.0, color=color, marker="o", capsize=3)
        if arm.arm == study.reference:
            axes.axvline(arm.loss.mean, color=BLACK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(arms)), [plain_label(arm.label) for arm in arms])
    axes.invert_yaxis()
    groups = [group for group in colors if group]
    if len(groups) > 1:
        handles = [
            Line2D([], [], color=colors[group], marker="o", linestyle="none", label=plain_label(group))
            for group in groups
        ]
        axes.legend(handles=handles, frameon=False, fontsize=9)
    save_figure(figure, path)
    caption = "Points are means over seeds, bars one standard deviation, ticks the seeds."
    if any(arm.arm == study.reference for arm in arms):
        caption += f" The dotted line is {study.label(study.reference)}."
    return Plot(path, title, caption)


def plot_recall(
    study: StudyRecipe, arms: Sequence[ArmSummary], trained_length: int, chance: float | None, path: Path
) -> Plot:
    """Draw the accuracy of every arm over the length of the row.

    Args:
        study: the study.
        arms: what was measured, with recall.
        trained_length: length of the training rows.
        chance: accuracy of guessing.
        path: PNG to write.

    Returns:
        The plot.
    """
    title = f"{study.name}: recall over length"
    figure, axes = new_figure(title, "Tokens in the row", "Right answers")
    axes.set_xscale("log", base=2)
    colors = (BLACK, *_COLORS)
    for index, arm in enumerate(arms):
        lengths = sorted(arm.recall)
        means = [arm.recall[length].mean for length in lengths]
        errors = [arm.recall[length].deviation or 0.0 for length in lengths]
        color, marker = colors[index % len(colors)], _MARKERS[index % len(_MARKERS)]
        axes.errorbar(
            lengths, means, errors, color=color, marker=marker, linewidth=2, capsize=3, label=plain_label(arm.label)
        )
    _mark_training(axes, trained_length, chance)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.03)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
    caption = f"Mean over seeds, bars one standard deviation. Trained on rows of {trained_length:,} tokens (dashed)."
    return Plot(path, title, caption)


def _mark_training(axes: Axes, trained_length: int, chance: float | None) -> None:
    axes.axvline(trained_length, color=GREY, linewidth=1, linestyle="--")
    if chance is not None:
        axes.axhline(chance, color=GREY, linewidth=1, linestyle=":", label="guessing")


def _group_colors(arms: Sequence[ArmSummary]) -> dict[str, str]:
    groups = list(dict.fromkeys(arm.group for arm in arms))
    return {group: _COLORS[index % len(_COLORS)] for index, group in enumerate(groups)}
