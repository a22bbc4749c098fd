"""Reading `log.jsonl`."""

from __future__ import annotations

import json

import pytest

from subquad.eval.training_log import read_curves


def write_log(folder, records):
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_curves_by_stage_with_the_later_line_of_a_point(tmp_path):
    write_log(
        tmp_path,
        [
            {"stage": "stage1", "tokens": 512, "loss": 0.5},
            {"stage": "stage1", "tokens": 1024, "loss": 0.4},
            {"stage": "stage1", "tokens": 1024, "loss": 0.39},
            {"stage": "stage2", "tokens": 256, "loss": 0.2},
            {"stage": "stage1", "tokens": 1536, "loss": float("nan")},
        ],
    )
    curves, notes = read_curves(tmp_path)
    assert notes == []
    assert [(curve.stage, curve.tokens, curve.losses) for curve in curves] == [
        ("stage1", [512, 1024], [0.5, 0.39]),
        ("stage2", [256], [0.2]),
    ]


def test_missing_empty_and_unreadable_logs_are_noted(tmp_path):
    assert read_curves(tmp_path) == ([], ["The run has no log.jsonl, so there are no training curves."])
    (tmp_path / "log.jsonl").write_text("")
    assert read_curves(tmp_path)[1] == ["log.jsonl holds no training steps, so there are no training curves."]
    (tmp_path / "log.jsonl").write_text('nonsense\n5\n{"stage": "stage1", "tokens": 1, "loss": "x"}\n')
    curves, notes = read_curves(tmp_path)
    assert curves == []
    assert notes[0] == "Unreadable lines of log.jsonl that were left out: 3."


@pytest.mark.parametrize("stage", ["../../escaped/x", "a/b", "<b>x", "..", "", "x" * 300])
def test_a_stage_that_is_no_name_is_left_out(tmp_path, stage):
    write_log(tmp_path, [{"stage": stage, "tokens": tokens, "loss": 1.0} for tokens in (1, 2)])
    curves, notes = read_curves(tmp_path)
    assert curves == []
    assert notes[0] == "Unreadable lines of log.jsonl that were left out: 2."
