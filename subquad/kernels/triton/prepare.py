"""Workspaces of a segment, padded to whole chunks: transposed copies and factors that every later pass would redo."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.primitives import RUNTIME_SIZES, decay_factor, load_tile, store_tile
from subquad.kernels.triton.problem import Outputs, Segment

_LOG2_E = 1.4426950408889634


class ScanInput(NamedTuple):
    """What the scan of product states reads: `S <- decay * S + sum_t phi(x_t) y_t^T`; zeros beyond the end.

    Attributes:
        xt: `[heads, d, padded]`, transposed.
        y: `[heads, padded, e]`, with all factors.
    """

    xt: Tensor
    y: Tensor


class KeyWorkspace(NamedTuple):
    """Keys and values as the states read them.

    Attributes:
        scan: Keys, and values decayed to the end of the chunk, per key/value head; None without power 2.
        total: `[B * Hkv, chunks]` float32, the decay over each chunk.
    """

    scan: ScanInput | None
    total: Tensor


class QueryGradients(NamedTuple):
    """Gradients of what the queries read, zeros where there is no query.

    Attributes:
        gradient: `[B * H, padded, e]`, of the numerator.
        normaliser_gradient: `[B * H, padded]` float32, of the sum of weights.
        scan: Queries, and `gradient` times coefficient, squared scale and decay from the chunk's start, per query head;
            None where no scan of power 2 follows.
    """

    gradient: Tensor
    normaliser_gradient: Tensor
    scan: ScanInput | None


def cumulated_decay(log_decay: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Sum log decays from the start of each chunk, in float64, and split the sums in two float32.

    Args:
        log_decay: `[B, T, Hkv]`, finite.
        chunk_size: Tokens per chunk.

    Returns:
        Coarse and fine part of log2 of the decay, `[B * Hkv, padded T]`; the tokens beyond the end decay nothing.
    """
    per_head = log_decay.double().transpose(1, 2).flatten(0, 1)
    padding = -per_head.shape[1] % chunk_size
    per_head = torch.nn.functional.pad(per_head, (0, padding)).unflatten(1, (-1, chunk_size))
    total = (per_head.cumsum(-1) * _LOG2_E).flatten(1)
    high = total.float()
    return high, (total - high).float()


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def prepare_keys_kernel(
    p_k,
    p_v,
    p_high,
    p_low,
    p_keys_t,
    p_values,
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
    BE: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Transpose a tile of keys and decay its values to the end of the chunk."""
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    first = start + tile * BT
    o_t = first + tl.arange(0, BT)
    m_t = o_t < stop
    row = (sequence // HKV * T + first) * HKV + sequence % HKV
    b_k = load_tile(p_k + row * d, HKV * d, m_t, BT, d, BD)
    b_v = load_tile(p_v + row * e, HKV * e, m_t, BT, e, BE)
    if DECAY:
        last = start + (tile * BT // chunk_size + 1) * chunk_size - 1
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_edge = decay_factor(
            tl.load(p_high + last), tl.load(p_low + last), tl.load(p_high + o_t), tl.load(p_low + o_t)
        )
        b_v = b_v.to(tl.float32) * b_edge[:, None]
    padded_len = num_chunks * chunk_size
    o_d = tl.arange(0, BD)
    p_transposed = p_keys_t + sequence * d * padded_len + o_d[:, None] * padded_len
    b_kt = tl.trans(b_k).to(p_keys_t.dtype.element_ty)
    tl.store(p_transposed + (tile * BT + tl.arange(0, BT))[None, :], b_kt, mask=(o_d < d)[:, None])
    p_values += (sequence * padded_len + tile * BT) * e
    store_tile(p_values, e, b_v, o_t >= 0, BT, e, BE)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def prepare_gradients_kernel(
    p_q,
    p_out,
    p_normaliser,
    p_safe,
    p_d_out,
    p_d_normaliser,
    p_high,
    p_low,
    p_coefs,
    p_gradient,
    p_normaliser_gradient,
    p_queries_t,
    p_scaled,
    scale,
    T,
    TQ,
    start,
    stop,
    chunk_size,
    num_chunks,
    decay_len,
    HKV: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    SCAN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NORMALISER: tl.constexpr,
):
    """Take the gradients of a tile of outputs back through the division, and prepare them for the reverse scan."""
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_heads = HKV * G
    batch = sequence // num_heads
    head = sequence % num_heads
    state = batch * HKV + head // G
    ahead = T - TQ
    first = start + tile * BT
    o_t = first + tl.arange(0, BT)
    m_t = (o_t >= ahead) & (o_t < stop)
    row = (batch * TQ + first - ahead) * num_heads + head
    o_row = row + tl.arange(0, BT) * num_heads
    b_g = load_tile(p_d_out + row * e, num_heads * e, m_t, BT, e, BE).to(tl.float32)
    b_g1 = tl.zeros([BT], dtype=tl.float32)
    if NORMALISER:
        b_g1 += tl.load(p_d_normaliser + o_row, mask=m_t, other=0.0)
    if NORMALIZE:
        b_safe = tl.load(p_safe + o_row, mask=m_t, other=1.0)
        b_norm = tl.load(p_normaliser + o_row, mask=m_t, other=1.0)
        b_out = load_tile(p_out + row * e, num_heads * e, m_t, BT, e, BE).to(tl.float32)
        b_g = b_g / b_safe[:, None]
        # Where the guard moved the sum of weights, the output does not depend on it.
        b_g1 -= tl.where(b_safe == b_norm, tl.sum(b_g * b_out, 1), 0.0)
    padded_len = num_chunks * chunk_size
    local = tile * BT
    m_all = o_t >= 0
    store_tile(p_gradient + (sequence * padded_len + local) * e, e, b_g, m_all, BT, e, BE)
    tl.store(p_normaliser_gradient + sequence * padded_len + local + tl.arange(0, BT), b_g1)
    if SCAN:
        b_factor = tl.load(p_coefs + 2 * num_heads + head) * scale * scale + tl.zeros([BT], dtype=tl.float32)
        if DECAY:
            b_high = tl.load(p_high + state * decay_len + o_t)
            b_low = tl.load(p_low + state * decay_len + o_t)
            b_factor *= decay_factor(b_high, b_low, 0.0, 0.0)
        p_scaled += (sequence * padded_len + local) * e
        store_tile(p_scaled, e, b_g * b_factor[:, None], m_all, BT, e, BE)
        b_q = load_tile(p_q + row * d, num_heads * d, m_t, BT, d, BD)
        o_d = tl.arange(0, BD)
        p_transposed = p_queries_t + sequence * d * padded_len + o_d[:, None] * padded_len
        b_qt = tl.trans(b_q).to(p_queries_t.dtype.element_ty)
        tl.store(p_transposed + (local + tl.arange(0, BT))[None, :], b_qt, mask=(o_d < d)[:, None])


def prepare_keys(segment: Segment) -> KeyWorkspace:
    """Make the workspace of a segment's keys and values."""
    problem, tile = segment.problem, segment.problem.tiles.prepare
    total = _chunk_totals(segment)
    if 2 not in problem.orders:
        return KeyWorkspace(None, total)
    keys_t = segment.workspace(problem.k.shape[3], segment.padded_len)
    values = segment.workspace(segment.padded_len, problem.v.shape[3])
    arguments = segment.arguments() | {
        "p_k": problem.k,
        "p_v": problem.v,
        "p_keys_t": keys_t,
        "p_values": values,
        "BT": tile.rows,
    }
    grid = (problem.num_states, segment.padded_len // tile.rows)
    run(Launch(prepare_keys_kernel, grid, arguments, tile.num_warps, tile.num_stages))
    return KeyWorkspace(ScanInput(keys_t, values), total)


def prepare_gradients(
    segment: Segment, outputs: Outputs, d_out: Tensor, d_normaliser: Tensor | None, scan: bool
) -> QueryGradients:
    """Make the workspace of a segment's queries for backward.

    Args:
        segment: The tokens.
        outputs: What forward wrote.
        d_out: `[B, Tq, H, e]`, gradient of the output.
        d_normaliser: `[B, Tq, H]` float32, gradient of the sum of weights, or None.
        scan: Whether a reverse scan of power 2 follows.

    Returns:
        The workspace.
    """
    problem, tile = segment.problem, segment.problem.tiles.prepare
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    gradient = segment.workspace(segment.padded_len, value_dim, heads="q")
    normaliser_gradient = segment.workspace(segment.padded_len, heads="q", dtype=torch.float32)
    reverse = None
    if scan:
        queries_t = segment.workspace(head_dim, segment.padded_len, heads="q")
        reverse = ScanInput(queries_t, torch.empty_like(gradient))
    arguments = segment.arguments() | {
        "p_q": problem.q,
        "p_out": outputs.out,
        "p_normaliser": outputs.normaliser,
        "p_safe": outputs.safe,
        "p_d_out": d_out,
        "p_d_normaliser": d_normaliser,
        "p_coefs": problem.coefs,
        "p_gradient": gradient,
        "p_normaliser_gradient": normaliser_gradient,
        "p_queries_t": None if reverse is None else reverse.xt,
        "p_scaled": None if reverse is None else reverse.y,
        "scale": problem.scale,
        "TQ": problem.q.shape[1],
        "BT": tile.rows,
        "SCAN": scan,
        "NORMALIZE": outputs.normalize,
        "NORMALISER": d_normaliser is not None,
    }
    grid = (problem.num_states * problem.num_groups, segment.padded_len // tile.rows)
    run(Launch(prepare_gradients_kernel, grid, arguments, tile.num_warps, tile.num_stages))
    return QueryGradients(gradient, normaliser_gradient, reverse)


def _chunk_totals(segment: Segment) -> Tensor:
    """Return the decay over each chunk, `[B * Hkv, chunks]`."""
    problem = segment.problem
    if problem.high is None or problem.low is None:
        return problem.weight.new_ones(problem.num_states, segment.num_chunks)
    last = slice(segment.start + problem.chunk_size - 1, segment.start + segment.padded_len, problem.chunk_size)
    return torch.exp2((problem.high[:, last] + problem.low[:, last]).clamp(max=0.0))
