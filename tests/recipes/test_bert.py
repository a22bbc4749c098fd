"""Recipes and evaluations of a BERT: what works, and what only a decoder can do."""

import json
from pathlib import Path

import pytest
import torch
from transformers import BertForPreTraining

from subquad.errors import ConfigError
from subquad.layers import converted_layers
from subquad.models import SubquadBertForPreTraining
from subquad.recipes.actions import continue_prompt, evaluate_checkpoint, plan_recipe
from subquad.recipes.checkpoint import load_checkpoint
from subquad.recipes.runner import convert_recipe, run_recipe
from subquad.recipes.suite import evaluate_suite

from ..eval.toy_glue import FILLERS, SIGNALS, write_sst2
from ..tiny_bert import tiny_bert, tiny_bert_tokens, word_tokenizer

COTTENTION = {"mixer": {"preset": "cottention", "causal": False}}


@pytest.fixture(scope="module")
def bert_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert().save_pretrained(folder)
    word_tokenizer(FILLERS + SIGNALS).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe_of(make_recipe, bert_dir):
    def make(**changes):
        sections = {"model": {"source": str(bert_dir)}, "convert": COTTENTION, "calibrate": {"enabled": False}}
        return make_recipe(**(sections | changes))

    return make


@pytest.fixture
def student_dir(recipe_of, tmp_path) -> Path:
    return convert_recipe(recipe_of(), tmp_path / "student")


def test_a_recipe_plans_and_converts(recipe_of, student_dir, bert_dir):
    plan = plan_recipe(recipe_of())
    assert json.loads(json.dumps(plan.to_dict()))["family"] == "bert"
    assert len(plan.mixers) == 2
    loaded = load_checkpoint(str(student_dir))
    assert loaded.converted
    assert type(loaded.model) is SubquadBertForPreTraining
    assert len(converted_layers(loaded.model)) == 2
    assert loaded.tokenizer is not None
    teacher = BertForPreTraining.from_pretrained(bert_dir)
    weights = dict(teacher.named_parameters())
    assert all(torch.equal(loaded.model.get_parameter(name), weight) for name, weight in weights.items())
    with torch.no_grad():
        assert loaded.model(tiny_bert_tokens() % 47).prediction_logits.isfinite().all()


def test_what_trains_on_the_next_token_is_refused_before_anything_is_written(recipe_of):
    with pytest.raises(ConfigError, match=r"calibration \(calibrate.enabled=false leaves it out\) needs a model"):
        run_recipe(recipe_of(calibrate={"enabled": True}), last_stage="calibrate")
    recipe = recipe_of()
    with pytest.raises(ConfigError, match="distillation needs a model that predicts the next token"):
        run_recipe(recipe)
    assert not (recipe.run_dir / "stages").exists()


def test_loss_and_generation_are_refused(student_dir, bert_dir, text_files):
    for source in (student_dir, bert_dir):
        with pytest.raises(ConfigError, match="the loss on the next token needs"):
            evaluate_checkpoint(str(source), [str(text_files["eval"])], tokens=64, seq_len=32)
        with pytest.raises(ConfigError, match="generating text needs"):
            continue_prompt(str(source), "w1", 3)


def test_glue_is_fine_tuned_beside_the_teacher_and_nothing_else_is_measured(student_dir, bert_dir, tmp_path):
    data = write_sst2(tmp_path / "data", num_train=32, num_dev=16)
    finetune = {"tasks": ["sst2"], "data_dir": str(data), "method": "full", "max_steps": 2, "max_length": 40}
    overrides = [f"finetune.{name}={json.dumps(value)}" for name, value in finetune.items()]

    def evaluate(*tasks):
        return evaluate_suite(
            str(student_dir),
            tasks,
            config=None,
            overrides=overrides,
            teacher=str(bert_dir),
            others=(),
            output=tmp_path / "out",
            command="subquad eval",
        )

    result = evaluate("glue-finetune")
    assert result.failures == {}
    assert [(record.task, record.model) for record in result.records] == [
        ("glue-finetune-sst2", "teacher"),
        ("glue-finetune-sst2", "student"),
    ]
    with pytest.raises(ConfigError, match="the task niah needs a model that predicts the next token"):
        evaluate("glue-finetune", "niah")
