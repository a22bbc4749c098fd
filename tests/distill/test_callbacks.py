"""The log file, and the rule that stops a run."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from subquad.distill.callbacks import DivergenceGuard, LogFile, read_log
from subquad.errors import TrainingError


def state(step: int) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=100, is_world_process_zero=True)


def feed(guard: DivergenceGuard, losses: list[float], first_step: int = 1) -> None:
    for step, loss in enumerate(losses, first_step):
        guard.on_log(None, state(step), None, {"loss": loss, "grad_norm": 1.0})


def make_guard(warmup_steps: int = 0, past: list[dict] | None = None) -> DivergenceGuard:
    return DivergenceGuard(Path("nowhere"), 3.0, warmup_steps, past or [])


@pytest.mark.parametrize("logs", [{"loss": math.nan}, {"loss": math.inf}, {"loss": 1.0, "grad_norm": math.nan}])
def test_not_finite_stops_even_in_the_warmup(logs):
    with pytest.raises(TrainingError, match=r"step 7: loss .* not finite; no checkpoint was written before\. Try"):
        make_guard(warmup_steps=50).on_log(None, state(7), None, logs)


def test_diverging_loss_stops():
    with pytest.raises(TrainingError, match=r"step 30: the median loss of the last 20 .*, 20\.5, is over 3 .* 20, 1 "):
        feed(make_guard(), [1.0] * 20 + [40.0] * 20)


def test_a_few_high_batches_do_not_stop():
    feed(make_guard(), [1.0] * 20 + [100.0] * 9 + [1.0] * 20)


def test_rise_in_the_warmup_is_allowed():
    rise = [1.0] * 20 + [40.0] * 15 + [1.0] * 30
    feed(make_guard(warmup_steps=50), rise)
    with pytest.raises(TrainingError):
        feed(make_guard(warmup_steps=0), rise)


def test_harmless_losses_are_noise():
    feed(make_guard(), [1e-9] * 20 + [0.29] * 40)
    with pytest.raises(TrainingError):
        feed(make_guard(), [1e-9] * 20 + [0.31] * 40)


@pytest.mark.parametrize("seed", range(50))
def test_rows_of_very_different_loss_do_not_stop(seed):
    # a model that does not change at all: losses of rows spread over three orders of magnitude
    draws = random.Random(seed)
    feed(make_guard(), [math.exp(draws.gauss(-3.0, 1.7)) for _ in range(400)])


def test_rule_goes_on_where_the_resumed_run_was():
    past = [{"step": step, "loss": loss} for step, loss in enumerate([1.0] * 20 + [40.0] * 9, 1)]
    with pytest.raises(TrainingError, match="step 30"):
        feed(make_guard(past=past), [40.0], first_step=30)


def test_logs_without_a_loss_are_left_alone(tmp_path):
    log = LogFile(tmp_path / "log.jsonl", "stage1", 8, 0)
    log.on_train_begin(None, state(0), None)
    for callback in (make_guard(), log):
        callback.on_log(None, state(5), None, {"train_runtime": math.nan})
    assert read_log(tmp_path / "log.jsonl", "stage1") == []


def write_steps(log: LogFile, first: int, last: int) -> None:
    log.on_train_begin(None, state(first - 1), None)
    optimizer = SimpleNamespace(param_groups=[{"name": "maps", "lr": 0.5}, {"name": "other", "lr": 0.25}])
    for step in range(first, last + 1):
        log.on_optimizer_step(None, state(step), None, optimizer=optimizer)
        log.on_log(None, state(step), None, {"loss": 1.0 / step, "grad_norm": 2.0, "learning_rate": 9.0})


def test_lines(tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    write_steps(LogFile(path, "stage1", 64, 0), 1, 3)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(line["stage"], line["step"], line["tokens"], line["loss"]) for line in lines] == [
        ("stage1", 1, 64, 1.0),
        ("stage1", 2, 128, 0.5),
        ("stage1", 3, 192, 1 / 3),
    ]
    assert all(line["lr"] == {"maps": 0.5, "other": 0.25} and line["grad_norm"] == 2.0 for line in lines)


def test_resume_drops_later_lines_of_its_own_stage_only(tmp_path):
    path = tmp_path / "log.jsonl"
    write_steps(LogFile(path, "stage1", 64, 0), 1, 6)
    write_steps(LogFile(path, "stage2", 64, 0), 1, 6)
    with path.open("a") as file:
        file.write('{"stage": "stage2", "st')

    write_steps(LogFile(path, "stage2", 64, 4), 5, 7)

    assert [line["step"] for line in read_log(path, "stage1")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_log(path, "stage2")] == [1, 2, 3, 4, 5, 6, 7]
    assert len(path.read_text().splitlines()) == 13


def test_wall_time_of_a_resumed_stage_includes_the_time_before(tmp_path):
    path = tmp_path / "log.jsonl"
    write_steps(LogFile(path, "stage1", 64, 0), 1, 1)
    line = json.loads(path.read_text()) | {"wall_s": 1000.0}
    path.write_text(json.dumps(line) + "\n")
    write_steps(LogFile(path, "stage1", 64, 1), 2, 2)
    assert read_log(path, "stage1")[-1]["wall_s"] >= 1000.0
