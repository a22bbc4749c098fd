"""The task: known models get their known scores, records are complete, and a second run measures nothing."""

from __future__ import annotations

import json
import math

import pytest
import torch

from subquad.errors import ConfigError, OutputError
from subquad.eval.contestants import Contestant
from subquad.eval.niah import NiahSettings, cells_of, group_cells, paired_differences, run_niah
from subquad.eval.niah.cells import Cell
from subquad.eval.niah.measure import Outcome
from subquad.eval.niah.stats import mean_and_error
from subquad.eval.niah.summary import prompt_scores
from subquad.eval.records import Metric, load_record, load_records, record_path
from subquad.eval.report.differences import metric_differences

from .tiny import KINDS, CopyingModel, random_model, random_student, tiny_tokenizer

GRID = {"lengths": (160, 200), "depths": 3, "samples": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("digits")


def copying(tokenizer, name="teacher", context=256):
    return Contestant(name, f"{name}-folder", CopyingModel(len(tokenizer), context), tokenizer)


def guessing(tokenizer, name="student", context=256):
    return Contestant(name, f"{name}-folder", random_model(len(tokenizer), context), tokenizer)


def run(contestants, folder, progress=None, **changes):
    return run_niah(contestants, NiahSettings(**GRID | changes), folder, command="subquad eval x", progress=progress)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_copies_solves_everything(kind, tmp_path):
    tokenizer = tiny_tokenizer(kind, bos=kind == "merged")
    record = run([copying(tokenizer)], tmp_path)[0]
    values = {name: metric.value for name, metric in record.metrics.items()}
    assert values["accuracy"] == values["key_rank1"] == values["key_reciprocal_rank"] == 1
    assert values["key_logprob"] == pytest.approx(0, abs=1e-4)
    assert {metric.num for metric in record.metrics.values()} == {2 * 3 * 2}


@pytest.mark.parametrize(
    "variant",
    [
        {"paper": True},
        {"num_keys": 4},
        {"needle": "words"},
        {"needle": "words", "num_keys": 3},
    ],
    ids=str,
)
def test_a_model_that_copies_solves_every_variant_with_one_value(variant, tokenizer, tmp_path):
    record = run([copying(tokenizer, context=512)], tmp_path, lengths=(300,), **variant)[0]
    assert record.metrics["accuracy"].value == record.metrics["key_rank1"].value == 1


def test_several_values_are_scored_one_by_one(tokenizer, tmp_path):
    record = run([copying(tokenizer, context=512)], tmp_path, lengths=(300,), num_values=2)[0]
    # Copying repeats the sentence behind the first value: it finds that one and no other.
    assert record.metrics["accuracy"].value == 0
    assert record.metrics["values_named"].value == 0.5
    lines = (tmp_path / "evals/niah-values2/samples/teacher.jsonl").read_text().splitlines()
    assert all(len(json.loads(line)["log_probs"]) == 10 for line in lines)


def test_a_model_that_guesses_finds_nothing(tokenizer, tmp_path):
    record = run([guessing(tokenizer)], tmp_path)[0]
    assert record.metrics["accuracy"].value == 0
    assert record.metrics["key_rank1"].value == 0
    assert record.metrics["key_logprob"].value < record.baselines["key_logprob"]
    assert record.metrics["key_reciprocal_rank"].value < 0.2


def test_the_argmax_of_the_true_answer_is_the_generated_one(tmp_path):
    """Whatever is rank 1 token by token is what greedy decoding writes."""
    tokenizer = tiny_tokenizer("digits")
    run([copying(tokenizer), guessing(tokenizer)], tmp_path)
    for name in ("teacher", "student"):
        for line in (tmp_path / f"evals/niah/samples/{name}.jsonl").read_text().splitlines():
            sample = json.loads(line)
            written = sample["generated"].startswith(sample["values"][0])
            assert written == (max(sample["ranks"]) == 1)


def test_the_record_says_what_is_needed_to_repeat_it(tokenizer, tmp_path):
    record = run([copying(tokenizer)], tmp_path, batch_size=3)[0]
    assert record == load_record(record_path(tmp_path, "niah", "teacher"))
    assert record.settings["lengths"] == [160, 200]
    assert record.settings["max_new_tokens"] == 10
    assert record.provenance.command == "subquad eval x"
    assert (record.provenance.seed, record.provenance.batch_size) == (0, 3)
    assert len(record.provenance.prompts_hash) == 64
    cost = record.details["cost"]
    prompts = 2 * 3 * 2
    answers = sum(len(json.loads(line)["log_probs"]) for line in samples_of(tmp_path))
    assert cost["prompts"] == prompts
    # Both scores share one reading of each prompt.
    assert cost["prefill_tokens"] == 3 * 2 * (160 + 200) + answers
    assert cost["generated_tokens"] == prompts * 10
    assert set(cost["seconds"]) == {"prefill", "generation", "teacher_forced"}
    assert record.baselines == {"accuracy": 1 / 90_000, "key_logprob": pytest.approx(-math.log(90_000))}


def samples_of(folder, model="teacher"):
    return (folder / f"evals/niah/samples/{model}.jsonl").read_text().splitlines()


def test_cells_hold_every_prompt_and_groups_pool_them(tokenizer, tmp_path):
    record = run([guessing(tokenizer)], tmp_path)[0]
    cells = cells_of(record)
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (160, 200) for d in (0, 0.5, 1)]
    assert all(len(cell.exact) == len(cell.rank1) == len(cell.log_probs) == 2 for cell in cells)
    every = [value for cell in cells for value in cell.log_probs]
    assert sum(every) / len(every) == pytest.approx(record.metrics["key_logprob"].value, abs=1e-3)
    assert [group["at"] for group in record.details["by_length"]] == [160, 200]
    assert [group["accuracy"]["num"] for group in record.details["by_depth"]] == [4, 4, 4]
    assert cells[0].distance > cells[1].distance > cells[2].distance


def test_every_model_reads_the_same_prompts_in_its_own_mode(tokenizer, tmp_path):
    model = random_student(len(tokenizer), {"preset": "2mamba", "window": 8, "sinks": 2})
    modes = ["teacher", "window_only", "student"]
    records = run([Contestant(mode, "folder", model, tokenizer, mode) for mode in modes], tmp_path)
    assert [record.provenance.mode for record in records] == modes
    assert len({record.provenance.prompts_hash for record in records}) == 1
    assert len({record.metrics["key_logprob"].value for record in records}) == 3
    assert model.model.layers[0].self_attn.mode == "student"


def test_batches_change_no_score(tokenizer, tmp_path):
    model = random_student(len(tokenizer), {"preset": "2mamba", "window": 8, "sinks": 2})
    contestant = Contestant("student", "folder", model, tokenizer, "student")
    found = []
    for index, limits in enumerate(({"batch_size": 1}, {"batch_size": 6}, {"max_tokens_per_batch": 450})):
        run([contestant], tmp_path / str(index), **limits)
        lines = (tmp_path / str(index) / "evals/niah/samples/student.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert other["generated"] == one["generated"]
            assert other["log_probs"] == pytest.approx(one["log_probs"], abs=1e-4)


def count_forwards(contestants):
    calls = []
    for contestant in contestants:
        contestant.model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_a_second_run_measures_nothing(tokenizer, tmp_path):
    contestants = [guessing(tokenizer, "one"), guessing(tokenizer, "two")]
    first = run(contestants, tmp_path)
    calls = count_forwards(contestants)
    # Limits of the cost are no reason to measure again.
    assert run(contestants, tmp_path, batch_size=1) == first
    assert calls == []
    run(contestants, tmp_path, seed=1)
    assert calls != []


def test_a_killed_run_keeps_the_models_that_are_finished(tokenizer, tmp_path):
    contestants = [guessing(tokenizer, name) for name in ("one", "two", "three")]

    def kill(done, total):
        assert total == 3 * 12
        if done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(contestants, tmp_path, progress=kill)
    assert [record.model for record in load_records(tmp_path)] == ["one"]
    counts = [count_forwards([contestant]) for contestant in contestants]
    seen = []
    records = run(contestants, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [record.model for record in records] == ["one", "two", "three"]
    assert counts[0] == []
    assert counts[1] != []
    assert counts[2] != []
    assert seen[-1] == (24, 24)


def test_another_text_under_the_same_name_is_measured_again(tokenizer, tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text("The cat sat on the mat. " * 300)
    changes = {"haystack": "text", "paths": (str(path),)}
    contestant = guessing(tokenizer)
    before = run([contestant], tmp_path, **changes)[0]
    calls = count_forwards([contestant])
    path.write_text("The dog sat on the log. " * 300)
    after = run([contestant], tmp_path, **changes)[0]
    assert calls != []
    assert before.provenance.prompts_hash != after.provenance.prompts_hash


def test_prompts_beyond_the_context_are_noted_and_not_scored(tokenizer, tmp_path):
    contestants = [copying(tokenizer, "long", 256), copying(tokenizer, "short", 200)]
    long, short = run(contestants, tmp_path)
    assert not any("context" in note for note in long.notes)
    assert short.notes[0] == (
        "Prompts of 200 tokens were not measured: with 10 tokens of answer they exceed the context of 200 tokens."
    )
    assert short.metrics["accuracy"].value == 1
    assert short.metrics["accuracy"].num == 6
    assert {cell.length for cell in cells_of(short)} == {160}
    assert short.details["not_measured"] == [{"length": 200, "reason": "exceeds the context of 200 tokens"}]
    assert long.details["not_measured"] == []


def test_a_model_without_room_for_any_prompt_has_no_metrics(tokenizer, tmp_path):
    record = run([copying(tokenizer, context=100)], tmp_path)[0]
    assert record.metrics == {}
    assert record.details["cells"] == []
    assert "160, 200 tokens were not measured" in record.notes[0]


def test_prompts_beyond_the_context_are_measured_on_request(tokenizer, tmp_path):
    record = run([copying(tokenizer, context=200)], tmp_path, beyond_context=True)[0]
    assert record.metrics["accuracy"].num == 12
    assert "were measured although" in record.notes[0]
    assert "the context of 200 tokens" in record.notes[0]


def test_default_lengths_are_those_of_the_longest_context(tokenizer, tmp_path):
    contestants = [copying(tokenizer, "short", 200), copying(tokenizer, "long", 600)]
    records = run(contestants, tmp_path, lengths=None, depths=1, samples=1)
    assert [record.settings["lengths"] for record in records] == [[256, 512]] * 2
    assert records[0].metrics == {}


def test_one_score_alone(tokenizer, tmp_path):
    forced = run([copying(tokenizer)], tmp_path, scores=("teacher_forced",))[0]
    assert "accuracy" not in forced.metrics | forced.baselines
    assert forced.details["cost"]["generated_tokens"] == 0
    assert set(forced.details["cost"]["seconds"]) == {"teacher_forced"}
    assert all(cell.exact is None for cell in cells_of(forced))
    written = run([copying(tokenizer)], tmp_path, scores=("generation",))[0]
    assert set(written.metrics) == {"accuracy"}
    assert written.details["cost"]["prefill_tokens"] == 3 * 2 * (160 + 200)
    assert set(written.details["cost"]["seconds"]) == {"generation"}
    assert all(cell.log_probs is None for cell in cells_of(written))


def test_scores_that_share_a_prompt_are_those_of_each_alone(tokenizer, tmp_path):
    model = random_student(len(tokenizer), {"preset": "2mamba", "window": 8, "sinks": 2})
    contestant = Contestant("student", "folder", model, tokenizer, "student")
    found = []
    for scores in (("generation", "teacher_forced"), ("teacher_forced",), ("generation",)):
        folder = tmp_path / "-".join(scores)
        run([contestant], folder, scores=scores)
        lines = (folder / "evals/niah/samples/student.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    for both, forced, written in zip(*found, strict=True):
        assert both["log_probs"] == pytest.approx(forced["log_probs"], abs=1e-4)
        assert both["ranks"] == forced["ranks"]
        assert both["generated"] == written["generated"]


def test_a_model_whose_cache_cannot_be_shared_reads_a_prompt_per_score(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.eval.niah.measure.can_share_prompts", lambda model: False)
    record = run([copying(tokenizer)], tmp_path)[0]
    answers = sum(len(json.loads(line)["log_probs"]) for line in samples_of(tmp_path))
    assert record.metrics["accuracy"].value == record.metrics["key_rank1"].value == 1
    assert record.details["cost"]["prefill_tokens"] == 2 * 3 * 2 * (160 + 200) + answers


def test_another_tokenizer_is_noted(tokenizer, tmp_path):
    _, other = run([guessing(tokenizer, "one"), guessing(tiny_tokenizer("spaces"), "two")], tmp_path)
    assert "tokenizer" in other.notes[0]


@pytest.mark.parametrize(
    "changes, accuracy, log_prob",
    [
        ({"key_digits": 2}, 1 / 90, -math.log(90)),
        ({"paper": True}, 1e-4, -math.log(1e4)),
        ({"num_keys": 4}, 1 / 4, -math.log(4)),
        ({"num_keys": 3, "num_values": 2}, 1 / 6, -math.log(12)),
    ],
)
def test_baselines(changes, accuracy, log_prob, tokenizer, tmp_path):
    baselines = run([copying(tokenizer, context=512)], tmp_path, lengths=(300,), samples=1, **changes)[0].baselines
    assert baselines == {"accuracy": pytest.approx(accuracy), "key_logprob": pytest.approx(log_prob)}


def test_paired_differences_are_over_prompts():
    first = [Cell(length=256, depth=0.5, distance=1, exact="1101", log_probs=(-1, -2, -3, -4))]
    second = [
        Cell(length=256, depth=0.5, distance=1, exact="1000", log_probs=(-2, -2, -5, -5)),
        Cell(length=512, depth=0.5, distance=1, exact="0000"),
    ]
    accuracy = paired_differences(first, second, "accuracy")
    assert list(accuracy) == [256]
    assert (accuracy[256].value, accuracy[256].num) == (0.5, 4)
    assert accuracy[256].standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert paired_differences(first, second, "key_logprob")[256].value == 1
    assert paired_differences(first, second, "key_rank1") == {}


def test_groups_have_wilson_intervals():
    cells = [
        Cell(length=256, depth=0, distance=1, exact="11111"),
        Cell(length=256, depth=1, distance=1, exact="11100"),
    ]
    (group,) = group_cells(cells, "length")
    assert group.key_rank1 is None
    assert group.accuracy.num == 10
    assert (group.accuracy.value, group.accuracy.low, group.accuracy.high) == pytest.approx(
        (0.8, 0.49016, 0.94332), abs=1e-5
    )


def test_a_record_of_another_task_has_no_cells(tokenizer, tmp_path):
    record = run([copying(tokenizer)], tmp_path)[0]
    with pytest.raises(OutputError, match="no readable cells"):
        cells_of(record.model_copy(update={"details": {}}))


def test_no_model_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no model"):
        run([], tmp_path)


def test_weights_stay_as_they_were(tokenizer, tmp_path):
    contestant = guessing(tokenizer)
    before = {name: tensor.clone() for name, tensor in contestant.model.state_dict().items()}
    contestant.model.train()
    run([contestant], tmp_path)
    assert contestant.model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in contestant.model.state_dict().items())


def test_a_score_without_spread_has_no_standard_error_and_a_note(tokenizer, tmp_path):
    record = run([copying(tokenizer)], tmp_path)[0]
    assert record.metrics["accuracy"].standard_error is None
    assert len(record.notes) == 1
    assert record.notes[0].startswith("No standard error of accuracy, ")


@pytest.mark.parametrize("name", ["key_logprob_per_token", "key_reciprocal_rank"])
def test_scores_beside_the_cells_are_paired_by_prompt(tokenizer, tmp_path, name):
    records = run([guessing(tokenizer), copying(tokenizer)], tmp_path)
    pairs = metric_differences(*records, tmp_path)
    values = [
        [prompt_scores(Outcome.model_validate_json(line))[name] for line in samples_of(tmp_path, record.model)]
        for record in records
    ]
    mean, error = mean_and_error([mine - theirs for mine, theirs in zip(*values, strict=True)])
    assert pairs[name].paired
    assert (pairs[name].value, pairs[name].standard_error) == (pytest.approx(mean), pytest.approx(error))
    # The samples of another evaluation are not those of the record.
    lines = samples_of(tmp_path)
    (tmp_path / "evals/niah/samples/teacher.jsonl").write_text("\n".join(lines[:1]) + "\n")
    stale = records[1].model_copy(update={"metrics": {name: Metric(value=-99.0, standard_error=1.0, num=12)}})
    assert not metric_differences(records[0], stale, tmp_path)[name].paired
