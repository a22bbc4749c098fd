"""One look for every plot, and how numbers are written in the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from subquad.eval.results import LossName

# Okabe & Ito's palette, distinguishable with every common colour blindness; marker and dash repeat the distinction.
BLACK, ORANGE, BLUE, GREEN, RED, GREY = "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#666666"
SERIES: dict[LossName, tuple[str, str, str]] = {
    "teacher": (BLACK, "o", "-"),
    "window_only": (ORANGE, "s", "--"),
    "student_start": (GREEN, "^", ":"),
    "student": (BLUE, "D", "-"),
    "student_without_far": (RED, "v", "-."),
}
_OTHER_MARKERS = ("P", "X", "*", "<", ">")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def new_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Make a figure of one panel in the house look, without touching pyplot's global state.

    Args:
        title: What the plot shows, as a statement without a full stop.
        x_label: Quantity and unit of the horizontal axis.
        y_label: Quantity and unit of the vertical axis.

    Returns:
        The figure and its axes.
    """
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.set_xlabel(x_label, fontsize=11)
    axes.set_ylabel(y_label, fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; creates the folder.

    Args:
        figure: The figure.
        path: File to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def series_look(name: str, names: Sequence[str]) -> tuple[str, str, str]:
    """Return colour, marker and dash of a model in a plot; models without a look of their own are grey.

    Args:
        name: The model.
        names: All models of the plot.

    Returns:
        Colour, marker, dash.
    """
    known = {str(model): look for model, look in SERIES.items()}
    if name in known:
        return known[name]
    others = [other for other in names if other not in known]
    return GREY, _OTHER_MARKERS[others.index(name) % len(_OTHER_MARKERS)], "-"


def with_error(value: float, standard_error: float | None, decimals: int = 4, sign: str = "") -> str:
    """Return a number with its standard error, such as `3.3883 ± 0.0833`; `sign="+"` shows a plus, too.

    Args:
        value: The number.
        standard_error: Its standard error; one of 0, which no sample of examples has, is not shown.
        decimals: Decimals of both.
        sign: `+` or empty.

    Returns:
        The text.
    """
    error = f" ± {standard_error:.{decimals}f}" if standard_error else ""
    return f"{value:{sign}.{decimals}f}{error}"


def table_cell(text: str) -> str:
    """Return text as it stands in a cell of a Markdown table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def plain_label(text: str) -> str:
    """Return text that matplotlib draws as it is, without reading a formula between dollar signs."""
    return text.replace("$", r"\$")


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit, three significant digits: `1.25 MiB`."""
    value, unit = float(num_bytes), 0
    while value >= 1000 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.3g} {_BYTE_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Return a duration as `8.2 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_positions(start: int, end: int | None) -> str:
    """Return a position bucket as `64–127` or `8,192 and up`."""
    return f"{start:,} and up" if end is None else f"{start:,}–{end - 1:,}"
