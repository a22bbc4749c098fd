"""Comparing the op with its float64 definition: outputs, states and every gradient, in one number each."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.cases import Case, Session
from benchmarks.suite.op_cases import BF16, FP16, FP32, OpCase, op_cases
from benchmarks.suite.op_inputs import OpInputs, draw_inputs
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import Settings
from subquad.kernels import poly_attention

# Relative RMS. The second number is for sums over many pairs in which large terms cancel (decay, key weight,
# coefficients, initial state); a larger error is allowed up to twice that of the PyTorch form on the same inputs.
LIMITS = {BF16: (5e-3, 1e-2), FP16: (2e-3, 4e-3), FP32: (2e-5, 4e-5)}
_TIGHT = ("out", "normaliser", "state.values", "state.normaliser", "d q", "d k", "d v")
# Gradients by way of a weight (`d k` stands for `d key_weight` too).
_BY_WEIGHT = ("d q", "d k", "d coefs")
_WEAK_SPOT_FACTOR = 10.0
_TORCH_FACTOR = 2.0
_CASE_SECONDS = 60.0
# A gradient smaller than this share of its natural size has vanished by cancellation.
_VANISHED = 1e-3
_TINY = 1e-30

Named = dict[str, Tensor]


def correctness_cases(settings: Settings) -> list[Case]:
    """Return one case per entry of the table.

    Args:
        settings: The run's settings.

    Returns:
        The cases.
    """
    # The slow ones first, so that they do not end alone; then those that a quick run has, lest time be short.
    cases = sorted(
        op_cases(toy=settings.toy, quick=settings.mode == "quick"), key=lambda case: (not case.long, not case.quick)
    )
    return [Case("correctness", case.name, functools.partial(check_op, case), limit_s=_CASE_SECONDS) for case in cases]


def check_op(case: OpCase, session: Session) -> list[Row]:
    """Run a case in float64, in PyTorch and in the backend under test.

    Args:
        case: The case.
        session: Settings and device.

    Returns:
        One row: errors, limits, PyTorch's errors, and whether two runs gave the same bits.
    """
    settings, device = session.settings, session.hardware.device
    inputs = draw_inputs(case, settings.seed, device)
    exact = inputs.mapped(lambda tensor: tensor.double())
    expected = evaluate(case, exact, reference_options(case), None)
    cotangents = draw_cotangents(case, expected, settings.seed) if case.gradients else None
    sizes: dict[str, float] = {}
    if cotangents is not None:
        sizes = natural_sizes(expected, cotangents, exact.tensors())
        expected = evaluate(case, exact, reference_options(case), cotangents)
    options = options_for(case, settings.backend)
    with poisoned_memory():
        actual = evaluate(case, inputs, options, cotangents)
        again = evaluate(case, inputs, options, cotangents)
    torch_options = options_for(case, "torch") | {"precision": "default"}
    in_torch = evaluate(case, inputs, torch_options, cotangents)
    errors, torch_errors = (relative_errors(found, expected, sizes, case.few_keys) for found in (actual, in_torch))
    limits = limits_for(case, torch_errors)
    differing = [name for name in actual if not torch.equal(actual[name], again[name])]
    problems = exceeded(errors, limits)
    problems += [f"{name}: two runs differ" for name in differing]
    return [
        Row(
            what=settings.backend,
            status="failed" if problems else "ok",
            reason="; ".join(problems),
            config=asdict(case) | {"backend": settings.backend},
            metrics={
                "errors": errors,
                "limits": limits,
                "torch_errors": torch_errors,
                "worst": max(errors[name] / limits[name] for name in errors),
                "deterministic": not differing,
            },
        )
    ]


def options_for(case: OpCase, backend: str) -> dict[str, Any]:
    """Return the op's options for a case."""
    if case.whole:
        return {"form": "chunked", "chunk_size": case.tokens, "backend": backend, "precision": case.precision}
    form = "auto" if case.chunk_size is None else "chunked"
    return {"form": form, "chunk_size": case.chunk_size, "backend": backend, "precision": case.precision}


def reference_options(case: OpCase) -> dict[str, Any]:
    """Return the options of the definition, or of the chunked form where the definition does not fit in memory."""
    return {"form": "chunked" if case.long else "quadratic", "backend": "torch"}


def evaluate(case: OpCase, inputs: OpInputs, options: Mapping[str, Any], cotangents: Named | None) -> Named:
    """Call the op.

    Args:
        case: What to call it with besides tensors.
        inputs: The tensors.
        options: `form`, `chunk_size`, `backend`, `precision`.
        cotangents: Gradients of the outputs by name, in any dtype; None computes no gradients.

    Returns:
        `out`, `normaliser` and the final state, then `d <input>` for every input tensor, zeros where it has none.
    """
    inputs = inputs.mapped(lambda tensor: tensor.detach().requires_grad_(cotangents is not None))
    with torch.set_grad_enabled(cotangents is not None):
        result = poly_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.log_decay,
            coefs=inputs.coefs,
            key_weight=inputs.key_weight,
            normalize=case.normalize,
            initial_state=inputs.state,
            output_final_state=case.state,
            **options,
        )
    outputs = {"out": result.out, "normaliser": result.normaliser}
    if result.final_state is not None:
        outputs |= {"state.values": result.final_state.values, "state.normaliser": result.final_state.normaliser}
    if cotangents is None:
        return outputs
    named = inputs.tensors()
    grads = torch.autograd.grad(
        list(outputs.values()),
        list(named.values()),
        [cotangents[name].to(output.dtype) for name, output in outputs.items()],
        allow_unused=True,
    )
    for (name, tensor), grad in zip(named.items(), grads, strict=True):
        outputs[f"d {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return {name: tensor.detach() for name, tensor in outputs.items()}


def draw_cotangents(case: OpCase, expected: Named, seed: int) -> Named:
    """Draw a gradient for every output, so scaled that each has about the same share in the inputs' gradients.

    Args:
        case: The case; its dtype rounds the gradient of `out`, for the reference too.
        expected: The outputs.
        seed: Seed.

    Returns:
        float64 tensors by name. With `normalize`, the sum of weights is no part of a model's output: zeros.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    share = math.sqrt(expected["out"].numel())
    dtype = getattr(torch, case.dtype) if case.normalize else torch.float32
    cotangents = {}
    for name, output in expected.items():
        draw = torch.randn(output.shape, generator=generator).to(output.device)
        scale = share / (math.sqrt(output.numel()) * max(_rms(output), _TINY))
        draw = draw * scale if not (case.normalize and name == "normaliser") else torch.zeros_like(draw)
        cotangents[name] = draw.to(dtype if name == "out" else torch.float32).double()
    return cotangents


def natural_sizes(outputs: Named, cotangents: Named, inputs: Named) -> dict[str, float]:
    """Return the RMS that each gradient would have if nothing cancelled.

    An input x of an output y of degree about 1 has `<dx, x> = <dy, y>`, of size `|dy| rms(y)` for a random dy. A log
    decay counts as a factor of size 1.

    Args:
        outputs: Outputs by name.
        cotangents: Their gradients.
        inputs: Inputs by name.

    Returns:
        Sizes by `d <input>`.
    """
    total = math.sqrt(sum((cotangents[name].norm().item() * _rms(outputs[name])) ** 2 for name in cotangents))
    sizes = {}
    for name, tensor in inputs.items():
        size = 1.0 if name == "log_decay" else _rms(tensor)
        sizes[f"d {name}"] = total / (math.sqrt(tensor.numel()) * max(size, _TINY))
    return sizes


def relative_errors(
    actual: Named, expected: Named, sizes: Mapping[str, float], few_keys: bool = False
) -> dict[str, float]:
    """Return the relative RMS error of every result in float64; NaN counts as infinite.

    Args:
        actual: Results by name.
        expected: The right ones.
        sizes: Natural sizes of some of them. A result below a thousandth of its natural size has cancelled; its error
            is measured against that size.
        few_keys: Whether that holds, whatever their size, for the gradients by way of a weight: a query that sees one
            key has none, and in half precision the rounding of what cancels is what remains.

    Returns:
        Errors by name.
    """
    errors = {}
    for name, right in expected.items():
        size, natural = _rms(right), sizes.get(name, 0.0)
        if size < _VANISHED * natural or (few_keys and name.startswith(_BY_WEIGHT)):
            size = max(size, natural)
        error = _rms(actual[name].double() - right) / max(size, _TINY)
        errors[name] = error if error == error else math.inf
    return errors


def limits_for(case: OpCase, torch_errors: Mapping[str, float]) -> dict[str, float]:
    """Return the largest error allowed per result."""
    tight, loose = LIMITS[case.dtype]
    factor = _WEAK_SPOT_FACTOR if case.weak_spot and case.precision == "default" and case.dtype != FP32 else 1.0
    return {
        name: max((tight if name in _TIGHT else loose) * factor, _TORCH_FACTOR * error)
        for name, error in torch_errors.items()
    }


def exceeded(errors: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """Return one phrase per error that is above its limit (or not a number)."""
    return [f"{name}: {error:.1e} > {limits[name]:.1e}" for name, error in errors.items() if not error <= limits[name]]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every new tensor with NaN inside the block, so that an element that no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # a module with a property, which type checkers do not know
    fill = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # The switch comes with warnings about operations that are not deterministic; they are not what is tested.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            deterministic.fill_uninitialized_memory = fill


def _rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
