"""Fine-tuned GLUE: it resumes, refuses what it cannot do, and shows every model."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from pydantic import ValidationError
from transformers import GPT2Config, GPT2LMHeadModel

from subquad.errors import ConfigError, DataError, TrainingError
from subquad.eval.contestants import Contestant
from subquad.eval.finetune import (
    FinetuneSettings,
    LoraSettings,
    compare_finetuned,
    plot_finetuned,
)
from subquad.eval.finetune import run as run_module
from subquad.eval.finetune.classifier import padding_token
from subquad.eval.finetune.training import encode, padding_tokenizer
from subquad.eval.glue_data import load_glue
from subquad.eval.records import load_records
from tests.eval.finetune.runs import run, settings
from tests.eval.toy_glue import contestants, toy_model, toy_tokenizer, write_pairs, write_sst2

MODES = ("teacher", "window_only", "student")


# Resuming


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


def test_a_killed_run_goes_on_with_the_next_seed(tmp_path, monkeypatch):
    data = write_sst2(tmp_path / "data", num_dev=16)
    chosen = settings(data, seeds=(0, 1, 2))
    models = contestants("teacher", "student")
    whole = run(models, chosen, tmp_path / "whole")

    def kill(done, total):
        assert total == 18
        if done == 3 + 2:
            raise Killed

    with pytest.raises(Killed):
        run(models, chosen, tmp_path / "killed", kill)
    assert load_records(tmp_path / "killed") == []
    trained = []
    train_seed = run_module.train_seed
    monkeypatch.setattr(run_module, "train_seed", lambda job, step: trained.append(str(job)) or train_seed(job, step))
    resumed = run(models, chosen, tmp_path / "killed")
    assert trained[0] == "fine-tuning teacher on sst2 with seed 1"
    assert len(trained) == 5
    for one, other in zip(whole, resumed, strict=True):
        assert one.metrics == other.metrics
        assert [s["curve"] for s in one.details["seeds"]] == [s["curve"] for s in other.details["seeds"]]

    trained.clear()
    assert run(models, chosen, tmp_path / "killed") == resumed
    assert trained == []
    run(models, settings(data, seeds=(0, 1, 2, 7)), tmp_path / "killed")
    assert trained == [f"fine-tuning {name} on sst2 with seed 7" for name in ("teacher", "student")]


def test_other_settings_and_damaged_files_are_trained_again(tmp_path, caplog):
    data = write_sst2(tmp_path / "data", num_dev=8)
    models = contestants("student")
    run(models, settings(data), tmp_path)
    (path,) = tmp_path.glob("evals/*/seeds/*.json")
    before = json.loads(path.read_text())
    run(models, settings(data, learning_rate=2e-2), tmp_path)
    after = json.loads(path.read_text())
    assert before["curve"] != after["curve"]
    changed = toy_model()
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    run(contestants("student", model=changed), settings(data, learning_rate=2e-2), tmp_path)
    assert json.loads(path.read_text())["curve"] != after["curve"]
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        run(models, settings(data, learning_rate=2e-2, seeds=(0, 1)), tmp_path)
    assert "student-seed0.json is damaged" in caplog.text
    assert json.loads(path.read_text())["curve"] == after["curve"]


def test_all_data_is_read_before_the_first_training(tmp_path):
    data = write_sst2(tmp_path / "data")
    with pytest.raises(DataError, match="no file holds the split validation of rte"):
        run(contestants("student"), settings(data, tasks=("sst2", "rte")), tmp_path)
    assert not list(tmp_path.glob("evals/**/*.json"))


# What is refused


def test_a_loss_that_is_not_finite_names_task_model_and_seed(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    model = toy_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(TrainingError, match=r"fine-tuning student on sst2 with seed 4: loss nan .* at step 1"):
        run(contestants("student", model=model), settings(data, seeds=(4,)), tmp_path)
    assert not list(tmp_path.glob("evals/**/*.json"))


def test_weights_that_break_after_the_last_log_are_noticed(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    chosen = settings(data, max_steps=1, learning_rate=1e30, warmup_ratio=0.0, method="full", max_grad_norm=1e30)
    with pytest.raises(TrainingError, match="student on sst2 with seed 0: logits are NaN or infinite after 1 steps"):
        run(contestants("student"), chosen, tmp_path)


def test_models_that_cannot_be_fine_tuned_are_refused(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    with pytest.raises(ConfigError, match="max_length 300 is above the context of student, 256 tokens"):
        run(contestants("student"), settings(data, max_length=300), tmp_path)
    with pytest.raises(
        ConfigError, match=r"target_modules \['c_attn'\] match no linear layer; the model has down_proj"
    ):
        run(contestants("student"), settings(data, lora=LoraSettings(target_modules=("c_attn",))), tmp_path)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="no decoder or BERT with a classification head for GPT2Config"):
        run([Contestant("gpt2", "toy", gpt2, toy_tokenizer())], settings(data), tmp_path)


def test_padding_falls_back_to_a_token_the_model_knows():
    tokenizer, model = toy_tokenizer(), toy_model()
    assert padding_token(tokenizer, model) == 0
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    tokenizer.add_tokens([f"<more{index}>" for index in range(60)])
    tokenizer.pad_token = "<more59>"
    assert padding_token(tokenizer, model) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither a padding token nor an end of text among the model's 97 tokens"):
        padding_token(tokenizer, model)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epochs": 1, "max_steps": 3}, "epochs 1 and max_steps 3 both say how long; give one"),
        ({"seeds": ()}, "seeds is empty; name at least one"),
        ({"seeds": (1, 1)}, "seeds .1, 1. names one twice"),
        ({"tasks": ("stsb",)}, "tasks.0"),
        ({"learning_rates": 1}, "learning_rates"),
        ({"lora": {"rank": 0}}, "lora.rank"),
    ],
)
def test_settings_that_break_a_rule_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        FinetuneSettings(**changes)


def test_defaults_are_written_out():
    assert FinetuneSettings().epochs == 3.0
    assert FinetuneSettings(max_steps=5).epochs is None
    assert FinetuneSettings(method="full").learning_rate == 3e-5
    assert FinetuneSettings().for_record()["learning_rate"] == 1e-3
    assert FinetuneSettings(epochs=2, batch_size=16).steps(40) == 6
    assert FinetuneSettings(epochs=2, batch_size=16, train_limit=16).steps(40) == 2


# Rows as tokens, and the picture


def test_long_rows_lose_the_end_of_their_longer_text(tmp_path):
    data = write_pairs(tmp_path / "data", "RTE", ["entailment"], "sentence1\tsentence2\tlabel", ("train",))
    rows = load_glue("rte", "train", data)
    tokenizer = padding_tokenizer(toy_tokenizer(), 0)
    chosen = settings(data, max_length=8, separator=" w0 ")
    encoded = encode(tokenizer, rows, ("sentence1", "sentence2"), chosen)
    whole = [tokenizer(f"{row['sentence1']} w0 {row['sentence2']}")["input_ids"] for row in rows]
    second = tokenizer("w0 good w1")["input_ids"]
    assert 0 < encoded.num_cut == sum(len(ids) > 8 for ids in whole) < len(rows)
    for ids, full in zip(encoded.rows["input_ids"], whole, strict=True):
        assert len(ids) == min(len(full), 8)
        assert ids[-3:] == second
        assert ids[:-3] == full[: len(ids) - 3]


def test_the_picture_shows_every_model_and_needs_one(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    models = contestants(*MODES)
    models.append(Contestant("another", "toy", models[0].model, models[0].tokenizer))
    records = run(models, settings(data, max_steps=1), tmp_path)
    plot = plot_finetuned(records, tmp_path / "plots" / "glue.png")
    assert plot.path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot_finetuned([], tmp_path / "none.png")


def test_records_of_other_settings_are_not_compared(tmp_path):
    data = write_sst2(tmp_path / "data", num_dev=8)
    models = contestants("student")
    (first,) = run(models, settings(data, max_steps=1), tmp_path / "a")
    (second,) = run(models, settings(data, max_steps=2), tmp_path / "b")
    with pytest.raises(ConfigError, match="were not fine-tuned on one task with the same settings"):
        compare_finetuned(first, second)
