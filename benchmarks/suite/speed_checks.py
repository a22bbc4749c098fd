"""Checks of exactly what is timed, so that no speed stands alone; their kernels are compiled when timing begins."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.suite.cases import Case
from benchmarks.suite.op_cases import OpCase
from benchmarks.suite.op_check import check_op
from benchmarks.suite.settings import Settings
from benchmarks.suite.speed import GRIDS, Grid

_CASE_SECONDS = 60.0


def check_cases(settings: Settings) -> list[Case]:
    """Return a check per shape and form that the timing cases of a mode use.

    Args:
        settings: The run's settings.

    Returns:
        Cases of the section `timings` that need not run alone.
    """
    cases = []
    for check in _checks(GRIDS[settings.mode]):
        if settings.toy:
            check = check.at_toy_size()
        run = functools.partial(check_op, check)
        cases.append(Case("timings", f"check {check.name}", run, limit_s=_CASE_SECONDS))
    return cases


def _checks(grid: Grid) -> Iterator[OpCase]:
    for index, (head_dim, groups) in enumerate(grid.configs):
        shape = functools.partial(OpCase, head_dim=head_dim, groups=groups, kv_heads=2)
        label = f"d{head_dim} G{groups}"
        yield shape(name=f"chunks {label}", score="square", tokens=1500, chunk_size=256)
        yield shape(name=f"whole {label}", score="square", tokens=1000, whole=True)
        yield shape(name=f"prefill {label}", score="square", tokens=1500, state=True, gradients=False)
        yield shape(name=f"step {label}", score="square", tokens=1, state=True, gradients=False)
        pending = grid.pending
        yield shape(name=f"buffer {label}", score="square", tokens=pending, queries=1, state=True, gradients=False)
        if index == 0:
            # As a 2Mamba layer beside a window calls it: what the end-to-end section times.
            yield shape(name=f"model {label}", score="offset", tokens=1500, chunk_size=256, normalize=False)
        if index < grid.num_compared:
            yield shape(name=f"linear {label}", score="linear", tokens=1500, chunk_size=256, normalize=False)
            yield shape(name=f"taylor {label}", score="taylor", tokens=1500, chunk_size=256)
