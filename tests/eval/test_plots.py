"""Plots: drawn from results, headless, and telling apart measured from computed."""

from __future__ import annotations

import sys

import pytest

from subquad.eval import plots
from subquad.eval.plots import (
    PositionRow,
    crossover_sentence,
    plot_layers,
    plot_loss_by_position,
    plot_memory,
    plot_training,
)
from subquad.eval.style import SERIES, format_bytes, format_positions, format_seconds
from subquad.eval.training_log import TrainingCurve

from .conftest import make_results


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure that is saved."""
    axes = []
    save = plots.save_figure

    def keep(figure, path):
        axes.append(figure.axes[0])
        save(figure, path)

    monkeypatch.setattr(plots, "save_figure", keep)
    return axes


ROWS = [
    PositionRow(0, 64, 100, {"teacher": 3.41, "window_only": 3.42, "other": 3.6}, {"window_only": 0.01}),
    PositionRow(64, None, 200, {"teacher": 2.87, "window_only": 3.07, "other": 3.0}, {"window_only": 0.02}),
]


def test_every_plot_has_title_and_axis_labels(tmp_path, drawn):
    made = [
        plot_training(TrainingCurve("stage1", [1, 2, 3], [0.5, 0.4, 0.3]), tmp_path / "training.png"),
        plot_memory(make_results().cache_bytes, tmp_path / "memory.png"),
        plot_loss_by_position(ROWS, tmp_path / "loss.png"),
        plot_layers([0, 1], [0.1, 0.2], [0.3, None], tmp_path / "layers.png"),
    ]
    assert all(plot.path.is_file() and plot.alt and plot.caption for plot in made)
    for axes in drawn:
        assert axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    assert "matplotlib.pyplot" not in sys.modules or sys.modules["matplotlib.pyplot"].get_fignums() == []


def lines_of(axes):
    handles, labels = axes.get_legend_handles_labels()
    return {label: list(handle.lines[0].get_ydata()) for handle, label in zip(handles, labels, strict=True)}


def test_loss_by_position_draws_the_difference_to_the_teacher(tmp_path, drawn):
    plot_loss_by_position(ROWS, tmp_path / "loss.png")
    lines = lines_of(drawn[0])
    assert lines["Teacher (softmax)"] == [0, 0]
    assert lines["Window-only control"] == pytest.approx([0.01, 0.20])
    assert lines["other"] == pytest.approx([0.19, 0.13])


def test_loss_by_position_of_a_lone_model_is_the_loss_itself(tmp_path, drawn):
    rows = [PositionRow(row.start, row.end, 1, {"teacher": row.loss["teacher"]}, {}) for row in ROWS]
    plot = plot_loss_by_position(rows, tmp_path / "loss.png")
    assert lines_of(drawn[0])["Teacher (softmax)"] == [3.41, 2.87]
    assert plot.alt == "Loss by position"


def test_a_layer_without_far_part_leaves_no_point(tmp_path, drawn):
    plot_layers([0, 1], [0.1, 0.2], [0.3, None], tmp_path / "layers.png")
    assert [list(line.get_ydata()) for line in drawn[0].get_lines()] == [[0.1, 0.2], [0.3]]


def test_memory_marks_measured_points_and_the_crossover(tmp_path, drawn):
    plot_memory(make_results().cache_bytes, tmp_path / "memory.png")
    marked = [list(line.get_xdata()) for line in drawn[0].get_lines() if line.get_marker() == "D"]
    assert marked == [[128, 512, 2048]]
    assert [text.get_text() for text in drawn[0].texts] == ["crossover: 1,138 tokens"]


def test_memory_without_crossover_says_so(tmp_path, drawn):
    table = make_results().cache_bytes.model_copy(update={"crossover_length": None})
    plot_memory(table, tmp_path / "memory.png")
    assert list(drawn[0].texts) == []
    assert "never becomes smaller" in crossover_sentence(table)


def test_long_curves_get_a_running_mean(tmp_path, drawn):
    steps = list(range(1, 101))
    plot_training(TrainingCurve("stage2", steps, [float(step) for step in steps]), tmp_path / "curve.png")
    mean = drawn[0].get_lines()[1]
    assert (mean.get_xdata()[0], mean.get_ydata()[0]) == (16, 8.5)
    assert (mean.get_xdata()[-1], mean.get_ydata()[-1]) == (100, 92.5)


def test_series_differ_in_color_marker_and_name():
    assert len({color for color, _, _ in SERIES.values()}) == len(SERIES)
    assert len({marker for _, marker, _ in SERIES.values()}) == len(SERIES)


@pytest.mark.parametrize(
    "value, text", [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1_310_720, "1.25 MiB"), (3 * 2**40, "3 TiB")]
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize("value, text", [(8.21, "8.2 s"), (59.99, "60.0 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_seconds(value, text):
    assert format_seconds(value) == text


def test_positions():
    assert format_positions(64, 128) == "64–127"
    assert format_positions(8192, None) == "8,192 and up"
