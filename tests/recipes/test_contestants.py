"""Loading what an evaluation compares, and the loss of each."""

import dataclasses
import json
import shutil

import pytest
import torch

from subquad.errors import ConfigError, OutputError
from subquad.eval.layers import run_layers
from subquad.eval.loss import evaluate_loss
from subquad.eval.loss_record import LossSettings, run_loss, unpack_loss
from subquad.eval.records import load_records, record_path
from subquad.recipes.contestants import load_contestants
from subquad.recipes.runner import run_recipe
from subquad.recipes.schema import parse_recipe

from ..convert.tiny_checkpoints import write_hf


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    teacher = write_hf(folder / "teacher")
    recipe = {
        "name": "tiny",
        "output_dir": str(folder / "run"),
        "model": {"source": str(teacher)},
        "convert": {"mixer": {"preset": "2mamba", "window": 8, "sinks": 2}},
        "calibrate": {"tokens": 64},
        "data": {
            "train": {"kind": "text", "paths": [str(_text(folder, "train"))]},
            "eval": {"kind": "text", "paths": [str(_text(folder, "eval"))]},
            "seq_len": 32,
        },
        "stage1": {"tokens": 64},
        "stage2": {"tokens": 64},
        "trainer": {"report_to": []},
    }
    run_recipe(parse_recipe(recipe), last_stage="export", command="test")
    return folder / "run"


def _text(folder, part):
    path = folder / f"{part}.txt"
    path.write_text("".join(f"{part} line {number}: the heron stands in the shallow water.\n" for number in range(40)))
    return path


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 60, (32,), generator=generator)} for _ in range(4)]


def losses(contestants, rows):
    return {c.name: evaluate_loss(c.model, rows, mode=c.mode).loss for c in contestants}


def test_a_run_brings_its_teacher_and_control(run_dir, rows):
    contestants = load_contestants(str(run_dir))
    assert [c.name for c in contestants] == ["teacher", "window_only", "student"]
    found = losses(contestants, rows)
    assert len(set(found.values())) == 3
    assert contestants[0].model is contestants[1].model
    alone = load_contestants(contestants[0].checkpoint)
    assert losses(alone, rows) == {"teacher": pytest.approx(found["teacher"], abs=1e-6)}


def test_the_student_folder_is_enough(run_dir):
    assert [c.name for c in load_contestants(str(run_dir / "student"))] == ["teacher", "window_only", "student"]


def test_others_are_named_by_their_folder_or_as_asked(run_dir, tmp_path):
    other = write_hf(tmp_path / "my other")
    for given, name in (
        (str(other), "my-other"),
        (f"mine={other}", "mine"),
        # A student is called by its run, of which there are many.
        (str(run_dir / "student"), "run"),
        (str(run_dir), "run"),
    ):
        found = load_contestants(str(run_dir), others=[given])[-1]
        assert found.name == name
    with pytest.raises(ConfigError, match="called student; give one another name"):
        load_contestants(str(run_dir), others=[f"student={other}"])
    with pytest.raises(ConfigError, match="cannot be the name of a model"):
        load_contestants(str(run_dir), others=[f"a/b={other}"])


def test_a_changed_window_or_moved_rows_are_another_model(run_dir, tmp_path):
    first = {c.name: c.weights for c in load_contestants(str(run_dir))}
    student = tmp_path / "run" / "student"
    shutil.copytree(run_dir, student.parent)
    config = json.loads((student / "config.json").read_text())
    for mixer in config["mixers"]:
        mixer["window"] = 4
    (student / "config.json").write_text(json.dumps(config))
    changed = load_contestants(str(student.parent))
    weights = {c.name: c.weights for c in changed}
    assert weights["teacher"] == first["teacher"]
    assert weights["window_only"] != first["window_only"]
    assert weights["student"] != first["student"]
    with torch.no_grad():
        embedding = changed[-1].model.get_input_embeddings().weight
        embedding[[3, 4, 5, 6]] = embedding[[4, 3, 6, 5]].clone()
    assert dataclasses.replace(changed[-1]).weights != weights["student"]


def test_a_checkpoint_outside_a_run_needs_a_teacher(run_dir, tmp_path):
    moved = tmp_path / "moved"
    moved.symlink_to(run_dir / "student")
    with pytest.raises(OutputError, match="--teacher"):
        load_contestants(str(moved))
    found = load_contestants(str(moved), teacher=load_contestants(str(run_dir))[0].checkpoint)
    assert [c.name for c in found] == ["teacher", "window_only", "student"]


def test_loss_records_resume(run_dir, rows, tmp_path):
    contestants = load_contestants(str(run_dir))
    settings = LossSettings(data="random tokens", tokens=128, seq_len=32)
    first = run_loss(contestants, rows, settings, tmp_path, command="test")
    expected = losses(contestants, rows)
    assert {r.model: r.metrics["loss"].value for r in first} == pytest.approx(expected)
    assert unpack_loss(first[0].details).loss == first[0].metrics["loss"].value
    # Finished records are kept, a missing one is measured, and other settings measure anew.
    record_path(tmp_path, "loss", "student").unlink()
    again = run_loss(contestants, rows, settings, tmp_path, command="other")
    assert [r.provenance.command for r in again] == ["test", "test", "other"]
    assert len(load_records(tmp_path)) == 3
    assert {r.provenance.command for r in run_loss(contestants, rows[:2], settings, tmp_path, command="new")} == {"new"}


def test_layers_are_measured_where_a_student_runs(run_dir, rows, tmp_path):
    (record,) = run_layers(load_contestants(str(run_dir)), rows, tmp_path, command="test")
    layers = record.details["layers"]
    assert [layer["layer"] for layer in layers] == list(range(len(layers)))
    assert all(0 < layer["relative_error"] < 1 for layer in layers)
    assert all(len(layer["half_lives"]) == 2 and min(layer["half_lives"]) > 1 for layer in layers)
    assert all(0 < share < 1 for layer in layers for share in layer["far_shares"])
    assert run_layers(load_contestants(str(run_dir)), rows, tmp_path, command="other") == [record]
