"""The order of the kernels: forward and backward over segments of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.backend import Precision
from subquad.kernels.state import num_rows
from subquad.kernels.triton.backward import KeyGradients, backward_segment
from subquad.kernels.triton.forward import attend
from subquad.kernels.triton.prepare import cumulated_decay, prepare_gradients, prepare_keys
from subquad.kernels.triton.problem import Carry, Outputs, Problem, Segment, operands_for
from subquad.kernels.triton.states import gradients_after_chunks, states_before_chunks
from subquad.kernels.triton.tuning import Tiles, tiles_on

# Long sequences are walked in segments, so that the states of all chunks never exist at once.
WORKSPACE_BYTES = 768 * 2**20


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor | None,
    coefs: Tensor,
    orders: tuple[int, ...],
    scale: float,
    chunk_size: int,
    precision: Precision,
    tiles: Tiles | None = None,
) -> Problem:
    """Lay a call out for the kernels; `chunk_size` is rounded up to whole tiles, of the table unless given."""
    operands = operands_for(v.dtype, precision)
    tiles = tiles or tiles_on(q.device, max(k.shape[3], v.shape[3]), max(orders), operands.dtype.itemsize)
    widest = max(tiles.forward.rows, tiles.dq.rows, tiles.dk.rows, tiles.dv.rows, tiles.scan.tokens)
    widest = max(widest, tiles.prepare.rows, *(tile.inner for tile in (tiles.forward, tiles.dq, tiles.dk, tiles.dv)))
    chunk_size = -(-chunk_size // widest) * widest
    high, low = (None, None) if log_decay is None else cumulated_decay(log_decay, chunk_size)
    return Problem(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        weight=weight.contiguous(),
        high=high,
        low=low,
        coefs=coefs.contiguous(),
        orders=orders,
        scale=scale,
        chunk_size=chunk_size,
        operands=operands,
        tiles=tiles,
    )


def segments(problem: Problem) -> list[Segment]:
    """Cut the sequence so that a segment's workspaces, backward's included, stay within `WORKSPACE_BYTES`."""
    width, value_width = problem.k.shape[3], problem.v.shape[3]
    itemsize = problem.operands.dtype.itemsize
    rest = num_rows(width, tuple(order for order in problem.orders if order < 2)) * value_width + problem.num_rows
    products = num_rows(width, (2,)) * value_width if 2 in problem.orders else 0
    per_chunk = 2 * (products * itemsize + 4 * rest)
    per_token = itemsize * (width + value_width) + problem.num_groups * (itemsize * (width + 2 * value_width) + 40)
    per_sequence = per_chunk + per_token * problem.chunk_size
    chunks = max(WORKSPACE_BYTES // (per_sequence * problem.num_states), 1)
    step = chunks * problem.chunk_size
    return [Segment(problem, start, min(start + step, problem.seq_len)) for start in range(0, problem.seq_len, step)]


def run_forward(
    problem: Problem, normalize: bool, initial: Carry | None, output_final: bool
) -> tuple[Outputs, Carry | None]:
    """Run the forward kernels.

    Args:
        problem: The call.
        normalize: Whether to divide by the sum of weights.
        initial: The state before the first key, or None.
        output_final: Whether to return the state after the last key.

    Returns:
        The outputs and, if asked for, the final state.
    """
    shape = (*problem.q.shape[:3], problem.v.shape[3])
    outputs = Outputs(
        out=problem.q.new_empty(shape, dtype=problem.q.dtype if normalize else torch.float32),
        normaliser=problem.weight.new_empty(shape[:3]),
        safe=problem.weight.new_empty(shape[:3] if normalize else (0,)),
        normalize=normalize,
    )
    parts = segments(problem)
    carry = initial
    for segment in parts:
        # One chunk without a past reads no state.
        reads = carry is not None or segment.num_chunks > 1
        needs_final = output_final or segment is not parts[-1]
        states = None
        if reads or needs_final:
            states, carry = states_before_chunks(segment, prepare_keys(segment), carry, needs_final)
        attend(segment, states if reads else None, outputs)
    return outputs, carry if output_final else None


def _starts(parts: list[Segment], initial: Carry | None) -> list[Carry | None]:
    """Return the state before every segment."""
    starts = [initial]
    for segment in parts[:-1]:
        starts.append(states_before_chunks(segment, prepare_keys(segment), starts[-1], output_final=True)[1])
    return starts


def run_backward(
    problem: Problem,
    outputs: Outputs,
    initial: Carry | None,
    d_out: Tensor,
    d_normaliser: Tensor | None,
    d_final: Carry | None,
    needs_coefs: bool,
) -> tuple[KeyGradients, Carry | None]:
    """Run the backward kernels, last segment first.

    Args:
        problem: The call.
        outputs: What forward wrote.
        initial: The state before the first key, or None.
        d_out: `[B, Tq, H, e]`, gradient of the output.
        d_normaliser: `[B, Tq, H]`, gradient of the sum of weights, or None.
        d_final: Gradient of the state after the last key, or None.
        needs_coefs: Whether the gradient of the coefficients is needed.

    Returns:
        The gradients of the inputs, and of the initial state where there is one.
    """
    grads = KeyGradients(
        q=torch.empty_like(problem.q),
        k=torch.empty_like(problem.k),
        v=torch.empty_like(problem.v),
        weight=torch.empty_like(problem.weight),
        log_decay=None if problem.high is None else torch.empty_like(problem.weight),
        coefs=torch.zeros_like(problem.coefs) if needs_coefs else None,
    )
    d_carry = d_final
    parts = segments(problem)
    for segment, start in reversed(list(zip(parts, _starts(parts, initial), strict=True))):
        reads = start is not None or segment.num_chunks > 1
        states = state_gradients = inner = None
        d_before = None
        scan = 2 in problem.orders and (reads or d_carry is not None)
        queries = prepare_gradients(segment, outputs, d_out, d_normaliser, scan)
        if reads or d_carry is not None:
            keys = prepare_keys(segment)
            states, _ = states_before_chunks(segment, keys, start, output_final=False)
            state_gradients, inner, d_before = gradients_after_chunks(
                segment, queries, states, keys.total, d_carry, output_initial=start is not None
            )
        backward_segment(segment, queries, states if reads else None, state_gradients, inner, grads)
        d_carry = d_before
    return grads, d_carry
