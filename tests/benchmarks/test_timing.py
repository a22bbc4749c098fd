"""The clock's logic, on devices that do not exist."""

import pytest
import torch

from benchmarks.suite import hardware
from benchmarks.suite.hardware import CpuHardware, CudaHardware
from benchmarks.suite.timing import measure, percentiles
from tests.benchmarks.fakes import FakeCuda, FakeHardware


def test_percentiles_are_those_of_the_middle_three_fifths():
    assert percentiles([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == (2.0, 3.5, 5.0)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_contenders_take_turns_and_the_first_one_changes():
    device = FakeHardware()
    timings, failures = measure(device, {"a": device.call("a"), "b": device.call("b")}, budget_ms=4.0)
    warm_up, turns = device.log[:8], device.log[8:]
    assert warm_up == ["a"] * 4 + ["b"] * 4
    assert turns == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert failures == {}
    assert timings["a"].repetitions == 4
    assert timings["a"].peak_bytes == 123


def test_median_is_of_the_measured_calls_only():
    # the first timed call is the estimate
    device = FakeHardware({"a": [100.0, 1.0, 2.0, 9.0]})
    timings, _ = measure(device, {"a": device.call("a")}, budget_ms=300.0)
    assert (timings["a"].median_ms, timings["a"].repetitions) == (2.0, 3)
    assert timings["a"].p20_ms < 2.0 < timings["a"].p80_ms


@pytest.mark.parametrize("ms, repetitions", [(1e4, 3), (1e-3, 50), (10.0, 10)])
def test_repetitions_fit_the_time_within_bounds(ms, repetitions):
    device = FakeHardware({"a": [ms]})
    timings, _ = measure(device, {"a": device.call("a")}, budget_ms=100.0)
    assert timings["a"].repetitions == repetitions


def test_a_contender_that_fails_is_left_out_and_said():
    device = FakeHardware()
    calls = {"bad": device.call("bad", RuntimeError("no kernel")), "good": device.call("good")}
    timings, failures = measure(device, calls, budget_ms=3.0)
    assert list(timings) == ["good"]
    assert failures == {"bad": "RuntimeError: no kernel"}
    assert device.resets == 1


def test_an_output_that_is_not_finite_is_no_timing():
    device = FakeHardware()
    timings, failures = measure(device, {"nan": device.call("nan", float("nan"))}, budget_ms=3.0)
    assert timings == {}
    assert "not finite" in failures["nan"]


def test_the_head_start_grows_with_the_time_to_queue_a_call():
    device = FakeHardware()
    measure(device, {"a": device.call("a")}, budget_ms=3.0)
    # a call of the fake takes 0.5 ms to queue
    assert device.head_starts == [0.2, 1.0, 1.0, 1.0]


def test_cpu_clock_runs():
    sample = CpuHardware().time_once(lambda: sum(range(1000)), 0.0)
    assert sample.ms > 0


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(hardware, "_CALIBRATION_CYCLES", 5000)
    return fake


def test_cuda_events_enclose_the_call_after_cache_flush_and_spin(cuda):
    device = CudaHardware(torch.device("cpu"))
    cuda.log.clear()
    start = cuda.now_ms
    sample = device.time_once(lambda: cuda.run(3.0), head_start_ms=2.0)
    assert cuda.log == ["spin", "event", "kernel", "event", "wait"]
    assert sample.ms == pytest.approx(3.0)
    # 2 ms of spinning at the calibrated rate, outside of the events
    assert cuda.now_ms - start == pytest.approx(5.0)


def test_cuda_spinning_is_bounded(cuda):
    device = CudaHardware(torch.device("cpu"))
    start = cuda.now_ms
    device.time_once(lambda: None, head_start_ms=1e6)
    assert cuda.now_ms - start == pytest.approx(25.0)


def test_cuda_flush_is_larger_than_the_cache(cuda):
    device = CudaHardware(torch.device("cpu"))
    assert device._flush.numel() >= 256 * 2**20


def test_cuda_memory(cuda):
    device = CudaHardware(torch.device("cpu"))
    assert device.free_bytes() == 1000 + 300 - 100
    cuda.log.clear()
    assert device.peak_bytes(lambda: cuda.run(1.0)) == 50
    assert cuda.log == ["synchronize", "reset peak", "kernel", "synchronize"]


def test_a_broken_context_is_a_problem(cuda, monkeypatch):
    device = CudaHardware(torch.device("cpu"))
    assert device.problem() is None

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    monkeypatch.setattr(torch, "zeros", broken)
    assert device.problem() == "CUDA error: an illegal memory access was encountered"
