"""Evaluating a run with whole tasks, from settings to records."""

import json

import pytest
from typer.testing import CliRunner

from subquad.cli import app
from subquad.errors import ConfigError, SubquadError, TaskError
from subquad.eval.records import load_records
from subquad.recipes.run_folder import RunFolder
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


def test_speed_has_a_record_for_every_model_of_the_call(run_dir):
    settings = ["speed.lengths=[16,24]", "speed.new_tokens=2", "speed.repeats=3"]
    done = evaluate(run_dir, "--tasks", "speed", *settings, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["tasks"]["speed"]
    names = {f"{phase}_ratio_{length}" for phase in ("prefill", "decode") for length in (16, 24)}
    assert {model: set(metrics) for model, metrics in found.items()} == {
        "teacher": set(),
        "window_only": names,
        "student": names,
    }
    assert all(metric["value"] > 0 for metric in found["student"].values())
    assert {record.task for record in load_records(run_dir)} == {"speed"}


def test_help_names_every_task_of_its_own():
    text = " ".join(evaluate("--help").output.replace("│", " ").split())
    for task in ("loss", "layers", "niah", "speed", "perplexity", "glue-finetune"):
        assert task in text


def test_one_task_that_fails_does_not_stop_the_others(run_dir, text_files, tmp_path):
    overrides = [f"loss.text=[{text_files['eval']}]", *SMALL, f"finetune.data_dir={tmp_path}", "niah.lengths=[4096]"]
    done = evaluate(run_dir, *overrides, "--tasks", "glue-finetune,niah,layers", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert set(found["failures"]) == {"glue-finetune", "niah"}
    # A task of which every model was left out is a failure with its reason, too.
    assert "context" in found["failures"]["niah"]
    assert set(found["tasks"]) == {"layers", "niah"}
    assert found["not_measured"].keys() == {"niah"}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--tasks", "no_such_task"], "no_such_task"),
        (["--tasks", "perplexity"], "lm_eval.text_files"),
        (["--tasks", "sst2", "--data-dir", "no/such/folder"], "lm_eval.data_dirs: no file matches 'no/such/folder'"),
        (["--tasks", ","], "names no task"),
        (["--tasks", "loss", "loss.position_buckets=[8,4]"], "ascending"),
        (["--tasks", "loss", "--text", "a.txt", "loss.text=[b.txt]"], "given twice"),
        (["--tasks", "loss", "--output", __file__], "is a file"),
    ],
)
def test_what_cannot_work_is_said_before_a_model_loads(run_dir, arguments, told, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("subquad.recipes.suite.load_contestants", load)
    done = evaluate(run_dir, *arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, SubquadError), done.exception
    assert told in str(done.exception)


def test_a_checkpoint_that_does_not_exist_is_said_to_be_none(tmp_path):
    done = evaluate(tmp_path / "nowhere", "--tasks", "loss")
    assert "does not exist" in str(done.exception)


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
    [
        ("niah.sample=3", "did you mean 'samples'"),
        ("speed.repeats=2", "speed.repeats"),
        ("speed.repeat=9", "did you mean 'repeats'"),
        ("loss.tokens=0", "loss.tokens"),
        ("tasks=[]", "tasks"),
    ],
)
def test_wrong_settings_name_their_path(override, told):
    with pytest.raises(ConfigError, match=told):
        load_suite(None, [], [override])


@pytest.mark.parametrize(
    "override, lines",
    [
        ("finetune.tasks=[sst3]", ["finetune.tasks.0"]),
        ("finetune.tasks=[]", ["finetune: tasks is empty"]),
        ("finetune.seeds=[-1]", ["finetune.seeds.0"]),
        ("finetune.seeds=[]", ["finetune: seeds is empty"]),
    ],
)
def test_a_wrong_entry_of_a_list_is_one_problem(override, lines):
    with pytest.raises(ConfigError) as error:
        load_suite(None, ["glue-finetune"], [override])
    found = str(error.value).splitlines()[1:]
    assert [line.strip().startswith(start) for line, start in zip(found, lines, strict=True)] == [True]


def eval_section(**suite):
    return {"tokens": 256, "memory_lengths": [16, 64], "generate_tokens": 4, "suite": suite}


def test_a_recipe_measures_its_tasks_before_the_report(make_recipe, text_files):
    loss = {"name": "own", "text": [str(text_files["eval"])], "seq_len": 32, "tokens": 128}
    recipe = make_recipe(eval=eval_section(tasks=["loss"], loss=loss))
    run_recipe(recipe, command="test")
    assert {record.model for record in load_records(recipe.run_dir)} == {"teacher", "window_only", "student"}
    assert "loss-own" in (recipe.run_dir / "report.md").read_text()


def test_a_task_of_a_recipe_that_fails_keeps_the_others_and_is_tried_again(make_recipe, text_files, tmp_path):
    loss = {"text": [str(text_files["eval"])], "seq_len": 32, "tokens": 128, "layer_tokens": 32}
    fails = {"tasks": ["glue-finetune", "layers"], "loss": loss, "finetune": {"data_dir": str(tmp_path)}}
    recipe = make_recipe(eval=eval_section(**fails))
    for _ in range(2):
        with pytest.raises(TaskError, match="glue-finetune"):
            run_recipe(recipe, command="test")
        assert [record.task for record in load_records(recipe.run_dir)] == ["layers"]
        assert (recipe.run_dir / "report.html").is_file()
        assert RunFolder(recipe.run_dir).finished("evaluate")
        assert not RunFolder(recipe.run_dir).finished("suite")
    # Other tasks do not make it another run: it goes on with them.
    mended = make_recipe(eval=eval_section(tasks=["loss", "layers"], loss=loss))
    run_recipe(mended, command="test")
    assert {record.task for record in load_records(recipe.run_dir)} == {"loss", "layers"}
    assert RunFolder(recipe.run_dir).finished("report")
    more = make_recipe(eval=eval_section(tasks=["loss"], loss={**loss, "name": "again"}))
    run_recipe(more, command="test")
    assert "loss-again" in {record.task for record in load_records(recipe.run_dir)}


def test_files_of_the_tasks_are_checked_before_anything_runs(make_recipe):
    suite = {
        "tasks": ["glue", "no_such_task"],
        "lm_eval": {"data_dirs": ["no/such/folder"]},
        "finetune": {"data_dir": "nor/this"},
    }
    recipe = make_recipe(eval=eval_section(**suite))
    with pytest.raises(ConfigError, match=r"eval.suite.lm_eval.data_dirs: .*\n.*eval.suite.finetune.data_dir: "):
        run_recipe(recipe, command="test")
    with pytest.raises(ConfigError, match="no_such_task"):
        run_recipe(recipe, command="test")
    assert not recipe.run_dir.exists() or not any(path.suffix for path in recipe.run_dir.iterdir())
