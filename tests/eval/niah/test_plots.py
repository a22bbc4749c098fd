"""Heatmaps and tables: every cell at its place, nothing that was not measured shown as 0."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from subquad.errors import ConfigError
from subquad.eval.niah import NiahSettings, axis_table, difference_table, plots, write_niah_plots
from subquad.eval.niah.cells import Cell
from subquad.eval.records import EvalRecord, Metric
from tests.eval.provenance import tiny_provenance

LENGTHS, DEPTHS = (256, 512, 1024), (0.0, 0.5, 1.0)


def make_record(model, cells, **changes):
    settings = NiahSettings(lengths=LENGTHS, depths=DEPTHS, samples=4, **changes)
    provenance = tiny_provenance(prompts_hash="same", created="2030-01-01T00:00:00+00:00")
    return EvalRecord(
        task=settings.task,
        model=model,
        metrics={"accuracy": Metric(value=0.5, num=8)},
        baselines={"key_logprob": -11.4},
        settings=settings.resolved(2048).identity(),
        details={"cells": [cell.model_dump(mode="json") for cell in cells]},
        provenance=provenance,
    )


def make_cells(solved, log_prob, lengths=LENGTHS[:2]):
    """Cells of which `solved(length, depth)` of 4 prompts are solved."""
    cells = []
    for length in lengths:
        for depth in DEPTHS:
            flags = "1" * solved(length, depth) + "0" * (4 - solved(length, depth))
            cells.append(
                Cell(
                    length=length,
                    depth=depth,
                    distance=(1 - depth) * length,
                    exact=flags,
                    rank1=flags,
                    log_probs=(log_prob * length / 256,) * 4,
                )
            )
    return cells


@pytest.fixture
def records():
    return [
        make_record("teacher", make_cells(lambda length, depth: 4, -0.2)),
        make_record("window_only", make_cells(lambda length, depth: 4 if depth == 1 else 0, -8.0)),
        make_record("student", make_cells(lambda length, depth: 4 if depth == 1 else 512 // length, -2.0)),
    ]


@pytest.fixture
def drawn(monkeypatch):
    """Image data, texts and title of every figure that is saved."""
    figures = []
    save = plots.save_figure

    def keep(figure, path):
        axes = figure.axes[0]
        labels = (
            [text.get_text() for text in axes.get_xticklabels()],
            [text.get_text() for text in axes.get_yticklabels()],
        )
        figures.append(
            {
                "title": axes.get_title(loc="left"),
                "values": np.ma.filled(axes.images[0].get_array(), np.nan),
                "limits": axes.images[0].get_clim(),
                "labels": labels,
                "texts": [text.get_text() for text in axes.texts],
                "hatched": len(axes.patches),
                "bar": figure.axes[1].get_xlabel(),
            }
        )
        save(figure, path)

    monkeypatch.setattr(plots, "save_figure", keep)
    return figures


def test_one_heatmap_per_model_and_score_and_the_differences(records, tmp_path, drawn):
    made = write_niah_plots(records, tmp_path)
    names = [
        f"niah_{score}_{what}.png"
        for score in ("accuracy", "key_logprob")
        for what in ("teacher", "window_only", "student", "student_minus_teacher", "student_minus_window_only")
    ]
    assert [plot.path.name for plot in made] == names
    assert all(plot.path.is_file() and plot.alt and plot.caption for plot in made)
    assert len(drawn) == len(made)


def test_cells_are_at_their_place_and_gaps_are_hatched(records, tmp_path, drawn):
    write_niah_plots(records[1:2], tmp_path)
    figure = drawn[0]
    assert figure["labels"] == (["256", "512", "1,024"], ["0", "0.5", "1"])
    expected = [[0, 0, np.nan], [0, 0, np.nan], [1, 1, np.nan]]
    np.testing.assert_array_equal(figure["values"], expected)
    assert figure["hatched"] == 3
    assert "hatched: not measured" in figure["bar"]
    assert figure["texts"] == ["0", "0", "0", "0", "100", "100"]
    assert figure["limits"] == (0, 1)


def test_differences_are_student_minus_the_other(records, tmp_path, drawn):
    write_niah_plots(records, tmp_path)
    by_title = {figure["title"]: figure for figure in drawn}
    figure = by_title["Needle, exact answers:\nStudent, distilled − Teacher (softmax)"]
    np.testing.assert_allclose(figure["values"][:, :2], [[-0.5, -0.75], [-0.5, -0.75], [0, 0]])
    assert figure["limits"] == (-1, 1)
    assert figure["texts"] == ["−50", "−75", "−50", "−75", "0", "0"]
    figure = by_title["Needle, key log probability:\nStudent, distilled − Window-only control"]
    np.testing.assert_allclose(figure["values"][:, 0], 6.0)
    assert figure["limits"] == (-12, 12)
    assert figure["texts"][:2] == ["+6.0", "+12.0"]


def test_models_with_other_settings_are_not_subtracted(records, tmp_path, caplog):
    other = make_record("teacher", make_cells(lambda length, depth: 4, -0.2), seed=1)
    with caplog.at_level(logging.WARNING):
        made = write_niah_plots([other, *records[1:]], tmp_path)
    assert not [plot for plot in made if "minus_teacher" in plot.path.name]
    assert "student and teacher" in caplog.text


def test_a_model_without_cells_has_no_heatmap(tmp_path):
    assert write_niah_plots([make_record("teacher", [])], tmp_path) == []


def test_tables_by_length_and_depth_have_intervals_and_name_gaps(records):
    table = axis_table(records[:2], "length", "accuracy")
    assert table.head == ["Prompt length (tokens)", "Teacher (softmax)", "Window-only control"]
    assert table.rows == [
        ["256", "1.00 [0.76, 1.00]", "0.33 [0.14, 0.61]"],
        ["512", "1.00 [0.76, 1.00]", "0.33 [0.14, 0.61]"],
        ["1,024", "not measured", "not measured"],
    ]
    depths = axis_table(records[1:2], "depth", "key_rank1")
    assert [row[0] for row in depths.rows] == ["0.00", "0.50", "1.00"]
    assert depths.rows[2][1] == "1.00 [0.68, 1.00]"
    assert axis_table(records[:1], "length", "key_logprob").rows[1][1] == "-0.40"


def test_a_score_that_was_not_asked_for_is_not_measured():
    record = make_record("teacher", [Cell(length=256, depth=0.0, distance=1, exact="1")])
    assert axis_table([record], "length", "key_logprob").rows[0][1] == "not measured"


def test_difference_table(records):
    table = difference_table(records[2], records[1])
    assert table.head[1:] == ["Exact answers", "Key most likely", "Key log probability"]
    # At 256: two of four at two depths, none at the third, against 0: 4 of 12.
    assert table.rows[0] == ["256", "+0.33 ± 0.14", "+0.33 ± 0.14", "+6.00"]
    assert table.rows[2][1:] == ["not measured"] * 3
    assert table.markdown().splitlines()[1] == "| --- | --- | --- | --- |"


def test_what_cannot_be_compared_is_refused(records):
    with pytest.raises(ConfigError, match="different settings"):
        axis_table([records[0], make_record("student", [], seed=1)], "length", "accuracy")
    with pytest.raises(ConfigError, match="no needle records"):
        axis_table([], "length", "accuracy")
    provenance = records[0].provenance.model_copy(update={"prompts_hash": "other"})
    with pytest.raises(ConfigError, match="different prompts"):
        difference_table(records[2], records[0].model_copy(update={"provenance": provenance}))
