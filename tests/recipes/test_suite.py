"""Evaluating a run with whole tasks, from settings to records."""

import json

import pytest
from typer.testing import CliRunner

from subquad.cli import app
from subquad.errors import ConfigError
from subquad.eval.records import load_records
from subquad.recipes.runner import run_recipe
from subquad.recipes.suite import load_suite

SMALL = ["loss.seq_len=32", "loss.tokens=128", "loss.layer_tokens=64"]


@pytest.fixture
def run_dir(make_recipe):
    recipe = make_recipe()
    run_recipe(recipe, last_stage="export", command="test")
    return recipe.run_dir


def evaluate(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_tasks_leave_a_record_for_every_model(run_dir, text_files):
    text = ["--text", text_files["eval"], "--seq-len", 32, "--tokens", 128]
    done = evaluate(run_dir, "--tasks", "loss,layers", *text, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["tasks"]["loss"]) == {"teacher", "window_only", "student"}
    assert set(found["tasks"]["layers"]) == {"student"}
    assert len(load_records(run_dir)) == 4
    assert found["failures"] == {}
    again = evaluate(run_dir / "student", "--tasks", "loss", *text)
    assert "teacher" in again.output
    assert len(load_records(run_dir)) == 4


def test_a_named_text_stands_beside_the_others(run_dir, text_files):
    text = ["--text", text_files["eval"], *SMALL]
    assert evaluate(run_dir, "--tasks", "loss", *text).exit_code == 0
    done = evaluate(run_dir, "--tasks", "loss", "loss.name=start", "loss.shuffle=false", *text, "--json")
    assert set(json.loads(done.stdout)["tasks"]) == {"loss-start"}
    records = {record.task: record for record in load_records(run_dir)}
    assert set(records) == {"loss", "loss-start"}
    # The first rows of the text are not those that a seed draws.
    assert records["loss"].provenance.prompts_hash != records["loss-start"].provenance.prompts_hash


def test_one_task_that_fails_does_not_stop_the_others(run_dir, text_files):
    overrides = [f"loss.text=[{text_files['eval']}]", *SMALL]
    done = evaluate(run_dir, *overrides, "--tasks", "perplexity,no_such_task,layers", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert set(found["failures"]) == {"perplexity", "no_such_task"}
    assert "lm_eval.text_files" in found["failures"]["perplexity"]
    assert set(found["tasks"]) == {"layers"}


def test_options_of_tasks_need_tasks(run_dir):
    done = evaluate(run_dir, "niah.samples=2")
    assert done.exit_code != 0
    assert "--tasks" in str(done.exception)


def test_settings_from_a_file(tmp_path):
    path = tmp_path / "evaluation.yaml"
    path.write_text("tasks: [niah]\nniah: {samples: 3}\n")
    assert load_suite(str(path), [], []).niah.samples == 3
    changed = load_suite(str(path), ["loss"], ["niah.samples=4"])
    assert (changed.tasks, changed.niah.samples) == (("loss",), 4)


@pytest.mark.parametrize(
    "override, told",
    [("niah.sample=3", "did you mean 'samples'"), ("loss.tokens=0", "loss.tokens"), ("tasks=[]", "tasks")],
)
def test_wrong_settings_name_their_path(override, told):
    with pytest.raises(ConfigError, match=told):
        load_suite(None, [], [override])
