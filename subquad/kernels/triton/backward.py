"""The backward kernels: dq, dk and dv, each with its share of the gradient of the decay.

Every kernel redoes the scores of its chunk and reads the state (dq) or the state's gradient (dk, dv). The heads of a
group are summed inside a program, so nothing is added up by atomics and two runs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.prepare import QueryGradients
from subquad.kernels.triton.primitives import (
    contract_products,
    edge_factor,
    load_matrix,
    load_symmetric,
    load_tile,
    pair_factor,
    polynomial,
    polynomial_slope,
    query_products,
    store_tile,
)
from subquad.kernels.triton.problem import Problem, Segment, States

_SCALARS = ["T", "TQ", "start", "stop", "num_chunks", "num_tiles", "num_pairs", "first_reads", "HKV"]


@triton.jit(do_not_specialize=_SCALARS)
def dq_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_high,
    p_low,
    p_coefs,
    p_gradient,
    p_normaliser_gradient,
    p_products,
    p_rest,
    p_dq,
    p_inside,
    p_read,
    scale,
    T,
    TQ,
    start,
    stop,
    chunk_size,
    num_chunks,
    decay_len,
    num_tiles,
    first_reads,
    HKV,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ORDER: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    DECAY: tl.constexpr,
    STATE: tl.constexpr,
    READS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dq of one tile of one head.

    `p_inside` and `p_read` `[order + 1, B * H, padded]` receive, per query and power n, the gradient of coefficient n
    by way of the chunk's keys and by way of the state.
    """
    pid = tl.program_id(0)
    group = pid % G
    tile = (pid // G) % num_tiles
    sequence = (pid // G // num_tiles).to(tl.int64)
    batch = sequence // HKV
    kv_head = sequence % HKV
    head = kv_head * G + group
    num_heads = HKV * G
    ahead = T - TQ
    first = tl.maximum(start, ahead // BT * BT) + tile * BT
    chunk = (first - start) // chunk_size
    o_local = tl.arange(0, BT)
    o_t = first + o_local
    m_t = (o_t >= ahead) & (o_t < stop)
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    padded_len = num_chunks * chunk_size
    local_row = (sequence * G + group) * padded_len + first - start
    reads_stride = (tl.num_programs(0) // num_tiles).to(tl.int64) * padded_len
    p_q += ((batch * TQ + first - ahead) * num_heads + head) * d
    p_coefs += head
    b_high_t = tl.zeros([BT], dtype=tl.float32)
    b_low_t = tl.zeros([BT], dtype=tl.float32)
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high_t = tl.load(p_high + o_t)
        b_low_t = tl.load(p_low + o_t)
    b_q = load_tile(p_q, num_heads * d, m_t, BT, d, BD)
    b_q32 = b_q.to(tl.float32)
    b_q = b_q.to(OPERAND)
    b_g = load_tile(p_gradient + local_row * e, e, m_t, BT, e, BE)
    b_g1 = tl.load(p_normaliser_gradient + local_row + o_local)
    b_dq = tl.zeros([BT, BD], dtype=tl.float32)
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        products: tl.constexpr = HAS2 * (d * (d + 1) // 2)
        rows: tl.constexpr = rest + products
        p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
        p_norm = p_rest + rest * e
        b_from_start = tl.zeros([BT], dtype=tl.float32) + 1.0
        if DECAY:
            b_from_start = edge_factor(b_high_t, b_low_t)
        if HAS2:
            p_products += (sequence * num_chunks + chunk) * products * e
            columns = tl.where((chunk > 0) | (first_reads != 0), d, 0)
            b_dq = contract_products(p_q, num_heads * d, m_t, b_g, p_products, columns, d, e, BT, BD, BE, PRECISION)
            b_z = load_symmetric(p_norm + rest, d, BD)
            b_dq += tl.dot(b_q32, b_z, input_precision="tf32x3") * (2.0 * b_g1)[:, None]
            b_dq *= (b_from_start * (scale * scale))[:, None]
            if READS:
                p_row = p_read + 2 * reads_stride + local_row
                tl.store(p_row + o_local, 0.5 * tl.sum(b_dq * b_q32, 1))
            b_dq *= tl.load(p_coefs + 2 * num_heads)
        if HAS1:
            b_s = load_matrix(p_rest + HAS0 * e, d, e, BD, BE).to(OPERAND)
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            b_part = tl.dot(b_g, tl.trans(b_s), input_precision=PRECISION) + b_g1[:, None] * b_z1[None, :]
            b_part *= (b_from_start * scale)[:, None]
            if READS:
                tl.store(p_read + reads_stride + local_row + o_local, tl.sum(b_part * b_q32, 1))
            b_dq += b_part * tl.load(p_coefs + num_heads)
        if HAS0 and READS:
            b_s0 = tl.load(p_rest + o_e, mask=o_e < e, other=0.0)
            b_read = tl.sum(b_g.to(tl.float32) * b_s0[None, :], 1) + b_g1 * tl.load(p_norm)
            tl.store(p_read + local_row + o_local, b_read * b_from_start)
    b_inside0 = tl.zeros([BT], dtype=tl.float32)
    b_inside1 = tl.zeros([BT], dtype=tl.float32)
    b_inside2 = tl.zeros([BT], dtype=tl.float32)
    for s in range(start + chunk * chunk_size, tl.minimum(first + BT, stop), BS):
        o_s = s + tl.arange(0, BS)
        m_s = o_s < stop
        first_key = (batch * T + s) * HKV + kv_head
        b_k = load_tile(p_k + first_key * d, HKV * d, m_s, BS, d, BD).to(OPERAND)
        b_v = load_tile(p_v + first_key * e, HKV * e, m_s, BS, e, BE).to(OPERAND)
        b_weight = tl.load(p_weight + first_key + tl.arange(0, BS) * HKV, mask=m_s, other=0.0)
        b_high_s = b_weight
        b_low_s = b_weight
        if DECAY:
            b_high_s = tl.load(p_high + o_s)
            b_low_s = tl.load(p_low + o_s)
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        b_dw = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION) + b_g1[:, None] * b_weight[None, :]
        b_dw *= pair_factor(o_t, b_high_t, b_low_t, o_s, b_high_s, b_low_s, DECAY)
        if READS:
            if HAS0:
                b_inside0 += tl.sum(b_dw, 1)
            if HAS1:
                b_inside1 += tl.sum(b_dw * b_x, 1)
            if HAS2:
                b_inside2 += tl.sum(b_dw * b_x * b_x, 1)
        b_dx = b_dw * polynomial_slope(b_x, p_coefs, num_heads, ORDER) * scale
        b_dq = tl.dot(b_dx.to(OPERAND), b_k, b_dq, input_precision=PRECISION)
    if READS:
        if HAS0:
            tl.store(p_inside + local_row + o_local, b_inside0)
        if HAS1:
            tl.store(p_inside + reads_stride + local_row + o_local, b_inside1)
        if HAS2:
            tl.store(p_inside + 2 * reads_stride + local_row + o_local, b_inside2)
    store_tile(p_dq + ((batch * TQ + first - ahead) * num_heads + head) * d, num_heads * d, b_dq, m_t, BT, d, BD)


@triton.jit(do_not_specialize=_SCALARS)
def dk_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_high,
    p_low,
    p_coefs,
    p_gradient,
    p_normaliser_gradient,
    p_products,
    p_rest,
    p_dk,
    p_inside,
    scale,
    T,
    TQ,
    start,
    stop,
    chunk_size,
    num_chunks,
    decay_len,
    num_tiles,
    first_reads,
    HKV,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ORDER: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    DECAY: tl.constexpr,
    STATE: tl.constexpr,
    READS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dk of one tile of keys; `p_products` and `p_rest` hold the gradients of the states after the chunks.

    `p_inside` `[B * Hkv, padded]` receives `sum_t w_ts dw_ts` over the queries of the chunk.
    """
    pid = tl.program_id(0)
    tile = pid % num_tiles
    sequence = (pid // num_tiles).to(tl.int64)
    batch = sequence // HKV
    kv_head = sequence % HKV
    num_heads = HKV * G
    ahead = T - TQ
    first = start + tile * BT
    chunk = (tile * BT) // chunk_size
    o_local = tl.arange(0, BT)
    o_s = first + o_local
    m_s = o_s < stop
    o_d = tl.arange(0, BD)
    padded_len = num_chunks * chunk_size
    first_key = (batch * T + first) * HKV + kv_head
    p_k += first_key * d
    b_k = load_tile(p_k, HKV * d, m_s, BT, d, BD)
    b_k32 = b_k.to(tl.float32)
    b_k = b_k.to(OPERAND)
    b_v = load_tile(p_v + first_key * e, HKV * e, m_s, BT, e, BE).to(OPERAND)
    b_weight = tl.load(p_weight + first_key + o_local * HKV, mask=m_s, other=0.0)
    b_high_s = b_weight
    b_low_s = b_weight
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high_s = tl.load(p_high + o_s)
        b_low_s = tl.load(p_low + o_s)
    b_dk = tl.zeros([BT, BD], dtype=tl.float32)
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        products: tl.constexpr = HAS2 * (d * (d + 1) // 2)
        rows: tl.constexpr = rest + products
        p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
        p_norm = p_rest + rest * e
        if HAS2:
            p_products += (sequence * num_chunks + chunk) * products * e
            columns = tl.where((chunk < num_chunks - 1) | (first_reads != 0), d, 0)
            b_dk = contract_products(p_k, HKV * d, m_s, b_v, p_products, columns, d, e, BT, BD, BE, PRECISION)
            b_z = load_symmetric(p_norm + rest, d, BD)
            b_dk += tl.dot(b_k32, b_z, input_precision="tf32x3") * (2.0 * b_weight)[:, None]
        if HAS1:
            b_s = load_matrix(p_rest + HAS0 * e, d, e, BD, BE).to(OPERAND)
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            b_dk += tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) + b_weight[:, None] * b_z1[None, :]
        if DECAY:
            last = start + (chunk + 1) * chunk_size - 1
            b_dk *= edge_factor(tl.load(p_high + last) - b_high_s, tl.load(p_low + last) - b_low_s)[:, None]
    b_inside = tl.zeros([BT], dtype=tl.float32)
    chunk_stop = tl.minimum(start + (chunk + 1) * chunk_size, stop)
    for group in range(G):
        head = kv_head * G + group
        p_head_coefs = p_coefs + head
        for t in range(first, chunk_stop, BS):
            o_t = t + tl.arange(0, BS)
            m_t = (o_t >= ahead) & (o_t < stop)
            first_row = (batch * TQ + t - ahead) * num_heads + head
            local_row = (sequence * G + group) * padded_len + t - start
            b_q = load_tile(p_q + first_row * d, num_heads * d, m_t, BS, d, BD).to(OPERAND)
            b_g = load_tile(p_gradient + local_row * e, e, m_t, BS, e, BE)
            b_g1 = tl.load(p_normaliser_gradient + local_row + tl.arange(0, BS), mask=m_t, other=0.0)
            b_high_t = b_g1
            b_low_t = b_g1
            if DECAY:
                b_high_t = tl.load(p_high + o_t, mask=m_t, other=0.0)
                b_low_t = tl.load(p_low + o_t, mask=m_t, other=0.0)
            b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
            b_dw = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION) + b_g1[:, None] * b_weight[None, :]
            b_dw *= pair_factor(o_t, b_high_t, b_low_t, o_s, b_high_s, b_low_s, DECAY)
            if READS:
                b_inside += tl.sum(b_dw * polynomial(b_x, p_head_coefs, num_heads, ORDER), 0)
            b_dx = b_dw * polynomial_slope(b_x, p_head_coefs, num_heads, ORDER) * scale
            b_dk = tl.dot(tl.trans(b_dx.to(OPERAND)), b_q, b_dk, input_precision=PRECISION)
    if READS:
        tl.store(p_inside + sequence * padded_len + first - start + o_local, b_inside)
    store_tile(p_dk + first_key * d, HKV * d, b_dk, m_s, BT, d, BD)


@triton.jit(do_not_specialize=_SCALARS)
def dv_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_high,
    p_low,
    p_coefs,
    p_gradient,
    p_normaliser_gradient,
    p_products,
    p_rest,
    p_pairs,
    p_dv,
    p_d_weight,
    p_written,
    scale,
    T,
    TQ,
    start,
    stop,
    chunk_size,
    num_chunks,
    decay_len,
    num_tiles,
    num_pairs,
    first_reads,
    HKV,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BP: tl.constexpr,
    ORDER: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    DECAY: tl.constexpr,
    STATE: tl.constexpr,
    READS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dv and the gradient of the key weight of one tile of keys; the states are as in `dk_kernel`.

    `p_written` `[B * Hkv, padded]` receives `<[v; weight], their gradient>` by way of the state after the chunk.
    """
    pid = tl.program_id(0)
    tile = pid % num_tiles
    sequence = (pid // num_tiles).to(tl.int64)
    batch = sequence // HKV
    kv_head = sequence % HKV
    num_heads = HKV * G
    ahead = T - TQ
    first = start + tile * BT
    chunk = (tile * BT) // chunk_size
    o_local = tl.arange(0, BT)
    o_s = first + o_local
    m_s = o_s < stop
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    padded_len = num_chunks * chunk_size
    first_key = (batch * T + first) * HKV + kv_head
    p_k += first_key * d
    b_k = load_tile(p_k, HKV * d, m_s, BT, d, BD)
    b_high_s = tl.zeros([BT], dtype=tl.float32)
    b_low_s = tl.zeros([BT], dtype=tl.float32)
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high_s = tl.load(p_high + o_s)
        b_low_s = tl.load(p_low + o_s)
    b_dv = tl.zeros([BT, BE], dtype=tl.float32)
    b_d_weight = tl.zeros([BT], dtype=tl.float32)
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        products: tl.constexpr = HAS2 * (d * (d + 1) // 2)
        rows: tl.constexpr = rest + products
        b_k32 = b_k.to(tl.float32)
        p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
        p_norm = p_rest + rest * e
        if HAS2:
            p_products += (sequence * num_chunks + chunk) * products * e
            pairs = tl.where((chunk < num_chunks - 1) | (first_reads != 0), num_pairs, 0)
            b_dv = query_products(p_k, HKV * d, m_s, p_products, p_pairs, pairs, d, e, BT, BE, BP, PRECISION)
            b_z = load_symmetric(p_norm + rest, d, BD)
            b_d_weight += tl.sum(tl.dot(b_k32, b_z, input_precision="tf32x3") * b_k32, 1)
        if HAS1:
            b_s = load_matrix(p_rest + HAS0 * e, d, e, BD, BE).to(OPERAND)
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            b_dv += tl.dot(b_k.to(OPERAND), b_s, input_precision=PRECISION)
            b_d_weight += tl.sum(b_k32 * b_z1[None, :], 1)
        if HAS0:
            b_dv += tl.load(p_rest + o_e, mask=o_e < e, other=0.0)[None, :]
            b_d_weight += tl.load(p_norm)
        if DECAY:
            last = start + (chunk + 1) * chunk_size - 1
            b_to_end = edge_factor(tl.load(p_high + last) - b_high_s, tl.load(p_low + last) - b_low_s)
            b_dv *= b_to_end[:, None]
            b_d_weight *= b_to_end
        if READS:
            b_v = load_tile(p_v + first_key * e, HKV * e, m_s, BT, e, BE).to(tl.float32)
            b_weight = tl.load(p_weight + first_key + o_local * HKV, mask=m_s, other=0.0)
            b_written = tl.sum(b_dv * b_v, 1) + b_d_weight * b_weight
            tl.store(p_written + sequence * padded_len + first - start + o_local, b_written)
    b_k = b_k.to(OPERAND)
    chunk_stop = tl.minimum(start + (chunk + 1) * chunk_size, stop)
    for group in range(G):
        head = kv_head * G + group
        for t in range(first, chunk_stop, BS):
            o_t = t + tl.arange(0, BS)
            m_t = (o_t >= ahead) & (o_t < stop)
            first_row = (batch * TQ + t - ahead) * num_heads + head
            local_row = (sequence * G + group) * padded_len + t - start
            b_q = load_tile(p_q + first_row * d, num_heads * d, m_t, BS, d, BD).to(OPERAND)
            b_g = load_tile(p_gradient + local_row * e, e, m_t, BS, e, BE)
            b_g1 = tl.load(p_normaliser_gradient + local_row + tl.arange(0, BS), mask=m_t, other=0.0)
            b_high_t = b_g1
            b_low_t = b_g1
            if DECAY:
                b_high_t = tl.load(p_high + o_t, mask=m_t, other=0.0)
                b_low_t = tl.load(p_low + o_t, mask=m_t, other=0.0)
            b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
            b_w = polynomial(b_x, p_coefs + head, num_heads, ORDER)
            b_w *= pair_factor(o_t, b_high_t, b_low_t, o_s, b_high_s, b_low_s, DECAY)
            b_d_weight += tl.sum(b_w * b_g1[:, None], 0)
            b_dv = tl.dot(tl.trans(b_w.to(OPERAND)), b_g, b_dv, input_precision=PRECISION)
    tl.store(p_d_weight + first_key + o_local * HKV, b_d_weight, mask=m_s)
    store_tile(p_dv + first_key * e, HKV * e, b_dv, m_s, BT, e, BE)


class KeyGradients(NamedTuple):
    """Where the gradients of all inputs are written; a segment fills its own positions.

    Attributes:
        q: `[B, Tq, H, d]`.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, e]`.
        weight: `[B, T, Hkv]` float32.
        log_decay: `[B, T, Hkv]` float32, or None without decay.
        coefs: `[order + 1, H]` float32, or None where nobody asks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    log_decay: Tensor | None
    coefs: Tensor | None

    @property
    def reads(self) -> bool:
        """Whether the sums are needed from which the decay's and the coefficients' gradients are made."""
        return self.log_decay is not None or self.coefs is not None


def backward_segment(
    segment: Segment,
    queries: QueryGradients,
    states: States | None,
    state_gradients: States | None,
    inner: Tensor | None,
    grads: KeyGradients,
) -> None:
    """Compute the gradients of a segment's tokens.

    Args:
        segment: The tokens.
        queries: Its queries and the gradients of what they read.
        states: The states before its chunks, or None.
        state_gradients: The gradients of the states after its chunks, or None.
        inner: `[B * Hkv, chunks]`, `<gradient, state before>` over each chunk, or None like the gradients.
        grads: Written at the segment's positions; `coefs` is added to.
    """
    problem = segment.problem
    order = problem.coefs.shape[0] - 1
    length = segment.padded_len
    heads, states_shape = problem.num_states * problem.num_groups, (problem.num_states, length)
    zeros = problem.weight.new_zeros
    inside, read = zeros(order + 1, heads, length), zeros(order + 1, heads, length)
    key_inside, written = zeros(states_shape), zeros(states_shape)
    _launch_dq(segment, queries, states, grads, inside, read)
    for kernel, tile, own in (
        (dk_kernel, problem.tiles.dk, {"p_dk": grads.k, "p_inside": key_inside}),
        (dv_kernel, problem.tiles.dv, {"p_dv": grads.v, "p_d_weight": grads.weight, "p_written": written}),
    ):
        num_tiles = triton.cdiv(segment.stop - segment.start, tile.rows)
        arguments = {
            **segment.pair_arguments(tile),
            **segment.state_arguments(state_gradients, tile),
            **_gradient_arguments(queries, grads),
            **own,
            "num_tiles": num_tiles,
        }
        run(Launch(kernel, (num_tiles * problem.num_states,), arguments, tile.num_warps, tile.num_stages))
    if grads.coefs is not None:
        total = (inside + read).sum(-1).unflatten(1, (-1, problem.q.shape[2])).sum(1)
        grads.coefs.add_(total)
    if grads.log_decay is not None:
        gate = _gate_gradient(problem, inside, read, key_inside, written, inner)
        kept = gate[:, : segment.stop - segment.start].unflatten(0, (-1, problem.k.shape[2]))
        grads.log_decay[:, segment.start : segment.stop] = kept.transpose(1, 2)


def _launch_dq(
    segment: Segment, queries: QueryGradients, states: States | None, grads: KeyGradients, inside: Tensor, read: Tensor
) -> None:
    tile = segment.problem.tiles.dq
    num_tiles = segment.num_query_tiles(tile.rows)
    if num_tiles == 0:
        return
    arguments = {
        **segment.pair_arguments(tile),
        **segment.state_arguments(states, tile),
        **_gradient_arguments(queries, grads),
        "p_dq": grads.q,
        "p_inside": inside,
        "p_read": read,
        "num_tiles": num_tiles,
    }
    programs = num_tiles * segment.problem.num_states * segment.problem.num_groups
    run(Launch(dq_kernel, (programs,), arguments, tile.num_warps, tile.num_stages))


def _gradient_arguments(queries: QueryGradients, grads: KeyGradients) -> dict[str, object]:
    return {
        "p_gradient": queries.gradient,
        "p_normaliser_gradient": queries.normaliser_gradient,
        "READS": grads.reads,
    }


def _gate_gradient(
    problem: Problem, inside: Tensor, read: Tensor, key_inside: Tensor, written: Tensor, inner: Tensor | None
) -> Tensor:
    """Return the gradient of the log decay, `[B * Hkv, padded]`.

    Token r decays every pair s < r <= t: inside a chunk, the pairs with t >= r less those with s >= r; what queries
    t >= r read from the state; what keys s < r write to it; and the state itself. All sums stay within a chunk.
    """
    heads, groups = problem.q.shape[2], problem.num_groups

    def per_query(reads: Tensor) -> Tensor:
        by_head = reads.double().unflatten(1, (-1, heads)) * problem.coefs[:, None, :, None]
        return by_head.sum(0).unflatten(1, (-1, groups)).sum(2).flatten(0, 1)

    def by_chunk(x: Tensor) -> Tensor:
        return x.double().unflatten(-1, (-1, problem.chunk_size))

    later = by_chunk(per_query(inside) - key_inside + per_query(read))
    earlier = by_chunk(written)
    gate = later.flip(-1).cumsum(-1).flip(-1) + earlier.cumsum(-1) - earlier
    if inner is not None:
        gate = gate + inner.double().unsqueeze(-1)
    return gate.flatten(1)
