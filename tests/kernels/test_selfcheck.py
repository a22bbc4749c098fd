"""The self-check passes on a sound machine, and a wrong bit of arithmetic anywhere makes it fail where it is."""

from dataclasses import replace

import pytest
import torch

from subquad.errors import ConfigError
from subquad.kernels import ops, selfcheck, selfcheck_compare, window
from subquad.kernels.selfcheck import CheckResult, planned_checks, run_check, run_checks
from subquad.kernels.selfcheck_compare import Check, Measured

CPU = torch.device("cpu")
SMALL = Check(implementation="torch", head_dim=8, tokens=70, chunk_size=32)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("SUBQUAD_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def change_op(monkeypatch):
    """Return a function that puts its argument between the op and its chunked form."""

    def change(wrapper):
        original = ops.chunked_attention
        monkeypatch.setattr(ops, "chunked_attention", lambda *arguments: wrapper(original, *arguments))

    return change


def test_all_checks_pass_on_a_cpu():
    results = list(run_checks(CPU, seconds=100))
    assert [result.status for result in results] == ["ok"] * len(results), results
    assert {result.check.part for result in results} == {"op", "decode", "window"}
    assert {result.check.score for result in results} == {"linear", "square", "taylor"}
    everything = set().union(*(result.measured for result in results))
    inputs = ("q", "k", "v", "log_decay", "key_weight", "coefs", "state.values", "state.normaliser")
    assert everything == {"out", "normaliser", "log_normaliser", "state.values", "state.normaliser"} | {
        f"d {name}" for name in inputs
    }


def test_results_are_not_trivially_small():
    """All-zero results would have to fail in every part."""
    result = run_check(SMALL, CPU)
    assert all(0 < error < 1e-6 for error, _ in result.measured.values())


def test_wrong_output_is_named(change_op):
    def scaled(original, *arguments):
        joined, state = original(*arguments)
        return joined * 1.001, state

    change_op(scaled)
    result = run_check(SMALL, CPU)
    assert result.status == "failed"
    assert result.worst is not None
    assert {"out", "normaliser", "d q"} <= {name for name, (error, limit) in result.measured.items() if error > limit}
    assert result.measured["state.values"].error < 1e-6
    assert "out: relative error 1.0e-03, the limit is 1e-05" in result.problems


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay"])
def test_wrong_gradient_alone_is_found(change_op, name):
    change_op(
        lambda original, inputs, *rest: original(
            inputs._replace(**{name: _WrongGradient.apply(getattr(inputs, name))}), *rest
        )
    )
    result = run_check(SMALL, CPU)
    wrong = {found for found, (error, limit) in result.measured.items() if error > limit}
    # v carries the key weights as its last column
    assert wrong == ({"d v", "d key_weight"} if name == "v" else {f"d {name}"})


def test_lost_state_is_found(change_op):
    change_op(lambda original, inputs, *rest: original(inputs._replace(state=None), *rest))
    assert run_check(SMALL, CPU).status == "failed"


def test_results_that_change_from_run_to_run_are_found(change_op):
    def noisy(original, *arguments):
        joined, state = original(*arguments)
        return joined + 1e-7 * torch.randn_like(joined), state

    change_op(noisy)
    result = run_check(SMALL, CPU)
    assert "out: two runs differ" in result.problems
    assert all(error <= limit for error, limit in result.measured.values())


def test_nan_is_an_infinite_error(change_op):
    def poisoned(original, *arguments):
        joined, state = original(*arguments)
        return joined * torch.nan, state

    change_op(poisoned)
    result = run_check(SMALL, CPU)
    assert result.status == "failed"
    assert result.measured["out"].error == float("inf")


def test_decoding_is_checked_on_its_own(monkeypatch):
    check = replace(SMALL, part="decode")
    original = ops.recurrent_step
    monkeypatch.setattr(
        ops, "recurrent_step", lambda inputs, final: original(inputs._replace(log_decay=inputs.log_decay - 0.01), final)
    )
    result = run_check(check, CPU)
    assert result.status == "failed"
    assert run_check(SMALL, CPU).status == "ok"


@pytest.mark.parametrize("change", [{"window": 47}, {"sinks": 3}, {"documents": None}])
def test_wrong_window_is_found(monkeypatch, change):
    original = window.blocked_window_attention
    monkeypatch.setattr(window, "blocked_window_attention", lambda inputs: original(inputs._replace(**change)))
    assert run_check(selfcheck._TORCH_WINDOW, CPU).status == "failed"


def test_what_is_raised_is_part_of_the_result(change_op):
    def broken(original, *arguments):
        raise RuntimeError("no C compiler\nsecond line")

    change_op(broken)
    result = run_check(SMALL, CPU)
    assert (result.status, result.problems) == ("failed", ("RuntimeError: no C compiler",))


def test_too_little_memory_is_no_failure(change_op):
    def full(original, *arguments):
        raise torch.OutOfMemoryError("tried to allocate")

    change_op(full)
    assert run_check(SMALL, CPU).status == "no memory"


def test_without_time_only_the_first_check_of_the_op_runs():
    first, *others = run_checks(CPU, seconds=0)
    assert first.status == "ok"
    assert {result.status for result in others} == {"no time"}
    assert [result.check for result in (first, *others)] == planned_checks(CPU)


def test_nothing_more_runs_on_a_lost_device(monkeypatch, change_op):
    def fault(original, *arguments):
        raise RuntimeError("illegal memory access")

    change_op(fault)
    monkeypatch.setattr(selfcheck, "_works", lambda device: False)
    first, *others = run_checks(CPU, seconds=100)
    assert first.status == "failed"
    assert {result.status for result in others} == {"no device"}


def test_worst_is_relative_to_the_limit():
    measured = {"out": Measured(2e-3, 5e-3), "d log_decay": Measured(3e-3, 1e-2)}
    assert CheckResult(check=SMALL, status="ok", measured=measured).worst == ("out", (2e-3, 5e-3))
    assert CheckResult(check=SMALL, status="no time").worst is None


class TestPlan:
    """What is planned where; a `meta` device stands in for a GPU."""

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch):
        monkeypatch.setattr(selfcheck, "device_problem", lambda device: None)
        monkeypatch.setattr(selfcheck, "flex_problem", lambda q, k, v: None)

    @staticmethod
    def plan() -> list[Check]:
        return planned_checks(torch.device("meta"))

    def test_a_gpu_gets_everything(self):
        kernels = [check for check in self.plan() if check.implementation == "triton"]
        assert {check.dtype for check in kernels} == {torch.float32, torch.bfloat16, torch.float16}
        assert {check.head_dim for check in kernels} == {64, 128}
        assert {check.score for check in kernels} == {"linear", "square", "taylor"}
        assert {check.implementation for check in self.plan()} == {"triton", "torch", "flex"}
        assert len({check.name for check in self.plan()}) == len(self.plan())

    def test_the_most_important_comes_first(self):
        assert [check.implementation for check in self.plan()[:4]] == ["triton", "triton", "torch", "flex"]
        assert self.plan()[0].name == "triton: square, head_dim 64, bfloat16"

    def test_kernels_that_are_switched_off_are_not_checked(self, monkeypatch):
        monkeypatch.setenv("SUBQUAD_BACKEND", "torch")
        assert {check.implementation for check in self.plan()} == {"torch"}

    def test_the_interpreter_gets_tiny_checks(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        kernels = [check for check in self.plan() if check.implementation == "triton"]
        assert kernels
        assert all(check.tokens < 32 and check.head_dim == 16 for check in kernels)


def test_a_wrong_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("SUBQUAD_BACKEND", "tritn")
    with pytest.raises(ConfigError, match="'tritn'"):
        planned_checks(CPU)


def test_inputs_have_what_goes_wrong():
    check = Check(implementation="torch", score="taylor", head_dim=8)
    inputs = selfcheck_compare._draw_inputs(check)
    assert check.tokens % check.chunk_size
    assert check.tokens > 2 * check.chunk_size
    assert torch.isinf(inputs["log_decay"]).sum() == 1
    assert (inputs["key_weight"] == 0).any()
    assert inputs["q"].shape[2] == 3 * inputs["k"].shape[2]


@pytest.mark.gpu
def test_all_checks_pass_on_the_gpu():
    results = list(run_checks(torch.device("cuda"), seconds=600))
    assert [result.status for result in results] == ["ok"] * len(results), results


def test_the_window_has_the_same_bits_twice_on_several_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        problems = [selfcheck_compare.compare(selfcheck._TORCH_WINDOW, torch.device("cpu"))[1] for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert problems == [[]] * 3
