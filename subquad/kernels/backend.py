"""Which implementation runs the op: Triton kernels or PyTorch, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subquad.errors import ConfigError
from subquad.kernels.state import MAX_STATE_ORDER

Backend = Literal["auto", "torch", "triton"]
Precision = Literal["default", "high"]
BACKENDS: tuple[Backend, ...] = ("auto", "torch", "triton")
PRECISIONS = ("default", "high")
BACKEND_VARIABLE = "SUBQUAD_BACKEND"

MAX_HEAD_DIM = 128
# Tensor cores for bfloat16 and asynchronous copies, which the kernels' tiles rely on.
_MIN_CAPABILITY = (8, 0)

_SAYING = "poly_attention runs in PyTorch, not on the Triton kernels: %s"
_said: set[tuple[str, str]] = set()

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A backend and the reason for it, in words."""

    backend: Literal["torch", "triton"]
    reason: str


def interpreting() -> bool:
    """Return whether Triton kernels run in the interpreter, on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def import_problem(module: str) -> str | None:
    """Return why an installed module cannot be imported, or None if it can or is not installed."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}".strip()
    return None


def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'subquad[triton]')"
    if torch.compiler.is_compiling():
        # torch.compile cannot follow an import, and needs triton itself.
        return None
    problem = import_problem("triton")
    return None if problem is None else f"triton is installed but cannot be imported: {problem}"


def device_problem(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device, or None if they can."""
    problem = _triton_problem()
    if problem is not None:
        return problem
    if interpreting():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 runs the kernels on the CPU only"
    if device.type != "cuda":
        return f"the Triton kernels need an NVIDIA GPU; the tensors are on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are not validated on AMD GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the Triton kernels need compute capability 8.0 (Ampere); this GPU has {'.'.join(map(str, capability))}"
    return None


def input_problem(q: Tensor, k: Tensor, v: Tensor, orders: tuple[int, ...], causal: bool = True) -> str | None:
    """Return why the Triton kernels cannot take these inputs on a device that runs them, or None if they can."""
    if not causal:
        return "causal=False (every query sees every key) is computed in PyTorch"
    if orders[-1] > MAX_STATE_ORDER:
        return f"power {orders[-1]} is above {MAX_STATE_ORDER}"
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "float64 is computed in PyTorch"
    widest = max(q.shape[3], v.shape[3])
    return f"head_dim {widest} is above the {MAX_HEAD_DIM} the tiles hold" if widest > MAX_HEAD_DIM else None


def backend_from_environment() -> Backend:
    """Read what `auto` stands for.

    Returns:
        The environment variable `SUBQUAD_BACKEND`, or `auto` itself if that is not set.

    Raises:
        ConfigError: The variable holds something else than a backend.
    """
    named = os.environ.get(BACKEND_VARIABLE) or "auto"
    for backend in BACKENDS:
        if named == backend:
            return backend
    raise ConfigError(
        f"{BACKEND_VARIABLE} is {named!r}; it must be one of {', '.join(BACKENDS)}. Correct it or unset it."
    )


def choose_backend(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, orders: tuple[int, ...], causal: bool = True
) -> Choice:
    """Choose the implementation.

    `auto` is what the environment variable `SUBQUAD_BACKEND` names. Where that is not set, it takes the Triton kernels
    on a GPU that runs them, and says once per reason when it does not.

    Args:
        backend: What the caller asked for.
        q: `[B, Tq, H, d]`.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, e]`.
        orders: The powers with a coefficient.
        causal: Whether a query sees the keys up to its own only.

    Returns:
        The choice and why.

    Raises:
        ConfigError: `backend` or the variable is unknown, or is `triton` where the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"poly_attention: backend {backend!r} is unknown; it must be one of {', '.join(BACKENDS)}.")
    asked = "asked for"
    if backend == "auto":
        backend = backend_from_environment()
        asked = f"{BACKEND_VARIABLE}={backend}"
    if backend == "torch":
        return Choice("torch", asked)
    if backend == "auto" and q.device.type != "cuda":
        reason = f"the tensors are on {q.device.type}"
        say_once(logging.INFO, _SAYING, reason)
        return Choice("torch", reason)
    problem = device_problem(q.device) or input_problem(q, k, v, orders, causal)
    if problem is None:
        return Choice("triton", asked if backend == "triton" else "the tensors are on an NVIDIA GPU")
    if backend == "triton":
        raise ConfigError(f"poly_attention: backend 'triton' ({asked}) cannot run: {problem}. Use 'auto' or 'torch'.")
    say_once(logging.WARNING, _SAYING, problem)
    return Choice("torch", problem)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as PyTorch's own attention would take them: inside an autocast region, in its dtype.

    Rotary embeddings and learned maps leave q and k in float32 there. float64 stays.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def say_once(level: int, saying: str, reason: str) -> None:
    """Log a choice, once per reason; nothing while `torch.compile` traces, which cannot follow a logger."""
    if not torch.compiler.is_compiling() and (saying, reason) not in _said:
        _said.add((saying, reason))
        logger.log(level, saying, reason)
