"""Studies: checked whole before anything trains, resumable by arm and seed, summed up in table, plot and JSON."""

import functools
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

import subquad.pretrain.study.run as study_run
from subquad.distill.objectives import LogitObjective
from subquad.errors import ConfigError, TrainingError
from subquad.eval.records import Metric
from subquad.pretrain.results import PretrainResults
from subquad.pretrain.study.plots import plot_losses, plot_recall
from subquad.pretrain.study.run import run_study
from subquad.pretrain.study.schema import choose_arms, load_study, study_recipes
from subquad.pretrain.study.summary import Spread, compare_order, summarise_arms
from subquad.pretrain.study.table import format_spread, render_study
from subquad.recipes.library import packaged_recipes
from subquad.recipes.run_folder import LOCK_FILE

from .tiny import base_content

PNG = b"\x89PNG"


def results(seed: int, loss: float | None = None, recall: dict[int, float] | None = None) -> PretrainResults:
    def metric(value: float) -> Metric:
        return Metric(value=value, num=10, standard_error=None)

    return PretrainResults(
        name="x",
        seed=seed,
        mixers={"softmax": 1},
        parameters=10,
        mixer_parameters=0,
        cache_bytes=100,
        kv_bytes=200,
        data="text",
        loss=None if loss is None else metric(loss),
        recall={length: metric(value) for length, value in (recall or {}).items()},
        chance=None if recall is None else 0.1,
        train_loss=1.0,
        tokens=100,
        train_seconds=2.0,
        device="CPU",
        versions={},
        commit=None,
        command="c",
        created="now",
    )


def test_every_arm_and_seed_is_trained_and_summed_up(make_study):
    study = make_study()

    found = run_study(study)

    assert [arm.arm for arm in found.arms] == ["softmax", "plain"]
    assert all(arm.seeds == (0, 1) for arm in found.arms)
    table = found.table.read_text()
    assert "| linear + norm |" in table
    assert f"| {format_spread(found.arms[1].loss)} |" in table
    assert found.plot.path.read_bytes().startswith(PNG)
    content = json.loads(found.results.read_text())
    assert {(row["arm"], row["seed"]) for row in content["rows"]} == {
        (arm, seed) for arm in ("softmax", "plain") for seed in (0, 1)
    }
    losses = {(row["arm"], row["seed"]): row["loss"]["value"] for row in content["rows"]}
    assert found.arms[0].loss.mean == pytest.approx((losses["softmax", 0] + losses["softmax", 1]) / 2)
    assert len(set(losses.values())) == 4
    folder = study.run_dir / "arms" / "plain" / "seed-1"
    assert (folder / "model" / "model.safetensors").is_file()
    assert not (folder / "checkpoints" / "pretrain").exists()
    # one tokenizer for all
    assert (study.run_dir / "tokenizer" / "tokenizer.json").is_file()
    assert not (folder / "tokenizer").exists()


def test_finished_runs_are_kept_and_only_the_rest_is_trained(make_study, monkeypatch):
    first = run_study(make_study(seeds=[0]), arms=["plain"])
    before = json.loads(first.results.read_text())["rows"]
    trained = []
    run = study_run.run_pretrain

    def spy(recipe, **kwargs):
        trained.append((recipe.name, recipe.seed))
        return run(recipe, **kwargs)

    monkeypatch.setattr(study_run, "run_pretrain", spy)
    second = run_study(make_study())
    assert sorted(trained) == [("little-plain", 1), ("little-softmax", 0), ("little-softmax", 1)]
    assert before[0] in json.loads(second.results.read_text())["rows"]
    trained.clear()
    run_study(make_study())
    assert trained == []
    run_study(make_study(), arms=["plain"], resume=False)
    assert sorted(trained) == [("little-plain", 0), ("little-plain", 1)]


def test_a_run_another_process_works_on_is_left_to_it(make_study):
    study = make_study(seeds=[0])
    held = study.run_dir / "arms" / "plain" / "seed-0"
    held.mkdir(parents=True)
    with FileLock(held / LOCK_FILE):
        found = run_study(study)
    assert found.waiting == ["linear + norm, seed 0"]
    assert [arm.arm for arm in found.arms] == ["softmax"]
    assert "Not finished: linear + norm." in found.table.read_text()


def diverge(monkeypatch, *names):
    run, forward = study_run.run_pretrain, LogitObjective.forward

    @functools.wraps(forward)  # the Trainer reads its arguments
    def broken(*args, **kwargs):
        return {"loss": forward(*args, **kwargs)["loss"] * math.nan}

    def run_some(recipe, **kwargs):
        with monkeypatch.context() as patch:
            if recipe.name in names:
                patch.setattr(LogitObjective, "forward", broken)
            return run(recipe, **kwargs)

    monkeypatch.setattr(study_run, "run_pretrain", run_some)


def test_an_arm_that_diverges_leaves_the_others(make_study, monkeypatch):
    diverge(monkeypatch, "little-softmax")
    study = make_study(seeds=[0])
    with pytest.raises(TrainingError) as caught:
        run_study(study)
    message = str(caught.value)
    assert re.search(r"1 of its trainings failed:\n  softmax, seed 0: .*not finite", message)
    assert str(study.run_dir / "table.md") in message
    table = (study.run_dir / "table.md").read_text()
    assert "| linear + norm |" in table
    assert "Not finished: softmax. Not finished because training failed: softmax, seed 0." in table


def test_a_study_of_which_nothing_finishes_says_why(make_study, monkeypatch):
    diverge(monkeypatch, "little-softmax", "little-plain")
    study = make_study(seeds=[0])
    with pytest.raises(TrainingError, match="2 of its trainings failed"):
        run_study(study)
    assert not (study.run_dir / "table.md").exists()


def test_every_problem_of_every_arm_comes_before_anything_is_written(make_study):
    arms = {
        "softmax": {"mixer": "softmax"},
        "unknown": {"mixer": "2mmba"},
        "wrong": {"mixer": {"score": "power", "sinks": 3}},
        "changed": {"mixer": "softmax", "changes": {"training": {"tokens": 1}}},
        "encoder": {"mixer": {"score": "taylor", "causal": False}},
    }
    study = make_study(arms=arms, expected=[])
    with pytest.raises(ConfigError) as caught:
        run_study(study)
    text = str(caught.value)
    assert "4 of 5 arms" in text
    assert "unknown: mixer: mixer '2mmba' is unknown; did you mean '2mamba'?" in text
    assert "wrong: mixer: " in text
    assert "changed: training.tokens is 1, less than one row of 32 tokens" in text
    assert "encoder: mixer: causal: false" in text
    assert text.endswith("--arms softmax")
    assert not study.run_dir.exists()


def test_a_problem_of_the_base_is_said_once(make_study, texts):
    study = make_study(base={**base_content(texts), "bogus": 1})
    with pytest.raises(ConfigError, match="every arm: bogus: unknown key 'bogus'"):
        study_recipes(study, choose_arms(study, []))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reference": "plane"}, "reference 'plane' is no arm; arms: softmax, plain"),
        ({"expected": [["plain"], ["plane"]]}, "expected names 'plane', which is no arm"),
        ({"expected": [["plain"], ["plain"]]}, "expected names 'plain' twice"),
        ({"seeds": [1, 1]}, "seeds has repeats"),
        ({"base": {"mixer": "softmax", "seed": 1}}, "base sets seed, mixer; the study and its arms set these"),
        ({"arms": {"a b": {"mixer": "softmax"}}}, "arms"),
        (
            {"arms": {"softmax": {"mixer": "softmax", "changes": {"seed": 7, "mixer": "fox"}}}, "expected": []},
            r"arms\.softmax\.changes sets seed, mixer; the study and its arms set these",
        ),
        (
            {"arms": {"softmax": {"mixer": "softmax"}, "b": {"mixer": "fox", "label": "softmax"}}, "expected": []},
            "the label 'softmax' stands for several arms: softmax, b",
        ),
    ],
)
def test_a_study_that_breaks_rules_is_refused(make_study, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_study(**changes)


def test_changes_of_an_arm_leave_the_rest_of_a_section(make_study):
    arms = {"softmax": {"mixer": "softmax", "changes": {"training": {"learning_rate": 0.5}}}}
    recipes = study_recipes(make_study(arms=arms, expected=[]), ["softmax"])["softmax"]
    assert [recipe.seed for recipe in recipes] == [0, 1]
    assert recipes[0].training.learning_rate == 0.5
    assert recipes[0].training.batch_size == 2


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"tokenizer": {"vocab_size": 280}}, "tokenizer.vocab_size: 270 in softmax, 280 here"),
        ({"data": {"train": {"paths": ["other.txt"]}}}, "data.train.paths: "),
        ({"data": {"eval": {"paths": ["other.txt"]}}}, "data.eval.paths: "),
        ({"eval": {"tokens": 64}}, "eval.tokens: 256 in softmax, 64 here"),
        ({"data": {"seq_len": 64}}, "eval.seq_len: 32 in softmax, 64 here"),
        ({"recall": {"eval_lengths": [32]}, "tokenizer": None}, "recall: recall cannot be compared with the text of "),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(make_study, texts, changes, line):
    base = {key: value for key, value in base_content(texts).items() if key != "tokenizer" or changes.get(key, value)}
    other = {"mixer": "fox", "changes": {key: value for key, value in changes.items() if value is not None}}
    arms = {"softmax": {"mixer": "softmax"}, "other": other}
    study = make_study(base=base, arms=arms, expected=[])
    # alone, too: the table of the study is one
    for chosen in (["softmax", "other"], ["other"]):
        with pytest.raises(ConfigError) as caught:
            study_recipes(study, chosen)
        assert f"  other: {line}" in str(caught.value)
    study_recipes(study, ["softmax"])


def test_other_recall_than_the_references_is_refused(make_study):
    base = {"model": {"hidden_size": 16, "num_heads": 2}, "data": {"seq_len": 32}, "recall": {"eval_lengths": [32, 64]}}
    arms = {"softmax": {"mixer": "softmax"}, "other": {"mixer": "fox", "changes": {"recall": {"eval_lengths": [48]}}}}
    with pytest.raises(ConfigError, match=r"other: recall\.eval_lengths: \[32, 64\] in softmax, \[48\] here"):
        study_recipes(make_study(base=base, arms=arms, expected=[]), ["softmax", "other"])


def test_arms_may_be_trained_differently(make_study):
    changes = {"training": {"learning_rate": 0.5}, "model": {"num_layers": 1}, "data": {"seq_len": 64}}
    arms = {"softmax": {"mixer": "softmax"}, "other": {"mixer": "fox", "changes": {**changes, "eval": {"seq_len": 32}}}}
    recipes = study_recipes(make_study(arms=arms, expected=[]), ["softmax", "other"])
    assert recipes["other"][0].data.seq_len == 64


def test_order_is_judged_by_paired_differences(make_study):
    arms = {name: {"mixer": "softmax"} for name in ("a", "b", "c", "d")}
    study = make_study(arms=arms, reference="d", expected=[["a"], ["b"], ["c", "d"]])
    rows = {
        "a": {0: results(0, 3.0), 1: results(1, 4.0)},
        "b": {0: results(0, 2.0), 1: results(1, 3.1)},
        "c": {0: results(0, 2.5), 1: results(1, 3.5)},
        "d": {0: results(0, 1.9), 1: results(1, 3.3)},
    }
    summaries = summarise_arms(study, rows)
    steps = {(step.worse, step.better): step for step in compare_order(study, summaries)}
    assert steps.keys() == {("a", "b"), ("b", "c"), ("b", "d")}
    # the seeds differ by 1, the paired differences hardly
    assert steps["a", "b"].verdict == "agrees"
    assert steps["a", "b"].difference.values == pytest.approx((1.0, 0.9))
    assert steps["b", "c"].verdict == "reversed"
    assert steps["b", "d"].verdict == "within the spread"
    assert summaries[0].to_reference.values == pytest.approx((1.1, 0.7))
    text = render_study(study, summaries, list(steps.values()), None)
    assert "3 steps: in the papers' direction 1, reversed 1, within the spread 1." in text


def test_one_seed_has_no_spread(make_study):
    study = make_study()
    rows = {"plain": {0: results(0, 3.0)}, "softmax": {0: results(0, 2.0)}}
    summaries = summarise_arms(study, rows)
    assert summaries[1].loss == Spread(3.0, None, (3.0,))
    assert compare_order(study, summaries)[0].verdict == "agrees (one seed)"
    assert "Only some of the seeds are finished: softmax, linear + norm." in render_study(study, summaries, [], None)


@pytest.mark.parametrize("seeds, verdict", [((0,), "equal (one seed)"), ((0, 1), "equal")])
def test_arms_that_are_equal_are_not_reversed(make_study, seeds, verdict):
    study = make_study()
    rows = {arm: {seed: results(seed, 2.0 + seed) for seed in seeds} for arm in ("plain", "softmax")}
    steps = compare_order(study, summarise_arms(study, rows))
    assert [step.verdict for step in steps] == [verdict]
    text = render_study(study, summarise_arms(study, rows), steps, None)
    assert "1 steps: in the papers' direction 0, reversed 0, within the spread 0, equal 1." in text


@pytest.mark.parametrize("kind", ["loss", "recall"])
def test_labels_are_written_and_drawn_as_they_are(make_study, tmp_path, kind):
    label = "a|b, $x^{$ and $y"
    arms = {"softmax": {"mixer": "softmax", "label": "the $\\bad$ one", "group": "$\\bad$"}}
    study = make_study(arms={**arms, "plain": {"mixer": "fox", "label": label, "group": "$x$"}})
    values = {"loss": 2.0} if kind == "loss" else {"recall": {8: 0.5, 16: 0.25}}
    rows = {arm: {0: results(0, **values)} for arm in ("plain", "softmax")}
    summaries = summarise_arms(study, rows)
    lines = render_study(study, summaries, compare_order(study, summaries), None).splitlines()
    row, step = (
        next(line for line in lines if line.startswith("| a\\|b, $x^{$ and $y |") and test in line)
        for test in ("100", "equal")
    )
    for line, head in ((row, "| arm |"), (step, "| worse in the papers |")):
        heads = next(found for found in lines if found.startswith(head))
        assert line.replace("\\|", "").count("|") == heads.count("|")
    path = tmp_path / "plot.png"
    if kind == "loss":
        plot_losses(study, summaries, path)
    else:
        plot_recall(study, summaries, 8, 0.1, path)
    assert path.read_bytes().startswith(PNG)


def test_recall_is_judged_by_its_errors(make_study):
    study = make_study()
    rows = {
        "plain": {0: results(0, recall={8: 0.5, 16: 0.1}), 1: results(1, recall={8: 0.4, 16: 0.2})},
        "softmax": {0: results(0, recall={8: 1.0, 16: 0.6}), 1: results(1, recall={8: 0.9, 16: 0.7})},
    }
    summaries = summarise_arms(study, rows)
    step = compare_order(study, summaries)[0]
    assert (step.verdict, step.difference.values) == ("agrees", pytest.approx((0.5, 0.5)))
    text = render_study(study, summaries, [step], 0.1)
    assert "| accuracy at 8 | accuracy at 16 |" in text
    assert "0.450 ± 0.071" in text
    assert "Guessing one of the values would score 10.0%." in text
    assert "loss" not in text.splitlines()[4]


def test_recall_study_runs_and_draws_length(make_study, recall_recipe):
    base = {
        key: value
        for key, value in recall_recipe().model_dump(mode="json", exclude_unset=True).items()
        if key in ("model", "data", "recall", "training")
    }
    base["data"] = {"seq_len": 20}
    found = run_study(make_study(base=base, seeds=[0]))
    assert found.plot.path.name == "recall.png"
    assert found.plot.path.read_bytes().startswith(PNG)
    assert list(found.arms[0].recall) == [16, 40]


@pytest.mark.parametrize("name", packaged_recipes("study"))
def test_packaged_studies_are_valid_and_their_built_arms_are_ready(name):
    study = load_study(name)
    assert study.name == name
    ready, problems = {}, []
    for arm in study.arms:
        try:
            ready |= study_recipes(study, [arm])
        except ConfigError as error:
            problems += str(error).splitlines()[1:]
    # a part that is still to come is the only reason why an arm may not be ready
    assert [line for line in problems if "is not built yet" not in line] == []
    assert {"softmax"} < ready.keys()
    assert all(len(recipes) == len(study.seeds) for recipes in ready.values())
    assert all(recipes[0].mixer.window == 0 for recipes in ready.values())


@pytest.mark.parametrize("name", ["theory-orders", "theory-components"])
def test_the_study_at_the_papers_size_has_the_same_arms(name):
    small, large = load_study(name), load_study(f"{name}-300m")
    assert large.arms == small.arms
    assert large.expected == small.expected
    assert large.base["data"]["train"]["kind"] == "hub"
    assert "accelerate launch" in packaged_recipes("study")[f"{name}-300m"].text


def test_theory_orders_has_every_order():
    assert {f"taylor-{order}" for order in range(11)} < load_study("theory-orders").arms.keys()


def test_a_study_file_is_read_with_overrides(make_study, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(make_study().model_dump(mode="json")))
    study = load_study(path, ["base.training.tokens=999", "arms.plain.mixer.conv_width=3", "seeds=[5]"])
    recipe = study_recipes(study, ["plain"])["plain"][0]
    assert (recipe.training.tokens, recipe.mixer.conv_width, recipe.seed) == (999, 3, 5)
    assert Path(recipe.output_dir).parts[-3:] == ("arms", "plain", "seed-5")
