"""A recipe runs from the teacher to the report, stage by stage, and can be stopped anywhere."""

import errno
import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from subquad.errors import ConfigError, OutputError, SourceError
from subquad.eval.storage import load_results
from subquad.recipes import runner, steps
from subquad.recipes.run_folder import STAGES, RunFolder
from subquad.recipes.runner import convert_recipe, run_recipe

from ..convert.tiny_checkpoints import write_hf

PROMISED = ("recipe.yaml", "log.jsonl", "student", "report.md", "report.html", "results.json", "plots")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "student" / "model.safetensors")


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def stop_at(monkeypatch, stage: str, error: BaseException) -> None:
    def stop(shop):
        raise error

    monkeypatch.setitem(steps.STEPS, stage, stop)


def test_steps_are_the_stages_in_order():
    assert tuple(steps.STEPS) == STAGES
    assert set(steps.MAIN_PROCESS_STEPS) <= set(STAGES)


def test_whole_run_leaves_the_promised_files_and_figures(make_recipe):
    recipe = make_recipe()
    results = run_recipe(recipe, command="subquad run tiny")
    run = recipe.run_dir
    assert all((run / name).exists() for name in PROMISED)
    assert any((run / "plots").glob("*.png"))
    content = json.loads((run / "results.json").read_text())
    assert {"teacher", "student_start", "student", "window_only"} <= content["loss"].keys()
    assert content["cache_bytes"]["student"].keys() == content["cache_bytes"]["kv"].keys() == {"16", "64"}
    assert content["tokens"] == {"stage1": 128, "stage2": 128, "calibration": 64}
    assert content["command"] == "subquad run tiny"
    assert {"python", "torch", "transformers"} <= content["versions"].keys()
    assert [sample["model"] for sample in content["samples"]] == ["teacher", "student"]
    assert results == load_results(run)
    stages = [json.loads(line)["stage"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert stages == ["stage1"] * 2 + ["stage2"] * 2
    card = (run / "student" / "README.md").read_text()
    assert f"{results.loss.student:.4f}" in card


def test_exported_student_is_the_measured_one(make_recipe):
    recipe = make_recipe()
    results = run_recipe(recipe)
    model = AutoModelForCausalLM.from_pretrained(recipe.run_dir / "student")
    shop = runner._open_workshop(recipe, None)
    again = steps.measure_loss(shop, model, "student", "again")
    assert again.loss == pytest.approx(results.loss.student, rel=1e-6)
    assert results.loss.student != results.loss.student_start


def test_second_run_does_nothing(make_recipe, monkeypatch, capsys):
    recipe = make_recipe()
    first = run_recipe(recipe)
    for stage in STAGES:
        stop_at(monkeypatch, stage, AssertionError(f"{stage} ran again"))
    assert run_recipe(recipe) == first
    assert "is finished up to report; nothing to do" in "".join(capsys.readouterr().out.split("\n")).replace("  ", " ")


@pytest.mark.parametrize("stage", ["calibrate", "baseline", "stage1", "stage2", "export", "evaluate", "report"])
def test_interrupted_run_ends_like_an_uninterrupted_one(make_recipe, monkeypatch, tmp_path, stage):
    whole = make_recipe(output_dir=str(tmp_path / "whole"))
    expected = run_recipe(whole)
    broken = make_recipe(output_dir=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        stop_at(patch, stage, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_recipe(broken)
    assert not RunFolder(broken.run_dir).finished(stage)
    results = run_recipe(broken)
    assert results.loss == expected.loss
    assert_same(weights(broken.run_dir), weights(whole.run_dir))


def test_lost_artefact_is_made_again(make_recipe):
    recipe = make_recipe()
    expected = run_recipe(recipe)
    (recipe.run_dir / "student" / "model.safetensors").rename(recipe.run_dir / "kept.safetensors")
    (recipe.run_dir / "results.json").unlink()
    (recipe.run_dir / "stages" / "export.json").unlink()
    assert run_recipe(recipe).loss == expected.loss
    assert_same(weights(recipe.run_dir), load_file(recipe.run_dir / "kept.safetensors"))


def test_damaged_calibration_says_what_to_do(make_recipe, monkeypatch):
    recipe = make_recipe()
    run_recipe(recipe, last_stage="calibrate")
    (recipe.run_dir / "stages" / "calibrated.safetensors").write_bytes(b"half")
    with pytest.raises(OutputError, match=r"calibrated.safetensors is damaged.*Remove it"):
        run_recipe(recipe)
    (recipe.run_dir / "stages" / "calibrated.safetensors").unlink()
    assert run_recipe(recipe, last_stage="stage1") is None


def test_stages_without_tokens_are_left_out(make_recipe):
    recipe = make_recipe(stage1={"tokens": 0}, stage2={"tokens": 0}, calibrate={"enabled": False})
    results = run_recipe(recipe)
    assert results.loss.student == results.loss.student_start
    assert (results.tokens.stage1, results.tokens.stage2, results.tokens.calibration) == (0, 0, 0)
    assert "The mixers were not calibrated before training." in results.notes


def test_pure_mixer_has_no_window_only_control(make_recipe):
    recipe = make_recipe(convert={"mixer": {"preset": "2mamba", "window": 0}}, stage2={"tokens": 0})
    results = run_recipe(recipe)
    assert results.loss.window_only is None
    assert results.loss.student_without_far is None


def test_full_tuning_trains_every_weight(make_recipe, teacher_dir):
    recipe = make_recipe(stage2={"tokens": 128, "full": True, "learning_rate": 1e-3})
    run_recipe(recipe, last_stage="export")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(recipe.run_dir)[name], load_file(teacher_dir / "model.safetensors")[name])


def test_stages_with_rows_of_their_own_and_mixers_alone(make_recipe, teacher_dir):
    recipe = make_recipe(
        stage1={"tokens": 64, "seq_len": 16, "batch_size": 2}, stage2={"tokens": 128, "batch_size": 2, "lora": None}
    )
    run_recipe(recipe)
    folder = RunFolder(recipe.run_dir)
    assert [folder.result(stage)["steps"] for stage in ("stage1", "stage2")] == [2, 2]
    trained, teacher = weights(recipe.run_dir), load_file(teacher_dir / "model.safetensors")
    assert_same({name: trained[name] for name in teacher}, teacher)


def keeping(make_recipe, **changes):
    """A recipe whose kept keys have enough rows to fit their scores on."""
    recipe = make_recipe()
    data = {**recipe.data.model_dump(), "seq_len": 128}
    sections = {
        "convert": {"mixer": {"preset": "2mamba", "window": 4, "sinks": 1, "kept_keys": 3}},
        "calibrate": {"tokens": 128, "key_tokens": 8 * 128},
        "data": data,
        "stage1": {"tokens": 256},
        "stage2": {"tokens": 256},
        "eval": {"tokens": 256, "memory_lengths": [16], "generate_tokens": 0},
    }
    return make_recipe(**{**sections, **changes})


def test_keys_are_chosen_again_after_training(make_recipe, monkeypatch):
    recipe = keeping(make_recipe)
    run_recipe(recipe, last_stage="stage2")
    before = load_file(recipe.run_dir / "stages" / "calibrated.safetensors")
    stop_at(monkeypatch, "export", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe)
    monkeypatch.undo()
    run_recipe(recipe)
    assert RunFolder(recipe.run_dir).result("keys")["tokens"] == 1024
    assert RunFolder(recipe.run_dir).result("calibrate")["keys"]["tokens"] == 1024
    notes = load_results(recipe.run_dir).notes
    assert [note.split(" on 1,024 tokens")[0] for note in notes[:2]] == [
        "Kept keys were chosen before training",
        "Kept keys were chosen after it",
    ]
    after = weights(recipe.run_dir)
    scores = [name for name in before if ".key_score." in name]
    assert len(scores) == 2
    assert not any(torch.equal(before[name], after[name]) for name in scores)


@pytest.mark.parametrize("stage2", [{"tokens": 0}, {"tokens": 256, "lora": None}])
def test_keys_stay_where_queries_and_keys_did_not_move(make_recipe, stage2):
    recipe = keeping(make_recipe, stage1={"tokens": 0}, stage2=stage2)
    run_recipe(recipe, last_stage="export")
    assert RunFolder(recipe.run_dir).result("keys") == {"tokens": 0}
    before, after = load_file(recipe.run_dir / "stages" / "calibrated.safetensors"), weights(recipe.run_dir)
    assert all(torch.equal(before[name], after[name]) for name in before if ".key_score." in name)


def test_stopping_early_and_going_on(make_recipe):
    recipe = make_recipe()
    assert run_recipe(recipe, last_stage="plan") is None
    folder = RunFolder(recipe.run_dir)
    assert folder.finished("plan")
    assert not folder.finished("convert")
    assert run_recipe(recipe, last_stage="evaluate") is not None
    assert not (recipe.run_dir / "report.md").exists()
    with pytest.raises(ConfigError, match=r"last_stage 'stage3' is unknown; it is one of plan"):
        run_recipe(recipe, last_stage="stage3")


def test_another_recipe_needs_fresh(make_recipe):
    run_recipe(make_recipe(), last_stage="plan")
    with pytest.raises(OutputError, match="seed: 0 there, 5 here"):
        run_recipe(make_recipe(seed=5), last_stage="plan")
    run_recipe(make_recipe(seed=5), resume=False, last_stage="plan")
    assert "seed: 5" in (make_recipe().run_dir / "recipe.yaml").read_text()


def test_folder_in_use_is_refused(make_recipe):
    recipe = make_recipe()
    recipe.run_dir.mkdir()
    with FileLock(recipe.run_dir / ".lock"), pytest.raises(OutputError, match="is in use by another run"):
        run_recipe(recipe, last_stage="plan")
    run_recipe(recipe, last_stage="plan")


def test_full_disk_is_explained_and_resumable(make_recipe, monkeypatch):
    recipe = make_recipe()
    with monkeypatch.context() as patch:
        stop_at(patch, "stage1", OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OutputError, match=r"cannot be written.*No space left.*continues with the last finished"):
            run_recipe(recipe, last_stage="stage1")
        stop_at(patch, "stage1", RuntimeError("a bug"))
        with pytest.raises(RuntimeError, match="a bug"):
            run_recipe(recipe, last_stage="stage1")
    assert RunFolder(recipe.run_dir).finished("baseline")
    run_recipe(recipe, last_stage="stage1")


def test_wrong_teacher_or_recipe_stops_before_weights_load(make_recipe, tmp_path, monkeypatch):
    with pytest.raises(SourceError):
        run_recipe(make_recipe(model={"source": str(tmp_path / "absent")}))
    monkeypatch.setattr("subquad.recipes.workshop.load_teacher", None)
    with pytest.raises(ConfigError, match="'7' is outside the model"):
        run_recipe(make_recipe(convert={"layers": {"7": "softmax"}}))
    with pytest.raises(ConfigError, match="every layer stays softmax"):
        run_recipe(make_recipe(convert={"mixer": "softmax"}))
    assert not (make_recipe().run_dir / "recipe.yaml").exists()


def test_teacher_without_tokenizer_is_refused(make_recipe, tmp_path):
    source = write_hf(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ValueError, match="has no tokenizer"):
        run_recipe(make_recipe(model={"source": str(source)}))


def test_converted_checkpoint_is_calibrated_but_untrained(make_recipe, tmp_path):
    recipe = make_recipe()
    results = run_recipe(recipe)
    directory = convert_recipe(recipe, tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(directory)
    shop = runner._open_workshop(recipe, None)
    loss = steps.measure_loss(shop, model, "student", "converted").loss
    assert loss == pytest.approx(results.loss.student_start, rel=1e-6)


def test_untrained_checkpoint_does_not_replace_the_trained_one(make_recipe):
    recipe = make_recipe()
    run_recipe(recipe)
    weights = recipe.run_dir / "student" / "model.safetensors"
    before = weights.read_bytes()
    for directory in (recipe.run_dir / "student", recipe.run_dir / "student" / "inner", recipe.run_dir / "stages"):
        with pytest.raises(OutputError, match="belongs to the run"):
            convert_recipe(recipe, directory)
    assert weights.read_bytes() == before
    assert convert_recipe(recipe, recipe.run_dir / "converted").is_dir()
