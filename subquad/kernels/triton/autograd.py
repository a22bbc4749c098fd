"""The kernels as PyTorch operators: `torch.compile` sees two opaque ops with known shapes, autograd one derivative.

`triton_attention` is what `poly_attention` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.backend import Precision
from subquad.kernels.state import PolyState, num_rows, product_rows_within
from subquad.kernels.triton.attention import make_problem, run_backward, run_forward
from subquad.kernels.triton.decode import MAX_QUERIES, MAX_TOKENS, decode
from subquad.kernels.triton.problem import Carry, Outputs
from subquad.kernels.triton.tuning import default_chunk_size, switch_len

_WIDTH_STEP = 16


@torch.library.custom_op("subquad::poly_forward", mutates_args=())
def _poly_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    coefs: Tensor,
    log_decay: Tensor | None,
    initial_values: Tensor | None,
    initial_normaliser: Tensor | None,
    orders: Sequence[int],
    scale: float,
    chunk_size: int,
    precision: str,
    normalize: bool,
    output_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(q):
        problem = make_problem(q, k, v, weight, log_decay, coefs, tuple(orders), scale, chunk_size, _checked(precision))
        initial = _carry(initial_values, initial_normaliser)
        outputs, final = run_forward(problem, normalize, initial, output_final)
    if final is None:
        final = Carry(weight.new_empty(0), weight.new_empty(0))
    return outputs.out, outputs.normaliser, outputs.safe, final.values, final.normaliser


@_poly_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    coefs: Tensor,
    log_decay: Tensor | None,
    initial_values: Tensor | None,
    initial_normaliser: Tensor | None,
    orders: Sequence[int],
    scale: float,
    chunk_size: int,
    precision: str,
    normalize: bool,
    output_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = num_rows(k.shape[3], tuple(orders))
    states = k.shape[0] * k.shape[2]
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=q.dtype if normalize else torch.float32)
    return (
        out,
        weight.new_empty(q.shape[:3]),
        weight.new_empty(q.shape[:3] if normalize else (0,)),
        weight.new_empty((states, rows, v.shape[3]) if output_final else (0,)),
        weight.new_empty((states, rows) if output_final else (0,)),
    )


@torch.library.custom_op("subquad::poly_backward", mutates_args=())
def _poly_backward(
    d_out: Tensor,
    d_normaliser: Tensor | None,
    d_final_values: Tensor | None,
    d_final_normaliser: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    coefs: Tensor,
    log_decay: Tensor | None,
    initial_values: Tensor | None,
    initial_normaliser: Tensor | None,
    out: Tensor | None,
    normaliser: Tensor,
    safe: Tensor,
    orders: Sequence[int],
    scale: float,
    chunk_size: int,
    precision: str,
    needs_coefs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if d_normaliser is not None:
        d_normaliser = d_normaliser.contiguous()
    with torch.cuda.device_of(q):
        problem = make_problem(q, k, v, weight, log_decay, coefs, tuple(orders), scale, chunk_size, _checked(precision))
        outputs = Outputs(d_out if out is None else out, normaliser, safe, normalize=out is not None)
        initial, d_final = _carry(initial_values, initial_normaliser), _carry(d_final_values, d_final_normaliser)
        grads, d_initial = run_backward(
            problem, outputs, initial, d_out.contiguous(), d_normaliser, d_final, needs_coefs
        )
    nothing = [weight.new_empty(0) for _ in range(4)]
    return (
        grads.q,
        grads.k,
        grads.v,
        grads.weight,
        nothing[0] if grads.coefs is None else grads.coefs,
        nothing[1] if grads.log_decay is None else grads.log_decay,
        nothing[2] if d_initial is None else d_initial.values,
        nothing[3] if d_initial is None else d_initial.normaliser,
    )


@_poly_backward.register_fake
def _(
    d_out: Tensor,
    d_normaliser: Tensor | None,
    d_final_values: Tensor | None,
    d_final_normaliser: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    coefs: Tensor,
    log_decay: Tensor | None,
    initial_values: Tensor | None,
    initial_normaliser: Tensor | None,
    out: Tensor | None,
    normaliser: Tensor,
    safe: Tensor,
    orders: Sequence[int],
    scale: float,
    chunk_size: int,
    precision: str,
    needs_coefs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(x: Tensor | None) -> Tensor:
        return weight.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)

    return (
        like(q),
        like(k),
        like(v),
        like(weight),
        like(coefs if needs_coefs else None),
        like(log_decay),
        like(initial_values),
        like(initial_normaliser),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, orders, scale, chunk_size, precision, normalize, _ = inputs
    out, normaliser, safe, _, _ = output
    ctx.save_for_backward(*tensors, out if normalize else None, normaliser, safe)
    ctx.static = (orders, scale, chunk_size, precision)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,
    d_out: Tensor | None,
    d_normaliser: Tensor | None,
    _: Tensor | None,
    d_final_values: Tensor | None,
    d_final_normaliser: Tensor | None,
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    q, v = saved[0], saved[2]
    if d_out is None:
        d_out = q.new_zeros(*q.shape[:3], v.shape[3])
    if d_final_values is not None or d_final_normaliser is not None:
        rows = num_rows(q.shape[3], tuple(ctx.static[0]))
        shape = (q.shape[0] * v.shape[2], rows)
        if d_final_values is None:
            d_final_values = d_out.new_zeros(*shape, v.shape[3], dtype=torch.float32)
        if d_final_normaliser is None:
            d_final_normaliser = d_out.new_zeros(shape, dtype=torch.float32)
    needs_coefs = ctx.needs_input_grad[4]
    found = _poly_backward(
        d_out, d_normaliser, d_final_values, d_final_normaliser, *saved, *ctx.static, needs_coefs=needs_coefs
    )
    present = (True, True, True, True, needs_coefs, *(saved[i] is not None for i in (5, 6, 7)))
    grads = [grad if there else None for grad, there in zip(found, present, strict=True)]
    return (*grads, None, None, None, None, None, None)


_poly_forward.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("subquad::poly_decode", mutates_args=())
def _poly_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    coefs: Tensor,
    log_decay: Tensor | None,
    values: Tensor,
    normaliser: Tensor,
    orders: Sequence[int],
    scale: float,
    normalize: bool,
    output_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, weight = (x.contiguous() for x in (q, k, v, weight))
    state = Carry(values.contiguous(), normaliser.contiguous())
    with torch.cuda.device_of(q):
        outputs, final = decode(q, k, v, weight, log_decay, coefs, tuple(orders), scale, state, normalize, output_final)
    if final is None:
        final = Carry(weight.new_empty(0), weight.new_empty(0))
    return outputs.out, outputs.normaliser, final.values, final.normaliser


@_poly_decode.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    coefs: Tensor,
    log_decay: Tensor | None,
    values: Tensor,
    normaliser: Tensor,
    orders: Sequence[int],
    scale: float,
    normalize: bool,
    output_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=q.dtype if normalize else torch.float32)
    return (
        out,
        weight.new_empty(q.shape[:3]),
        weight.new_empty(values.shape if output_final else (0,)),
        weight.new_empty(normaliser.shape if output_final else (0,)),
    )


def _checked(precision: str) -> Precision:
    return "high" if precision == "high" else "default"


def _carry(values: Tensor | None, normaliser: Tensor | None) -> Carry | None:
    if values is None or normaliser is None:
        return None
    return Carry(values.contiguous(), normaliser.contiguous())


def _decodes(tensors: tuple[Tensor | None, ...], seq_len: int, num_queries: int) -> bool:
    """Return whether the decode kernels apply: a state, few tokens, no gradient."""
    if tensors[6] is None or seq_len > MAX_TOKENS or num_queries > MAX_QUERIES:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor | None,
    coefs: Tensor,
    orders: tuple[int, ...],
    *,
    scale: float,
    normalize: bool,
    state: PolyState | None,
    output_final_state: bool,
    chunk_size: int | None,
    one_chunk: bool,
    precision: Precision,
) -> tuple[Tensor, Tensor, PolyState | None]:
    """Run the op on the kernels (differentiable once; deterministic).

    Args:
        q: `[B, Tq, H, d]`, the last Tq positions of k.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, e]`, multiplied by the key weight.
        weight: `[B, T, Hkv]` float32, the key weight.
        log_decay: `[B, T, Hkv]` float32, finite (a reset is a decay too small for float32), or None.
        coefs: `[3, H]` float32, 0 for powers that are not there.
        orders: The powers that have state rows, at most 2.
        scale: Factor on q . k.
        normalize: Whether to divide by the sum of weights, guarded as in `normalise.py`.
        state: The state before the first key, float32, or None.
        output_final_state: Whether to return the state after the last key.
        chunk_size: Tokens per chunk, rounded up to whole tiles; None takes the table's.
        one_chunk: Whether to take one chunk over all tokens where that needs fewer operations.
        precision: `default` or `high`, see `problem.operands_for`.

    Returns:
        The output (q's dtype; without `normalize` the numerator in float32), the sum of weights `[B, Tq, H]` and the
        final state.
    """
    head_dim, shape = k.shape[3], (k.shape[0], k.shape[2])
    groups, seq_len = q.shape[2] // k.shape[2], k.shape[1]
    chunk_size = chunk_size or default_chunk_size(head_dim, groups)
    if one_chunk and state is None and not output_final_state and seq_len <= switch_len(head_dim, groups, orders):
        chunk_size = seq_len
    padding = -head_dim % _WIDTH_STEP
    kept = None
    if padding:
        q, k = (torch.nn.functional.pad(x, (0, padding)) for x in (q, k))
        kept = product_rows_within(head_dim, head_dim + padding, orders, k.device)
    rows = num_rows(k.shape[3], orders)
    values = normaliser = None
    if state is not None:
        values, normaliser = (x.flatten(0, 1).float() for x in state)
        if kept is not None:
            values = values.new_zeros(values.shape[0], rows, values.shape[2]).index_copy(1, kept, values)
            normaliser = normaliser.new_zeros(normaliser.shape[0], rows).index_copy(1, kept, normaliser)
    tensors = (q, k, v, weight, coefs, log_decay, values, normaliser)
    if _decodes(tensors, seq_len, q.shape[1] * groups):
        out, total, final_values, final_normaliser = _poly_decode(
            *tensors, list(orders), scale, normalize, output_final_state
        )
    else:
        out, total, _, final_values, final_normaliser = _poly_forward(
            *tensors, list(orders), scale, chunk_size, precision, normalize, output_final_state
        )
    if not output_final_state:
        return out, total, None
    if kept is not None:
        final_values, final_normaliser = final_values[:, kept], final_normaliser[:, kept]
    return out, total, PolyState(final_values.unflatten(0, shape), final_normaliser.unflatten(0, shape))
