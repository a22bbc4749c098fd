"""Plots: drawn from results, headless, and telling apart measured from computed."""

from __future__ import annotations

import sys

import pytest

from subquad.eval import plots
from subquad.eval.plots import crossover_sentence, plot_memory, plot_training, write_plots
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


def test_every_plot_has_title_and_axis_labels(tmp_path, drawn):
    curves = [TrainingCurve("stage1", [1, 2, 3], [0.5, 0.4, 0.3]), TrainingCurve("stage2", [1], [0.5])]
    made = write_plots(make_results(), curves, tmp_path)
    assert [plot.path.name for plot in made] == ["loss_by_position.png", "memory.png", "training_stage1.png"]
    for axes in drawn:
        assert axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    assert "matplotlib.pyplot" not in sys.modules or sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_loss_by_position_draws_the_difference_to_the_teacher(tmp_path, drawn):
    write_plots(make_results(cache_bytes=None), [], tmp_path)
    handles, labels = drawn[0].get_legend_handles_labels()
    lines = {label: list(handle.lines[0].get_ydata()) for handle, label in zip(handles, labels, strict=True)}
    assert lines["Teacher (softmax)"] == [0, 0, 0]
    assert lines["Window-only control"] == pytest.approx([0.01, 0.20, 0.20])


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
