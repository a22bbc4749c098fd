"""Timing several contenders in turn, so that clocks and temperature are the same for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.suite.hardware import Call, Hardware

_MIN_REPETITIONS = 3
_MAX_REPETITIONS = 50
# Queueing takes longer when the host is busy: the head start is twice what a warm call needed.
_HEAD_START_FACTOR = 2.0
_MIN_HEAD_START_MS = 0.2


@dataclass(frozen=True)
class Timing:
    """What repeating a call gave.

    Attributes:
        median_ms: Median of the time on the device.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        repetitions: How many.
        enqueue_ms: Median of the host's time per call. Where it is longer than `median_ms`, a program that issues the
            call once is slowed by its launches.
        peak_bytes: Memory at the peak above the start, outputs included; None where unknown.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    repetitions: int
    enqueue_ms: float
    peak_bytes: int | None = None

    def metrics(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile, interpolated linearly.

    Args:
        values: At least one.

    Returns:
        Three numbers in ascending order.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[3]


def measure(
    hardware: Hardware, contenders: Mapping[str, Call], budget_ms: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time contenders in turns.

    Args:
        hardware: The clock.
        contenders: Calls by name. The first tensor each returns must be finite.
        budget_ms: Time to spend on the repetitions per contender; at least 3 and at most 50 are made.

    Returns:
        The timings by name, and the error of each of the others during warm-up (memory, an unsupported shape, …).

    Raises:
        RuntimeError: A call that worked in warm-up fails later.
    """
    ready: dict[str, Call] = {}
    head_start, estimate, peak = {}, {}, {}
    failures: dict[str, str] = {}
    for name, call in contenders.items():
        try:
            peak[name] = _warm_up(hardware, call)
            sample = hardware.time_once(call, _MIN_HEAD_START_MS)
        except Exception as error:
            # As text: the exception's traceback would keep the tensors of its frames.
            failures[name] = f"{type(error).__name__}: {error}"
            hardware.reset()
            continue
        ready[name] = call
        head_start[name] = max(_HEAD_START_FACTOR * sample.enqueue_ms, _MIN_HEAD_START_MS)
        estimate[name] = sample.ms
    samples: dict[str, list] = {name: [] for name in ready}
    for turn in range(_repetitions(list(estimate.values()), budget_ms)):
        names = list(ready)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(hardware.time_once(ready[name], head_start[name]))
    timings = {}
    for name, taken in samples.items():
        p20, median, p80 = percentiles([sample.ms for sample in taken])
        enqueue = statistics.median(sample.enqueue_ms for sample in taken)
        timings[name] = Timing(median, p20, p80, len(taken), enqueue, peak[name])
    return timings, failures


def _repetitions(estimates_ms: list[float], budget_ms: float) -> int:
    if not estimates_ms:
        return 0
    mean = max(sum(estimates_ms) / len(estimates_ms), 1e-6)
    return min(max(int(budget_ms / mean), _MIN_REPETITIONS), _MAX_REPETITIONS)


def _warm_up(hardware: Hardware, call: Call) -> int | None:
    """Compile and warm up with three calls; return the peak memory of the last one."""
    result = call()
    if not torch.isfinite(_first_tensor(result)).all():
        raise ArithmeticError("the output is not finite")
    del result
    call()
    return hardware.peak_bytes(call)


def _first_tensor(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else _first_tensor(result[0])
