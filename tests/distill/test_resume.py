"""A run that was killed and started again is the run that was not."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subquad.distill import newest_valid_checkpoint, run_stage1
from subquad.distill.callbacks import read_log
from subquad.errors import OutputError

from .tiny import SAVE_STEPS, SEQ_LEN, STEPS, run_tiny, tiny_config, tiny_dataset, tiny_model

TIMES = ("tokens_per_s", "wall_s")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("uninterrupted")
    for stage in ("stage1", "stage2"):
        run_tiny(stage, folder)
    return folder


def curve(folder: Path, stage: str) -> list[dict]:
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_log(folder / "log.jsonl", stage)
    ]


def killed(stage: str, folder: Path, moment: str) -> None:
    script = Path(__file__).with_name("tiny.py")
    env = os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, stage, folder, moment], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("stage, moment", [("stage1", "in_second_save"), ("stage2", "between_saves")])
def test_sigkill_then_resume_gives_the_uninterrupted_run(stage, moment, tmp_path, uninterrupted):
    killed(stage, tmp_path, moment)
    assert newest_valid_checkpoint(tmp_path / stage).name == f"checkpoint-{SAVE_STEPS}"

    result = run_tiny(stage, tmp_path)

    assert result.resumed_step == SAVE_STEPS
    assert curve(tmp_path, stage) == curve(uninterrupted, stage)
    assert (tmp_path / "log.jsonl").read_text().count("\n") == len(curve(tmp_path, stage))
    resumed, whole = (
        load_file(f / stage / f"checkpoint-{STEPS}" / "model.safetensors") for f in (tmp_path, uninterrupted)
    )
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert not (tmp_path / stage / "incomplete").exists()


def test_log_has_one_line_per_logged_step_of_each_stage(uninterrupted):
    for stage, groups in (("stage1", {"maps", "decay", "other"}), ("stage2", {"mixer", "base"})):
        lines = read_log(uninterrupted / "log.jsonl", stage)
        assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 10]
        assert [line["tokens"] for line in lines] == [2 * SEQ_LEN * line["step"] for line in lines]
        assert all(set(line["lr"]) == groups for line in lines)
        assert all(line["grad_norm"] > 0 and line["tokens_per_s"] > 0 for line in lines)


def test_corrupt_newest_checkpoint_falls_back_with_a_warning(tmp_path, uninterrupted, caplog):
    run_tiny("stage1", tmp_path)
    newest = tmp_path / "stage1" / f"checkpoint-{STEPS}"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")

    result = run_tiny("stage1", tmp_path)

    assert result.resumed_step == 2 * SAVE_STEPS
    assert f"{newest} is damaged (model.safetensors is not what was written)" in caplog.text
    assert newest_valid_checkpoint(tmp_path / "stage1") == newest
    assert curve(tmp_path, "stage1") == curve(uninterrupted, "stage1")


def test_finished_stage_is_loaded_and_not_trained_again(tmp_path):
    first = run_tiny("stage1", tmp_path)
    log = (tmp_path / "log.jsonl").read_text()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    again = run_tiny("stage1", tmp_path)

    assert again.resumed_step == STEPS
    assert (again.first_loss, again.last_loss) == (first.first_loss, first.last_loss)
    assert (tmp_path / "log.jsonl").read_text() == log
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_other_training_text_is_refused(tmp_path):
    run_tiny("stage1", tmp_path)
    data = tiny_dataset()
    other = data.map(lambda row: {"input_ids": row["input_ids"].flip(0)})
    assert len(other) == len(data)
    with pytest.raises(OutputError, match=r"other settings \(data: "):
        run_stage1(tiny_model(), other, tiny_config("stage1"), tmp_path / "stage1", tmp_path / "log.jsonl")


def test_work_folder_with_other_settings_is_refused(tmp_path):
    run_tiny("stage1", tmp_path)
    with pytest.raises(OutputError, match=r"learning_rate: 0.01 there, 0.02 now"):
        run_tiny("stage1", tmp_path, learning_rate=2e-2)
    # what only changes what is shown or kept may change
    assert run_tiny("stage1", tmp_path, keep_checkpoints=3).resumed_step == STEPS


def test_finished_stage_of_a_sharded_run_loads_unsharded_but_an_unfinished_one_does_not_resume(tmp_path):
    run_tiny("stage1", tmp_path)
    settings = tmp_path / "stage1" / "settings.json"
    settings.write_text(settings.read_text().replace('"fsdp": false', '"fsdp": true'))
    assert run_tiny("stage1", tmp_path).resumed_step == STEPS
    shutil.rmtree(tmp_path / "stage1" / f"checkpoint-{STEPS}")
    with pytest.raises(OutputError, match=r"fsdp: True there, False now"):
        run_tiny("stage1", tmp_path)


def test_checkpoint_holds_the_trained_parameters_and_nothing_else(tmp_path):
    run_tiny("stage1", tmp_path)
    saved = load_file(tmp_path / "stage1" / f"checkpoint-{STEPS}" / "model.safetensors")
    assert set(saved) == {name for name, _ in tiny_model().named_parameters() if ".self_attn.mixer." in name}
