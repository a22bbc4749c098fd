"""A run from random weights: trained, exported, measured, resumed."""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

import subquad.models  # noqa: F401  registers the classes
from subquad.distill import newest_valid_checkpoint
from subquad.distill.callbacks import read_log
from subquad.distill.objectives import LogitObjective
from subquad.distill.trainer import DistillTrainer
from subquad.errors import ConfigError, DataError, OutputError, TrainingError
from subquad.pretrain.model import build_model, plan_model
from subquad.pretrain.results import load_pretrain_results
from subquad.pretrain.run import run_pretrain
from subquad.pretrain.schema import load_pretrain_recipe
from subquad.recipes.checkpoint import load_checkpoint
from subquad.recipes.loader import recipe_to_yaml
from subquad.recipes.suite import evaluate_suite

from .tiny import SAVE_STEPS, SEQ_LEN, STEPS

TIMES = ("tokens_per_s", "wall_s")


def curve(folder: Path) -> list[dict]:
    lines = read_log(folder / "log.jsonl", "pretrain")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def test_run_trains_exports_and_measures(make_recipe):
    training = {"tokens": 60 * 4 * SEQ_LEN, "batch_size": 4, "learning_rate": 1e-2}
    recipe = make_recipe(mixer="2mamba", training=training)

    results = run_pretrain(recipe)

    lines = read_log(recipe.run_dir / "log.jsonl", "pretrain")
    assert results.tokens == lines[-1]["tokens"] == 60 * 4 * SEQ_LEN
    # random weights know nothing; the text has a dozen words
    assert abs(lines[0]["loss"] - math.log(270)) < 0.5
    assert results.loss.value < 0.7 * math.log(270)
    assert results.loss.num == sum(bucket.num_tokens for bucket in results.by_position)
    label, count = next(iter(results.mixers.items()))
    assert (label.startswith("2mamba-pure ("), count, len(results.mixers)) == (True, 2, 1)
    assert load_pretrain_results(recipe.run_dir) == results
    model = AutoModelForCausalLM.from_pretrained(recipe.run_dir / "model")
    assert sum(p.numel() for p in model.parameters()) == results.parameters
    assert model.model.layers[0].self_attn.mixer_config == recipe.mixer
    assert load_checkpoint(str(recipe.run_dir / "model")).tokenizer is not None
    assert "trained from random weights" in (recipe.run_dir / "model" / "README.md").read_text()


def test_its_checkpoint_is_evaluated_without_a_teacher(make_recipe, tmp_path):
    recipe = make_recipe(mixer="2mamba")
    results = run_pretrain(recipe)
    overrides = [f"loss.text=[{recipe.data.eval.paths[0]}]", f"loss.seq_len={SEQ_LEN}", "loss.tokens=256"]
    settings = {"config": None, "overrides": overrides, "teacher": None, "others": (), "command": "eval"}
    found = evaluate_suite(str(recipe.run_dir), ["loss"], output=tmp_path / "evals", **settings)
    assert found.failures == {}
    assert [record.model for record in found.records] == ["student"]
    assert abs(found.records[0].metrics["loss"].value - results.loss.value) < 0.2


def test_a_finished_run_is_not_repeated_and_another_recipe_is_refused(make_recipe):
    first = run_pretrain(make_recipe())
    again = run_pretrain(make_recipe())
    assert again == first  # `created` among the rest
    with pytest.raises(OutputError, match=r"training\.tokens: 640 there, 1280 here"):
        run_pretrain(make_recipe(training={**make_recipe().training.model_dump(), "tokens": 1280}))
    fresh = run_pretrain(make_recipe(seed=1), resume=False)
    assert fresh.seed == 1
    assert fresh.loss != first.loss


def test_a_lost_checkpoint_is_made_again(make_recipe):
    recipe = make_recipe()
    first = run_pretrain(recipe)
    (recipe.run_dir / "model" / "config.json").unlink()
    (recipe.run_dir / "model").rename(recipe.run_dir / "elsewhere")
    again = run_pretrain(recipe)
    assert again.loss == first.loss


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_export_is_to_be_removed_and_is_made_again(make_recipe, name):
    recipe = make_recipe()
    first = run_pretrain(recipe)
    (recipe.run_dir / "stages" / "evaluate.json").unlink()
    file = recipe.run_dir / "model" / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(OutputError, match=rf"model cannot be read: .*\. Remove {recipe.run_dir / 'model'} and run"):
        run_pretrain(recipe)
    shutil.rmtree(recipe.run_dir / "model")
    assert run_pretrain(recipe).loss == first.loss


def test_a_lost_log_is_no_nan(make_recipe):
    recipe = make_recipe()
    run_pretrain(recipe)
    shutil.rmtree(recipe.run_dir / "model")
    (recipe.run_dir / "log.jsonl").unlink()
    checkpoints = recipe.run_dir / "checkpoints" / "pretrain"
    with pytest.raises(OutputError, match=rf"log.jsonl has no losses of this training.*remove {checkpoints}"):
        run_pretrain(recipe)
    shutil.rmtree(checkpoints)
    assert math.isfinite(run_pretrain(recipe).train_loss)


def test_what_is_refused_before_training_is_not_in_the_way_of_its_mend(make_recipe, texts, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("the heron stands.\n")
    good = make_recipe().model_dump(mode="json")
    eval_text = {"kind": "text", "paths": [str(short)]}
    for changes in (
        {"tokenizer": {"vocab_size": 5000}},
        {"tokenizer": {"source": str(tmp_path / "absent")}},
        {"data": {**good["data"], "eval": eval_text}},
        {"training": {**good["training"], "batch_size": 10_000}},
    ):
        recipe = make_recipe(**changes)
        with pytest.raises(DataError):
            run_pretrain(recipe)
        assert {path.name for path in recipe.run_dir.iterdir()} <= {".lock"}, changes
    assert run_pretrain(make_recipe()).loss.value > 0


def test_refused_data_takes_no_training_away(make_recipe, monkeypatch):
    recipe = make_recipe()
    run_pretrain(recipe)
    shutil.rmtree(recipe.run_dir / "model")
    shutil.rmtree(recipe.run_dir / "stages")

    def missing(self):
        raise DataError("the text is gone")

    monkeypatch.setattr("subquad.pretrain.run.PretrainRun.training_rows", missing)
    with pytest.raises(DataError):
        run_pretrain(recipe)
    assert newest_valid_checkpoint(recipe.run_dir / "checkpoints" / "pretrain") is not None


def test_softmax_and_hybrids_are_trained_by_the_same_path(make_recipe):
    results = run_pretrain(make_recipe(mixer="softmax", layers={"1": "taylor"}))
    assert sorted(results.mixers.values()) == [1, 1]
    assert "softmax" in results.mixers


def test_sigkill_then_resume_gives_the_uninterrupted_run(make_recipe, tmp_path):
    whole = make_recipe(output_dir=str(tmp_path / "whole"))
    run_pretrain(whole)
    killed = make_recipe(output_dir=str(tmp_path / "killed"))
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_to_yaml(killed))
    script = Path(__file__).with_name("tiny.py")
    env = os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, file], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    work_dir = killed.run_dir / "checkpoints" / "pretrain"
    assert newest_valid_checkpoint(work_dir).name == f"checkpoint-{SAVE_STEPS}"

    results = run_pretrain(load_pretrain_recipe(file))

    assert curve(killed.run_dir) == curve(whole.run_dir)
    assert curve(killed.run_dir)[-1]["step"] == STEPS
    assert results.loss == load_pretrain_results(whole.run_dir).loss
    first, second = (
        AutoModelForCausalLM.from_pretrained(recipe.run_dir / "model").state_dict() for recipe in (whole, killed)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_divergence_stops_the_run(make_recipe, monkeypatch):
    forward = LogitObjective.forward

    @functools.wraps(forward)  # the Trainer reads its arguments
    def broken(*args, **kwargs):
        return {"loss": forward(*args, **kwargs)["loss"] * math.nan}

    monkeypatch.setattr(LogitObjective, "forward", broken)
    with pytest.raises(TrainingError, match="not finite"):
        run_pretrain(make_recipe())


def test_mixer_parameters_and_norms_have_no_weight_decay(make_recipe, monkeypatch):
    seen = {}
    create = DistillTrainer.create_optimizer

    def spy(self, *args, **kwargs):
        optimizer = create(self, *args, **kwargs)
        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            seen[group["name"]] = (group["weight_decay"], [names[id(p)] for p in group["params"]])
        return optimizer

    monkeypatch.setattr(DistillTrainer, "create_optimizer", spy)
    run_pretrain(make_recipe(mixer="2mamba"))
    assert {name: decay for name, (decay, _) in seen.items()} == {"mixer": 0.0, "norms": 0.0, "weights": 0.1}
    assert all(".mixer." in name for name in seen["mixer"][1])
    assert any("decay" in name for name in seen["mixer"][1])
    assert all("norm" in name for name in seen["norms"][1])
    assert not any("norm" in name or ".mixer." in name for name in seen["weights"][1])


def test_decay_starts_at_one_half_from_random_weights(make_recipe):
    model = build_model(make_recipe(mixer="2mamba"), 50)
    decay = model.model.layers[0].self_attn.mixer.decay
    assert torch.exp(-functional.softplus(decay.bias)).tolist() == pytest.approx([0.5] * decay.bias.numel())
    slow = build_model(make_recipe(mixer={"preset": "2mamba", "decay_timescale": [100, 100]}), 50)
    bias = slow.model.layers[0].self_attn.mixer.decay.bias
    assert torch.exp(-functional.softplus(bias)).tolist() == pytest.approx([math.exp(-0.01)] * bias.numel())


def test_weights_depend_on_the_seed_alone(make_recipe):
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed + 100)
        return build_model(make_recipe(seed=seed), 50).model.layers[1].mlp.up_proj.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_layers_that_are_not_there_are_refused(make_recipe):
    recipe = make_recipe(layers={"7": "softmax"})
    with pytest.raises(ConfigError, match="layers: '7' is outside the model"):
        run_pretrain(recipe)
    assert not recipe.run_dir.exists()


def test_a_window_from_random_weights_warns(make_recipe, caplog):
    plan_model(make_recipe(mixer={"preset": "2mamba", "window": 8}))
    assert "starts with a far part of nearly no weight" in caplog.text


def test_recall_run_measures_every_length_and_nothing_of_text(recall_recipe):
    recipe = recall_recipe()
    results = run_pretrain(recipe)
    assert results.loss is None
    assert results.by_position == []
    assert list(results.recall) == [16, 40]
    assert results.chance == 0.25
    assert json.loads((recipe.run_dir / "model" / "config.json").read_text())["vocab_size"] == 1 + 5 + 4 + 3
