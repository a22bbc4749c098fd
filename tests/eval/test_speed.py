"""The speed task: models in turns, ratios by round, records that repeat and resume, and the rows of the report."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import DynamicCache, LlamaForCausalLM

from subquad.errors import ConfigError, OutputError, TrainingError
from subquad.eval.contestants import Contestant
from subquad.eval.records import load_record, record_path, save_record
from subquad.eval.report import load_run, measures_of, write_report
from subquad.eval.report.blocks import Cell
from subquad.eval.report.differences import metric_differences
from subquad.eval.speed import SpeedSettings, Timing, run_speed, timings_of
from subquad.eval.speed.timings import median_error

from .conftest import make_converted
from .niah.tiny import tiny_tokenizer

SETTINGS = {"lengths": (8, 24), "new_tokens": 4, "repeats": 3}
# Seconds per forward pass of each model.
COSTS = {"teacher": 6.0, "window_only": 4.0, "student": 2.0}


class FakeClock:
    """A clock that moves only when a model runs, by that model's cost times the pace of the machine.

    Attributes:
        calls: (model, number of tokens of the call, tokens on the cache before it), in order.
    """

    def __init__(self, costs=COSTS, paces=(1.0,)):
        self.costs, self.paces = costs, paces
        self.time = 100.0
        self.calls: list[tuple[str, int, int]] = []
        self.prefills: dict[tuple[str, int], int] = {}

    def now(self, device: torch.device) -> float:
        assert device == torch.device("cpu")
        return self.time

    def watch(self, name, model):
        def ran(module, args, kwargs, output):
            cache = next(value for value in kwargs.values() if isinstance(value, DynamicCache))
            num = args[0].shape[1]
            self.calls.append((name, num, cache.get_seq_length() - num))
            if num > 1:
                self.prefills[name, num] = self.prefills.get((name, num), 0) + 1
                self.round = self.prefills[name, num] - 1
            self.time += self.costs[name] * self.paces[self.round % len(self.paces)] * (num if num > 1 else 1)

        model.register_forward_hook(ran, with_kwargs=True)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("digits")


@pytest.fixture
def make(tokenizer):
    """Return a function that makes contestants with models of their own, watched by a clock."""

    def contestants(clock, names=tuple(COSTS), contexts=None):
        found = []
        for name in names:
            model = make_converted()
            model.config.max_position_embeddings = (contexts or {}).get(name, 512)
            clock.watch(name, model)
            mode = name if name in ("teacher", "window_only", "student") else None
            found.append(Contestant(name, f"{name}-folder", model, tokenizer, mode))
        return found

    return contestants


def run(contestants, folder, clock, **changes):
    settings = SpeedSettings(**SETTINGS | changes)
    return run_speed(contestants, settings, folder, command="subquad eval x --tasks speed", now=clock.now)


def by_model(records):
    return {record.model: record for record in records}


def test_models_take_turns_and_every_round_starts_with_the_next(make, tmp_path):
    clock = FakeClock()
    run(make(clock), tmp_path, clock)
    prompts = [(name, num) for name, num, _ in clock.calls if num > 1]
    turns = [("teacher", "window_only", "student"), ("window_only", "student", "teacher")]
    turns += [("student", "teacher", "window_only"), turns[0]]
    # One round that does not count, then three that do.
    assert prompts == [(name, length) for order in turns for length in (8, 24) for name in order]


def test_tokens_are_written_one_by_one_on_the_cache_of_the_prompt(make, tmp_path):
    clock = FakeClock()
    run(make(clock, ("teacher", "student")), tmp_path, clock, lengths=(8,), repeats=3)
    one = [("teacher", 8, 0), *(("teacher", 1, 8 + step) for step in range(4))]
    assert clock.calls[:5] == one
    assert [call[1:] for call in clock.calls] == [call[1:] for call in one] * 2 * 4


def test_every_model_is_timed_in_its_own_mode(make, tmp_path):
    clock = FakeClock()
    contestants = make(clock)
    seen = {contestant.name: set() for contestant in contestants}
    for contestant in contestants:
        found = seen[contestant.name]
        contestant.model.model.layers[0].self_attn.register_forward_pre_hook(
            lambda module, _, found=found: found.add(module.mode)
        )
    run(contestants, tmp_path, clock)
    assert seen == {"teacher": {"teacher"}, "window_only": {"window_only"}, "student": {"student"}}


def test_ratios_are_the_teachers_time_over_the_models(make, tmp_path):
    clock = FakeClock()
    found = by_model(run(make(clock), tmp_path, clock, batch_size=2))
    assert found["teacher"].metrics == {}
    names = {"prefill_ratio_8", "decode_ratio_8", "prefill_ratio_24", "decode_ratio_24"}
    for model, ratio in {"student": 3.0, "window_only": 1.5}.items():
        metrics = found[model].metrics
        assert set(metrics) == names
        assert {metric.value for metric in metrics.values()} == {ratio}
        assert {(m.standard_error, m.num, m.higher_is_better) for m in metrics.values()} == {(0.0, 3, True)}
    rates = {t["phase"]: t["tokens_per_second"] for t in found["teacher"].details["timings"] if t["length"] == 24}
    # 24 tokens of two sequences at 6 seconds a token; one forward pass of 6 seconds per token of two sequences.
    assert rates == {"prefill": pytest.approx(2 / 6), "decode": pytest.approx(2 / 6)}
    assert {timing["seconds"][0] for timing in found["teacher"].details["timings"]} == {48.0, 144.0, 24.0}


def test_a_machine_that_slows_down_between_rounds_changes_no_ratio(make, tmp_path):
    steady, slowing = FakeClock(), FakeClock(paces=(50.0, 1.0, 1.7, 9.0))
    expected = by_model(run(make(steady), tmp_path / "a", steady))["student"].metrics
    found = by_model(run(make(slowing), tmp_path / "b", slowing))["student"]
    assert {name: m.value for name, m in found.metrics.items()} == pytest.approx(
        {name: m.value for name, m in expected.items()}
    )
    # The first pace, that of the warm-up, is nowhere.
    assert found.details["timings"][1]["seconds"] == pytest.approx([8.0, 8 * 1.7, 8 * 9.0])


def test_metric_is_a_median_with_the_range_beside_it():
    ratios = (1.0, 1.1, 1.2, 1.1, 40.0)
    timing = Timing(phase="decode", length=64, num_tokens=8, seconds=(2.0, 4.0, 3.0), ratios=ratios)
    assert (timing.metric_name, timing.metric().value, timing.metric().num) == ("decode_ratio_64", 1.1, 5)
    plain = timing.to_dict()
    assert (plain["lowest_ratio"], plain["highest_ratio"], plain["tokens_per_second"]) == (1.0, 40.0, 8 / 3)
    # What a record holds reads back, with what follows from it left out.
    assert Timing.model_validate(plain) == timing


def test_error_of_the_median_is_that_of_repeated_measurements():
    draws = np.random.default_rng(1).normal(1.0, 0.1, (400, 9))
    truth = np.median(draws, axis=1).std()
    typical = median(median_error(list(row)) for row in draws[:100])
    assert typical == pytest.approx(truth, rel=0.25)
    assert median_error([1.5] * 5) == 0


def test_records_are_whole_and_say_where_they_hold(make, tmp_path):
    clock = FakeClock()
    records = run(make(clock), tmp_path, clock)
    for record in records:
        assert load_record(record_path(tmp_path, "speed", record.model)) == record
        assert record.settings["num_threads"] == torch.get_num_threads()
        assert "CPU" in record.settings["device"]
        assert record.provenance.command.endswith("--tasks speed")
        assert [(t.length, t.phase) for t in timings_of(record)] == [
            (length, phase) for length in (8, 24) for phase in ("prefill", "decode")
        ]
    assert len({record.provenance.prompts_hash for record in records}) == 1
    notes = {record.model: " ".join(record.notes) for record in records}
    assert "so it has none of its own" in notes["teacher"]
    assert "bootstrap" in notes["student"]
    assert "bootstrap" not in notes["teacher"]


def test_equal_settings_are_not_measured_again_and_others_are(make, tmp_path):
    clock = FakeClock()
    contestants = make(clock)
    first = run(contestants, tmp_path, clock)
    num = len(clock.calls)
    assert run(contestants, tmp_path, clock) == first
    assert run(contestants[:2], tmp_path, clock) == first[:2]
    assert len(clock.calls) == num
    assert run(contestants, tmp_path, clock, new_tokens=5) != first
    assert len(clock.calls) > num


def test_one_missing_model_measures_all_anew(make, tmp_path):
    clock = FakeClock()
    contestants = make(clock)
    first = by_model(run(contestants, tmp_path, clock))
    record_path(tmp_path, "speed", "window_only").unlink()
    clock.calls.clear()
    second = by_model(run(contestants, tmp_path, clock))
    assert {name for name, _, _ in clock.calls} == set(COSTS)
    assert second["teacher"].details["call"] != first["teacher"].details["call"]


@pytest.mark.parametrize("change", ["call", "threads", "commit", "versions"])
def test_records_of_another_call_machine_or_software_do_not_count(make, tmp_path, change):
    clock = FakeClock()
    contestants = make(clock)
    record = run(contestants, tmp_path, clock)[2]
    source = record.provenance
    changes = {
        "call": {"details": record.details | {"call": "another"}},
        "threads": {"settings": record.settings | {"num_threads": 999}},
        "commit": {"provenance": source.model_copy(update={"commit": "0" * 40})},
        "versions": {"provenance": source.model_copy(update={"versions": source.versions | {"torch": "1.0"}})},
    }
    save_record(record.model_copy(update=changes[change]), tmp_path)
    clock.calls.clear()
    again = run(contestants, tmp_path, clock)
    assert {name for name, _, _ in clock.calls} == set(COSTS)
    assert len({record.details["call"] for record in again}) == 1


def test_a_length_beyond_a_context_is_noted_and_never_a_number(make, tmp_path):
    clock = FakeClock()
    found = by_model(run(make(clock, contexts={"student": 27}), tmp_path, clock))
    assert set(found["student"].metrics) == {"prefill_ratio_8", "decode_ratio_8"}
    assert "24 tokens were not measured" in found["student"].notes[-1]
    assert "exceed the context of student, 27 tokens" in found["student"].notes[-1]
    assert "prefill_ratio_24" in found["window_only"].metrics
    assert not any("not measured" in note for note in found["window_only"].notes)


def test_without_the_teacher_at_a_length_there_is_no_ratio(make, tmp_path):
    clock = FakeClock()
    found = by_model(run(make(clock, contexts={"teacher": 27, "student": 27}), tmp_path, clock))
    assert "prefill_ratio_24" not in found["window_only"].metrics
    assert ["context of teacher" in note for note in found["student"].notes] == [False, True]
    assert 24 not in {num for _, num, _ in clock.calls}


def test_default_lengths_fit_the_teachers_context():
    assert SpeedSettings().resolved(8192).lengths == (512, 2048)
    assert SpeedSettings().resolved(2048).lengths == (512,)
    assert SpeedSettings().resolved(256).lengths == (224,)
    assert SpeedSettings(lengths=(9000,)).resolved(256).lengths == (9000,)
    with pytest.raises(ConfigError, match=r"speed\.new_tokens is 300"):
        SpeedSettings(new_tokens=300).resolved(256)


@pytest.mark.parametrize("wrong", [{"lengths": (8, 8)}, {"lengths": ()}, {"repeats": 2}, {"new_tokens": 0}, {"len": 1}])
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        SpeedSettings(**wrong)


@pytest.mark.parametrize("names", [(), ("teacher",), ("student", "other")])
def test_there_is_no_speed_without_the_teacher_and_another(make, tmp_path, names):
    clock = FakeClock({"other": 1.0} | COSTS)
    with pytest.raises(ConfigError, match="ratio to the teacher"):
        run(make(clock, names), tmp_path, clock)
    assert not (tmp_path / "evals").exists()


def test_a_broken_model_has_no_speed(make, tmp_path):
    clock = FakeClock()
    contestants = make(clock, ("teacher", "student"))
    with torch.no_grad():
        contestants[1].model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="student gives logits that are not finite"):
        run(contestants, tmp_path, clock)
    assert not (tmp_path / "evals").exists()


def test_too_little_memory_names_model_and_length(make, tmp_path, monkeypatch):
    clock = FakeClock()
    contestants = make(clock, ("teacher", "student"))

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    contestants[1].model.model.layers[0].register_forward_pre_hook(full)
    with pytest.raises(ConfigError, match=r"student ran out of memory .* 8 tokens"):
        run(contestants, tmp_path, clock)


def test_a_plain_model_beside_the_teacher_and_the_real_clock(llama: LlamaForCausalLM, tokenizer, tmp_path):
    contestants = [Contestant(name, name, llama, tokenizer) for name in ("teacher", "other")]
    done = []
    settings = SpeedSettings(**SETTINGS)
    found = by_model(
        run_speed(contestants, settings, tmp_path, command="x", progress=lambda *counts: done.append(counts))
    )
    assert all(metric.value > 0 for metric in found["other"].metrics.values())
    assert len(found["other"].metrics) == 4
    assert done == [(index + 1, 16) for index in range(16)]


def test_the_report_shows_ratios_and_what_they_cost(make, tmp_path):
    clock = FakeClock(COSTS | {"student": 12.0})
    run(make(clock), tmp_path, clock)
    rows = {row.name: row for row in measures_of(load_run(tmp_path))}
    assert list(rows) == [f"{phase} speed at {n} tokens" for phase in ("Prefill", "Decode") for n in (8, 24)]
    row = rows["Decode speed at 24 tokens"]
    assert {model: cell.text for model, cell in row.values.items()} == {
        "teacher": "1",
        "window_only": "1.50",
        "student": "0.50",
    }
    assert (row.cost.text, row.cost.mark, row.gain) == ("0.50× as fast", "worse", Cell("0.33× as fast", 1 / 3, "worse"))
    assert "median of 3 rounds" in row.note
    assert "teacher: about 0.2 tokens/s" in row.note
    markdown = write_report(tmp_path).markdown.read_text(encoding="utf-8")
    assert "decode speed at 24 tokens 0.50× as fast (worse)" in markdown
    assert "decode speed at 8 tokens" not in markdown
    numbers = "– | 1.500 | 0.500 | -0.500 *worse* | -1.000 *worse* |"
    assert f"| speed | decode_ratio_24 | 3 | – | {numbers}" in markdown
    assert "peed: not measured" not in markdown


def test_a_ratio_near_one_is_a_tie(make, tmp_path):
    clock = FakeClock(COSTS | {"student": 6.1})
    record = run(make(clock), tmp_path, clock)[2]
    noisy = [timing.model_copy(update={"ratios": (0.9, 0.98, 1.1)}) for timing in timings_of(record)]
    details = record.details | {"timings": [timing.to_dict() for timing in noisy]}
    metrics = {timing.metric_name: timing.metric() for timing in noisy}
    save_record(record.model_copy(update={"metrics": metrics, "details": details}), tmp_path)
    row = next(iter(measures_of(load_run(tmp_path))))
    assert (row.cost.text, row.cost.mark) == ("0.98× as fast", "tie")
    # The control is 1.5 times as fast as the teacher in each of these rounds.
    assert (row.gain.text, row.gain.mark) == ("0.65× as fast", "worse")


def test_records_of_two_calls_are_not_compared(make, tmp_path):
    clock = FakeClock()
    found = by_model(run(make(clock), tmp_path, clock))
    assert metric_differences(found["student"], found["teacher"], tmp_path)
    difference = metric_differences(found["student"], found["window_only"], tmp_path)["decode_ratio_8"]
    assert (difference.value, difference.standard_error, difference.paired) == (1.5, 0.0, True)
    stale = found["teacher"].model_copy(update={"details": found["teacher"].details | {"call": "another"}})
    assert metric_differences(found["student"], stale, tmp_path) == {}


def test_a_record_without_readable_timings_is_an_error(make, tmp_path):
    clock = FakeClock()
    record = run(make(clock), tmp_path, clock)[0]
    with pytest.raises(OutputError, match="speed for teacher has no readable timings"):
        timings_of(record.model_copy(update={"details": {"timings": [{"phase": "prefill"}]}}))
