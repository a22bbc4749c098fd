"""Kernel launches as data, so that a test can compile exactly what would be launched, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        kernel: The `triton.jit` function.
        grid: Programs along each axis; sequences first, since the other axes end at 65,535.
        arguments: Arguments by name, compile-time constants included; those the kernel does not take are left out.
        num_warps: Warps per program.
        num_stages: Depth of the load pipeline.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


_recorded: list[Launch] | None = None


def run(launch: Launch) -> None:
    """Launch the kernel (or, inside `recording`, only remember it)."""
    if _recorded is not None:
        _recorded.append(launch)
        return
    arguments = {name: launch.arguments[name] for name in launch.kernel.arg_names}
    launch.kernel[launch.grid](**arguments, num_warps=launch.num_warps, num_stages=launch.num_stages)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches of the block instead of running them; what the block computes is meaningless."""
    global _recorded
    launches: list[Launch] = []
    _recorded = launches
    try:
        yield launches
    finally:
        _recorded = None
