"""What bounds the sum of weights from its even powers: two decayed sums per key/value head, whatever the queries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.primitives import RUNTIME_SIZES, causal_factor, decay_factor, trace_symmetric
from subquad.kernels.triton.problem import Segment, States, padded


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def even_sums_kernel(
    p_weight,
    p_squares,
    p_high,
    p_low,
    p_rest,
    p_even,
    T,
    start,
    stop,
    chunk_size,
    num_chunks,
    decay_len,
    HKV: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    DECAY: tl.constexpr,
    STATE: tl.constexpr,
):
    """Sum a chunk's key weights (power 0) and key weights times `|k|^2` (power 2) up to each token, with decay."""
    sequence = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    o_local = tl.arange(0, BT)
    p_even += sequence * 2 * num_chunks * chunk_size - start
    chunk_start = start + chunk * chunk_size
    constant = 0.0
    squares = 0.0
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        rows: tl.constexpr = rest + HAS2 * (d * (d + 1) // 2)
        p_norm = p_rest + (sequence * num_chunks + chunk) * (rest * e + rows) + rest * e
        if HAS0:
            constant += tl.load(p_norm)
        if HAS2:
            squares += trace_symmetric(p_norm + rest, d, BD)
    high_before = 0.0
    low_before = 0.0
    b_high = tl.zeros([BT], dtype=tl.float32)
    b_low = tl.zeros([BT], dtype=tl.float32)
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
    for t in range(chunk_start, tl.minimum(chunk_start + chunk_size, stop), BT):
        o_t = t + o_local
        m_t = o_t < stop
        o_row = ((sequence // HKV) * T + o_t) * HKV + sequence % HKV
        if DECAY:
            b_high = tl.load(p_high + o_t)
            b_low = tl.load(p_low + o_t)
        b_before = decay_factor(b_high, b_low, high_before, low_before)
        b_decay = causal_factor(
            o_local[:, None], b_high[:, None], b_low[:, None], o_local[None, :], b_high[None, :], b_low[None, :], DECAY
        )
        if HAS0:
            b_weight = tl.load(p_weight + o_row, mask=m_t, other=0.0)
            b_sum = tl.sum(b_decay * b_weight[None, :], 1) + constant * b_before
            constant = tl.sum(tl.where(o_local == BT - 1, b_sum, 0.0), 0)
            tl.store(p_even + o_t, b_sum)
        if HAS2:
            b_square = tl.load(p_squares + o_row, mask=m_t, other=0.0)
            b_sum = tl.sum(b_decay * b_square[None, :], 1) + squares * b_before
            squares = tl.sum(tl.where(o_local == BT - 1, b_sum, 0.0), 0)
            tl.store(p_even + num_chunks * chunk_size + o_t, b_sum)
        if DECAY:
            high_before = tl.load(p_high + t + BT - 1)
            low_before = tl.load(p_low + t + BT - 1)


def even_sums(segment: Segment, states: States | None) -> Tensor | None:
    """Return `[B * Hkv, 2, padded]` float32: the decayed sums of the key weights and of the key weights times `|k|^2`.

    Args:
        segment: The tokens.
        states: The states before its chunks, or None.

    Returns:
        The sums, undefined for powers that are not there; None without an even power.
    """
    problem = segment.problem
    if not {0, 2}.intersection(problem.orders):
        return None
    even = segment.workspace(2, segment.padded_len, dtype=problem.weight.dtype)
    arguments = segment.arguments() | {
        "p_weight": problem.weight,
        "p_squares": problem.squares if 2 in problem.orders else None,
        "p_rest": None if states is None else states.rest,
        "p_even": even,
        "BT": problem.tiles.prepare.rows,
        "BD": padded(problem.k.shape[3]),
        "STATE": states is not None,
    }
    run(Launch(even_sums_kernel, (problem.num_states, segment.num_chunks), arguments, 4, 1))
    return even
