"""Rows, the results file, and what is derived from rows."""

import json
import math
import subprocess

import pytest

from benchmarks.suite import rows as rows_module
from benchmarks.suite.derived import Peaks, crossover, summary_rows
from benchmarks.suite.environment import checkout_commit
from benchmarks.suite.rows import ResultsFile, Row
from subquad.errors import OutputError

RUN = {"gpu": "NVIDIA H200 (80 %)", "commit": "abc123-dirty", "date": "20260101-000000"}


def test_the_file_is_named_after_gpu_commit_and_date(tmp_path):
    assert ResultsFile(tmp_path, RUN).path.name == "nvidia-h200-80-abc123-dirty-20260101-000000.jsonl"


def test_every_row_is_there_as_soon_as_it_is_added(tmp_path):
    results = ResultsFile(tmp_path / "new", RUN)
    for count in (1, 2, 3):
        results.add(Row(what=f"row {count}", metrics={"x": count}))
        lines = results.path.read_text().splitlines()
        assert [json.loads(line)["metrics"]["x"] for line in lines] == list(range(1, count + 1))
    assert all(json.loads(line)["run"] == RUN for line in lines)
    assert list(results.path.parent.iterdir()) == [results.path]


def test_a_write_that_fails_leaves_the_rows_before_it(tmp_path, monkeypatch):
    results = ResultsFile(tmp_path, RUN)
    results.add(Row(what="kept"))

    def fails(path, content):
        raise OutputError("disk full")

    monkeypatch.setattr(rows_module, "atomic_file", fails)
    with pytest.raises(OutputError):
        results.add(Row(what="lost"))
    assert json.loads(results.path.read_text())["what"] == "kept"


def test_numbers_that_json_has_not_are_words():
    row = Row(what="x", metrics={"a": math.nan, "b": [math.inf, 1 / 3], "c": None, "d": True, (1, 2): "key"})
    loaded = json.loads(row.to_json(RUN), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert loaded["metrics"] == {"a": "nan", "b": ["inf", 0.333333], "c": None, "d": True, "(1, 2)": "key"}


@pytest.mark.parametrize("status, failed", [("ok", False), ("skipped", False), ("failed", True), ("error", True)])
def test_which_rows_fail_the_run(status, failed):
    assert Row(what="x", status=status).failed is failed


@pytest.mark.parametrize(
    "ratios, length",
    [
        ({1024: 0.5, 2048: 2.0}, 1024 * 2**0.5),
        ({1024: 0.5, 2048: 1.5, 4096: 0.9, 8192: 1.5}, None),
        ({1024: 1.5, 2048: 3.0}, 1024.0),
        ({1024: 0.5, 2048: 0.9}, None),
        ({}, None),
    ],
)
def test_crossover(ratios, length):
    found = crossover(ratios)
    if 8192 in ratios:  # the last crossing counts
        assert 4096 < found < 8192
    else:
        assert found == (None if length is None else pytest.approx(length))


def _timing(what: str, which: str, tokens: int, **metrics) -> Row:
    config = {"pass": which, "head_dim": 64, "groups": 4, "batch": 1, "tokens": tokens}
    return Row(what=what, section="timings", case="c", config=config, metrics=metrics)


def test_shares_are_of_the_peaks_of_the_same_run():
    peaks = Peaks()
    early = _timing("subquad", "forward", 1024, tflops=100.0)
    peaks.complete(early)
    assert "share_of_matmul" not in early.metrics
    peaks.complete(Row(what="matmul", metrics={"tflops": 800.0}))
    peaks.complete(Row(what="copy", metrics={"gbps": 4000.0}))
    row = _timing("subquad", "forward", 1024, tflops=200.0, gbps=1000.0)
    peaks.complete(row)
    assert row.metrics["share_of_matmul"] == 0.25
    assert row.metrics["over_bandwidth_floor"] == 4.0


def test_summary_of_passes_switch_and_decoding():
    rows = [_timing("subquad", "forward", 1024, speedup_vs_sdpa=0.5)]
    rows += [_timing("subquad", "forward", 4096, speedup_vs_sdpa=2.0)]
    rows += [_timing("quadratic", "forward", 1024, median_ms=1.0), _timing("chunked", "forward", 1024, median_ms=2.0)]
    rows += [_timing("quadratic", "forward", 4096, median_ms=8.0), _timing("chunked", "forward", 4096, median_ms=4.0)]
    rows += [
        _timing("subquad_step", "decode", 1, median_ms=2.0),
        _timing("subquad_buffered", "decode", 32, median_ms=8.0),
    ]
    rows += [_timing("sdpa_flash", "decode", 1024, median_ms=1.0), _timing("sdpa_flash", "decode", 4096, median_ms=4.0)]
    found = {
        (row.what, row.config.get("kind", row.config["pass"])): row.metrics["length"] for row in summary_rows(rows)
    }
    assert found == {
        ("crossover", "forward"): pytest.approx(2048),
        ("switch", "forward"): pytest.approx(2048),
        ("decode crossover", "subquad_step"): pytest.approx(2048),
        ("decode crossover", "subquad_buffered"): None,
    }


def test_rows_that_are_not_ok_are_not_summarised():
    row = _timing("subquad", "forward", 1024, speedup_vs_sdpa=2.0)
    row.status = "failed"
    assert summary_rows([row]) == []


def test_targets_are_judged_where_they_were_measured():
    rows = [
        _timing("subquad", "forward", 32768, speedup_vs_sdpa=3.0, share_of_matmul=0.3),
        _timing("subquad", "forward_backward", 4096, speedup_vs_sdpa=0.5),
        _timing("subquad", "forward_backward", 8192, speedup_vs_sdpa=1.1),
        _timing("subquad", "forward_backward", 65536, speedup_vs_sdpa=3.9),
        _timing("subquad_step", "decode", 1, median_ms=1.0, over_bandwidth_floor=1.2),
    ]
    targets = [row.metrics for row in summary_rows(rows) if row.what == "target"]
    assert [target["reached"] for target in targets] == [True, False, True, False, True]
    assert [target["value"] for target in targets] == [0.3, 0.3, 1.1, 3.9, pytest.approx(1 / 1.2)]


def test_commit_of_a_checkout(tmp_path):
    assert checkout_commit(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = checkout_commit(tmp_path)
    assert len(commit) == 10
    (tmp_path / "file").write_text("two")
    assert checkout_commit(tmp_path) == f"{commit}-dirty"
