"""A short check of the op and of the window on the device at hand, against float64 on the CPU.

Compilers have bugs that show on one GPU generation only, some in gradients only (Triton 3.4 to 3.7.0 on Hopper:
fla-org/flash-linear-attention#640). The inputs are small but have what goes wrong: several chunks, a ragged tail,
grouped query heads, a reset, tokens that are not written, an initial and a final state, every power.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from subquad.kernels.backend import BACKEND_VARIABLE, backend_from_environment, device_problem, interpreting
from subquad.kernels.selfcheck_compare import Check, Measured, compare
from subquad.kernels.window_flex import flex_problem

Status = Literal["ok", "failed", "no time", "no memory", "no device"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a check found.

    Attributes:
        check: The check.
        status: `ok` or `failed`; else why it was left out: `no time`, `no memory`, `no device` after an error that only
            another process recovers from.
        measured: Errors by result: `out`, `d k`, ….
        problems: One phrase per thing that is wrong.
        seconds: Time it took, compilation included.
    """

    check: Check
    status: Status
    measured: dict[str, Measured] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def worst(self) -> tuple[str, Measured] | None:
        """The result nearest to its limit, or farthest above it."""
        return max(self.measured.items(), key=lambda item: item[1].error / item[1].limit, default=None)


_TRITON = (
    Check(implementation="triton", dtype=torch.bfloat16, head_dim=64),
    Check(part="decode", implementation="triton", dtype=torch.bfloat16, head_dim=64),
    Check(implementation="triton", score="taylor", head_dim=64),
    Check(implementation="triton", dtype=torch.bfloat16, head_dim=128, num_kv_heads=1),
    Check(implementation="triton", score="linear", dtype=torch.bfloat16, head_dim=64),
    Check(implementation="triton", dtype=torch.bfloat16, head_dim=64, chunk_size=0),
    Check(implementation="triton", score="taylor", dtype=torch.float16, head_dim=64),
    Check(implementation="triton", score="linear", head_dim=128),
    Check(part="decode", implementation="triton", score="taylor", head_dim=64),
)
# The interpreter takes seconds for what a GPU does in microseconds.
_INTERPRETED = (
    Check(implementation="triton", score="taylor", head_dim=16, tokens=20, chunk_size=16, num_kv_heads=1),
    Check(part="decode", implementation="triton", head_dim=16, tokens=20, chunk_size=16, num_kv_heads=1),
)
_TORCH = (
    Check(implementation="torch", head_dim=32),
    Check(part="decode", implementation="torch", head_dim=32),
    Check(implementation="torch", score="taylor", head_dim=16),
    Check(implementation="torch", score="linear", head_dim=32),
    Check(implementation="torch", head_dim=16, chunk_size=0),
)
_TORCH_WINDOW = Check(part="window", implementation="torch", head_dim=32, chunk_size=48)
_FLEX_WINDOW = replace(_TORCH_WINDOW, implementation="flex", dtype=torch.bfloat16, head_dim=64)


def planned_checks(device: torch.device) -> list[Check]:
    """Return what is to be checked on a device, the most important first.

    Args:
        device: The device.

    Returns:
        Checks of the Triton kernels where they run, of the PyTorch form and of the window; of PyTorch only if
        `SUBQUAD_BACKEND` is `torch`.

    Raises:
        ConfigError: `SUBQUAD_BACKEND` holds something else than a backend.
    """
    kernels: tuple[Check, ...] = ()
    if backend_from_environment() != "torch" and device_problem(device) is None:
        kernels = _INTERPRETED if interpreting() else _TRITON
    window = _FLEX_WINDOW if window_problem(device) is None else _TORCH_WINDOW
    return [*kernels[:2], _TORCH[0], window, *kernels[2:], *_TORCH[1:]]


def window_problem(device: torch.device) -> str | None:
    """Read why the window does not run as one fused kernel on a device.

    Args:
        device: The device.

    Returns:
        The reason, or None if it does.

    Raises:
        ConfigError: `SUBQUAD_BACKEND` holds something else than a backend.
    """
    if backend_from_environment() == "torch":
        return f"{BACKEND_VARIABLE}=torch"
    example = torch.empty(1, _FLEX_WINDOW.tokens, 1, _FLEX_WINDOW.head_dim, dtype=_FLEX_WINDOW.dtype, device=device)
    return flex_problem(example, example, example)


def run_checks(device: torch.device, seconds: float) -> Iterator[CheckResult]:
    """Run the planned checks of a device, as many as there is time for.

    Args:
        device: The device.
        seconds: No check starts later than this, except the first of the Triton kernels and of the PyTorch form.

    Yields:
        One result per planned check.

    Raises:
        ConfigError: `SUBQUAD_BACKEND` holds something else than a backend.
    """
    start = time.monotonic()
    begun: set[str] = set()
    lost = False
    for check in planned_checks(device):
        first_of_op = check.part == "op" and check.implementation not in begun
        if lost:
            yield CheckResult(check=check, status="no device")
        elif time.monotonic() - start > seconds and not first_of_op:
            yield CheckResult(check=check, status="no time")
        else:
            logger.info("%s: %s", device, check.name)
            begun.add(check.implementation)
            result = run_check(check, device)
            lost = result.status == "failed" and not _works(device)
            yield result


def _works(device: torch.device) -> bool:
    """Return whether a device still computes; after an illegal memory access, a GPU is lost to the process."""
    try:
        return torch.ones(1, device=device).sum().item() == 1
    except RuntimeError:
        return False


def run_check(check: Check, device: torch.device) -> CheckResult:
    """Run one check. Whatever it raises is part of the result.

    Args:
        check: The check.
        device: Where to run it.

    Returns:
        The result: failed if an error is above its limit, if something was raised, or if two runs of the Triton kernels
        (on a CPU: of anything) differ in one bit.
    """
    start = time.monotonic()
    measured: dict[str, Measured] = {}
    problems: list[str] = []
    status: Status = "failed"
    try:
        measured, problems = compare(check, device)
        status = "failed" if problems else "ok"
    except torch.OutOfMemoryError:
        status = "no memory"
    except Exception as error:  # compilers and drivers raise anything; the other checks still say something
        logger.debug("%s", check.name, exc_info=True)
        problems = [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
    seconds = time.monotonic() - start
    return CheckResult(check=check, status=status, measured=measured, problems=tuple(problems), seconds=seconds)
