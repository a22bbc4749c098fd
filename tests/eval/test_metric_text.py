"""Metrics as text, in the report and on the console: no standard error of 0 that says nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from subquad.eval.metric_text import extreme_interval, known_error, metric_text
from subquad.eval.records import EvalRecord, Metric, save_record
from subquad.eval.report import load_run
from subquad.eval.report.differences import Difference
from subquad.eval.report.tasks import task_section
from subquad.recipes.suite import SuiteResult, render_suite

from .report_records import niah_record


def needle_record(model: str, *, error: float | None = 0.0, lengths: tuple[int, ...] = (192, 320)) -> EvalRecord:
    """A record of 18 prompts without one exact answer, as older versions wrote it (`error` 0) or as this one does."""
    record = niah_record(model, lengths=(192, 320), depths=3, samples=3)
    cells = [cell | {"exact": "000", "rank1": "000"} for cell in record.details["cells"] if cell["length"] in lengths]
    share = Metric(value=0.0, standard_error=error, num=3 * len(cells))
    metrics = {**record.metrics, "accuracy": share, "key_rank1": share}
    return record.model_copy(update={"metrics": metrics, "details": {"cells": cells}})


def printed(*records: EvalRecord) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render_suite(SuiteResult(Path("out"), list(records), {})))
    return console.file.getvalue()


@pytest.mark.parametrize(
    "name, value, error, num, text",
    [
        ("accuracy", 0.0, 0.0, 18, "0.000 [0.000, 0.176]"),
        ("accuracy", 0.0, None, 18, "0.000 [0.000, 0.176]"),
        ("key_rank1", 1.0, 0.0, 12, "1.000 [0.758, 1.000]"),
        ("exact_match,strict-match", 1.0, None, 12, "1.000 [0.758, 1.000]"),
        ("acc", 0.5, 0.1, 18, "0.500 ± 0.100"),
        ("acc", 1.0, 0.05, 18, "1.000 ± 0.050"),
        ("mcc", 0.0, 0.0, 200, "0.000"),
        ("key_reciprocal_rank", 1.0, None, 18, "1.000"),
    ],
)
def test_a_share_at_0_or_1_shows_its_interval(name, value, error, num, text):
    assert metric_text(name, Metric(value=value, standard_error=error, num=num), 3) == text


def test_an_error_of_0_of_equal_examples_is_none_in_a_record():
    assert known_error(0.0, 0.0) is None
    assert known_error(1.0, 0.0) is None
    assert known_error(0.5, 0.0) == 0.0
    assert known_error(1.0, 0.1) == 0.1
    assert extreme_interval("loss", Metric(value=0.0, standard_error=0.0, num=3)) is None


@pytest.mark.parametrize("error", [0.0, None])
def test_every_task_shows_intervals_and_finds_the_baseline_in_them(tmp_path, error):
    for model in ("teacher", "student"):
        save_record(needle_record(model, error=error), tmp_path)
    table = task_section(load_run(tmp_path), tmp_path).blocks[0]
    row = next(row for row in table.rows if row[1].text == "accuracy")
    assert [cell.text for cell in row[3:6]] == ["1e-05", "0.000 [0.000, 0.176]°", "0.000 [0.000, 0.176]°"]
    difference = row[table.head.index("Student − teacher")]
    assert (difference.text, difference.mark) == ("+0.000", "tie")


def test_a_share_far_from_its_baseline_is_not_at_it(tmp_path):
    record = needle_record("teacher")
    save_record(record.model_copy(update={"baselines": {"accuracy": 0.25}}), tmp_path)
    table = task_section(load_run(tmp_path), tmp_path).blocks[0]
    assert "°" not in next(row for row in table.rows if row[1].text == "accuracy")[4].text


def test_a_difference_without_spread_keeps_its_mark():
    cell = Difference(-1.0, 0.0, True, paired=True).cell(3)
    assert (cell.text, cell.mark) == ("-1.000", "worse")


def test_the_console_shows_intervals():
    text = printed(needle_record("teacher"))
    assert "0.0000 [0.0000, 0.1759]" in text
    assert "± 0.0000" not in text
    assert "†" not in text


def test_the_console_marks_needle_scores_over_other_lengths():
    text = printed(needle_record("teacher"), needle_record("short", lengths=(192,)), needle_record("student"))
    line = next(line for line in text.splitlines() if "accuracy" in line)
    assert line.count("†") == 1
    assert line.index("†") > line.index("[")
    assert "† niah of short: lengths 192; the first model's: 192, 320" in text
