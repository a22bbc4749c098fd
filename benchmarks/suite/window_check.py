"""Comparing the fused window with the blocked one in float64."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from benchmarks.suite.cases import Case, Session
from benchmarks.suite.op_cases import BF16, FP16, FP32
from benchmarks.suite.op_check import Named, exceeded, relative_errors
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import DTYPES, Settings
from subquad.kernels import window_attention
from subquad.kernels.window import WindowBackend

LIMITS = {BF16: 5e-3, FP16: 2e-3, FP32: 2e-5}
_TORCH_FACTOR = 2.0
# FlexAttention is compiled for each of its shapes.
_CASE_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """One call of `window_attention`.

    Attributes:
        name: Unique.
        dtype: Dtype of q, k, v.
        tokens: Keys.
        queries: Queries, the last positions; None is all.
        kv_heads: Key/value heads.
        groups: Query heads per key/value head.
        head_dim: Width of keys and values.
        window: Tokens seen.
        sinks: First tokens of a document seen from anywhere.
        packed: Whether there are three documents.
        padded: Whether some keys are hidden.
        quick: Whether a quick run has it.
    """

    name: str
    dtype: str = BF16
    tokens: int = 1000
    queries: int | None = None
    kv_heads: int = 2
    groups: int = 4
    head_dim: int = 64
    window: int = 64
    sinks: int = 4
    packed: bool = False
    padded: bool = False
    quick: bool = False


_TABLE = (
    WindowCase(name="window-bfloat16", quick=True),
    WindowCase(name="window-float16", dtype=FP16),
    WindowCase(name="window-float32", dtype=FP32, groups=1),
    WindowCase(name="window-d128", head_dim=128, groups=3),
    WindowCase(name="window-packed", packed=True, quick=True),
    WindowCase(name="window-padded", padded=True),
    WindowCase(name="window-continued", queries=300),
    WindowCase(name="window-wide", window=256, sinks=0),
)


def window_cases(settings: Settings) -> list[Case]:
    """Return one case per entry of the table.

    Args:
        settings: The run's settings.

    Returns:
        The cases.
    """
    cases = []
    for case in _TABLE:
        if settings.mode == "quick" and not case.quick:
            continue
        if settings.toy:
            queries = None if case.queries is None else 13
            case = replace(case, tokens=41, head_dim=8, window=min(case.window // 8, 20), queries=queries)
        cases.append(Case("correctness", case.name, functools.partial(check_window, case), limit_s=_CASE_SECONDS))
    return cases


def check_window(case: WindowCase, session: Session) -> list[Row]:
    """Run a case in float64, fused (at toy size: blocked) and blocked in its dtype.

    Args:
        case: The case.
        session: Settings and device.

    Returns:
        One row of errors.
    """
    device = session.hardware.device
    backend: WindowBackend = "torch" if session.settings.toy else "flex"
    tensors = _draw(case, session.settings.seed, device)
    expected = _evaluate(case, {name: tensor.double() for name, tensor in tensors.items()}, "torch")
    actual = _evaluate(case, tensors, backend)
    in_torch = _evaluate(case, tensors, "torch")
    errors, torch_errors = (relative_errors(found, expected, {}) for found in (actual, in_torch))
    limits = {name: max(LIMITS[case.dtype], _TORCH_FACTOR * error) for name, error in torch_errors.items()}
    problems = exceeded(errors, limits)
    return [
        Row(
            what=f"window {backend}",
            status="failed" if problems else "ok",
            reason="; ".join(problems),
            config=asdict(case) | {"backend": backend},
            metrics={
                "errors": errors,
                "limits": limits,
                "torch_errors": torch_errors,
                "worst": max(errors[name] / limits[name] for name in errors),
            },
        )
    ]


def _draw(case: WindowCase, seed: int, device: torch.device) -> Named:
    generator = torch.Generator().manual_seed(seed)
    queries = case.tokens if case.queries is None else case.queries
    shapes = {
        "q": (2, queries, case.kv_heads * case.groups, case.head_dim),
        "k": (2, case.tokens, case.kv_heads, case.head_dim),
        "v": (2, case.tokens, case.kv_heads, case.head_dim),
    }
    dtype = DTYPES[case.dtype]
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


def _evaluate(case: WindowCase, tensors: Named, backend: WindowBackend) -> Named:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    device = leaves["q"].device
    documents = None
    if case.packed:
        documents = (torch.arange(case.tokens, device=device) * 3 // case.tokens).expand(2, -1)
    valid = None
    if case.padded:
        valid = torch.arange(case.tokens, device=device).expand(2, -1) % 11 != 5
    result = window_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        window=case.window,
        sinks=case.sinks,
        documents=documents,
        valid=valid,
        backend=backend,
    )
    outputs: dict[str, Tensor] = {"out": result.out, "log_normaliser": result.log_normaliser}
    generator = torch.Generator().manual_seed(1)
    cotangents = []
    for name, output in outputs.items():
        # Rounded as in the dtype under test, for the reference too.
        dtype = DTYPES[case.dtype] if name == "out" else torch.float32
        cotangents.append(torch.randn(output.shape, generator=generator).to(dtype).to(output.device, output.dtype))
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), cotangents)
    outputs |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in outputs.items()}
