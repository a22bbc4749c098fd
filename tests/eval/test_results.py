"""`results.json`: content, atomic writing, and damaged files."""

from __future__ import annotations

import json
import os

import pytest
import torch
from pydantic import ValidationError

from subquad.convert.atomic import atomic_file
from subquad.errors import ConfigError, OutputError
from subquad.eval import storage
from subquad.eval.loss import LossResult
from subquad.eval.results import gap_closed, summarise_losses
from subquad.eval.storage import collect_versions, git_commit, load_results, save_results

from .conftest import make_results


def constant_result(loss, num_rows=4):
    """Rows of 10 tokens; the first half of each row 0.5 nats above the second."""
    sums = torch.tensor([[5 * (loss + 0.25), 5 * (loss - 0.25)]] * num_rows, dtype=torch.float64)
    sums += torch.arange(num_rows)[:, None] * 0.1
    return LossResult(sums, torch.full((num_rows, 2), 5), (64,))


def test_summary_of_losses():
    losses = {
        "teacher": constant_result(3.0),
        "window_only": constant_result(3.2),
        "student_start": constant_result(3.3),
        "student": constant_result(3.1),
    }
    table, differences, by_position = summarise_losses(losses)
    assert table.teacher == losses["teacher"].loss
    assert table.gap_closed == pytest.approx(0.5)
    assert table.standard_error["student"] == losses["student"].standard_error
    assert (table.num_tokens, table.num_rows) == (40, 4)
    assert list(table.measured()) == ["teacher", "window_only", "student_start", "student"]
    pairs = {(pair.first, pair.second): pair.difference for pair in differences}
    assert pairs[("student", "student_start")] == pytest.approx(-0.2)
    assert pairs[("student", "window_only")] == pytest.approx(-0.1)
    assert pairs[("student", "teacher")] == pytest.approx(0.1)
    assert [(bucket.start, bucket.end, bucket.num_tokens) for bucket in by_position] == [(0, 64, 20), (64, None, 20)]
    assert by_position[0].loss["student"] - by_position[1].loss["student"] == pytest.approx(0.5)


def test_no_share_of_a_gap_within_its_error():
    noise = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [2.1, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    control = LossResult(constant_result(3.0).row_sums + noise, torch.full((4, 2), 5), (64,))
    losses = {"teacher": constant_result(3.0), "window_only": control, "student": constant_result(2.9)}
    table, _, _ = summarise_losses(losses)
    assert table.window_only > table.teacher
    assert table.gap_closed is None


def test_summary_needs_teacher_and_student_on_the_same_tokens():
    with pytest.raises(ConfigError, match="teacher are missing"):
        summarise_losses({"student": constant_result(3.0)})
    with pytest.raises(ConfigError, match="different tokens"):
        summarise_losses({"student": constant_result(3.0), "teacher": constant_result(3.0, num_rows=5)})


@pytest.mark.parametrize(
    "student, window_only, expected",
    [(3.0, 3.2, 1.0), (3.2, 3.2, 0.0), (3.3, 3.2, -0.5), (3.1, None, None), (3.1, 2.9, None), (3.1, 3.0, None)],
)
def test_gap_closed(student, window_only, expected):
    assert gap_closed(3.0, student, window_only) == (None if expected is None else pytest.approx(expected))


def test_round_trip_and_the_promised_keys(tmp_path):
    results = make_results()
    path = save_results(results, tmp_path / "runs" / "demo")
    assert load_results(path.parent) == results
    content = json.loads(path.read_text())
    assert {"teacher", "student_start", "student", "window_only"} <= set(content["loss"])
    assert content["loss"]["student"] == 3.1234
    assert content["cache_bytes"]["kv"]["2048"] == 46_080 * 2048
    assert content["cache_bytes"]["student"]["2048"] == 52_428_800
    assert content["tokens"]["stage1"] == 20480
    assert content["tokens"]["stage2"] == 10240
    assert content["versions"]["torch"] == "2.13.0"
    assert content["commit"] == "0123456789abcdef"


def test_a_failed_write_keeps_the_old_file_and_leaves_no_scrap(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    atomic_file(path, b"old")

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OutputError, match="No space left"):
        atomic_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="could not be written"):
        save_results(make_results(), tmp_path / "file" / "run")


def test_missing_file(tmp_path):
    with pytest.raises(OutputError, match=r"has no results\.json.*finish the run"):
        load_results(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not JSON at line 1"),
        (b'{"loss": {', "not JSON at line 1"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[]", "not a results file"),
        (b'{"loss": 3}', "(?s)loss: .*tokens: Field required.*Evaluate the run again"),
    ],
)
def test_damaged_file(tmp_path, content, message):
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(OutputError, match=message):
        load_results(tmp_path)


def test_other_layout_is_refused(tmp_path):
    content = json.loads(make_results().model_dump_json())
    (tmp_path / "results.json").write_text(json.dumps({**content, "schema_version": 2}))
    with pytest.raises(OutputError, match="schema_version"):
        load_results(tmp_path)


def test_a_loss_that_is_no_number_is_refused():
    loss = make_results().loss.model_dump()
    with pytest.raises(ValidationError, match="finite"):
        make_results(loss={**loss, "student": float("nan")})


def test_versions_and_commit():
    versions = collect_versions()
    assert versions["torch"].startswith(torch.__version__.split("+")[0])
    assert versions["python"].count(".") == 2
    commit = git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_commit_outside_a_checkout_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "__file__", str(tmp_path / "storage.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
