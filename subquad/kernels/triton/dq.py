"""The kernel for the gradient of the queries. `backward.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.triton.primitives import (
    RUNTIME_SIZES,
    add_product,
    bilinear_form,
    causal_factor,
    contract_products,
    decay_factor,
    decay_from,
    load_tile,
    polynomial_slope,
    store_tile,
    times_symmetric,
)


@triton.jit
def _dq_from_keys(
    b_dq,
    b_inside0,
    b_inside1,
    b_inside2,
    b_q,
    b_g,
    b_g1,
    b_decay,
    p_k,
    p_v,
    p_weight,
    p_coefs,
    m_s,
    scale,
    HKV: tl.constexpr,
    num_heads,
    d: tl.constexpr,
    e: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    READS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to dq what comes from BS keys; `b_decay` is `[queries, keys]`, or `[1, keys]` for all queries."""
    b_k = load_tile(p_k, HKV * d, m_s, BS, d, BD).to(OPERAND)
    b_v = load_tile(p_v, HKV * e, m_s, BS, e, BE).to(OPERAND)
    b_weight = tl.load(p_weight + tl.arange(0, BS) * HKV, mask=m_s, other=0.0)
    b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    b_dw = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION) + b_g1[:, None] * b_weight[None, :]
    b_dw *= b_decay
    if READS:
        if HAS0:
            b_inside0 += tl.sum(b_dw, 1)
        if HAS1:
            b_inside1 += tl.sum(b_dw * b_x, 1)
        if HAS2:
            b_inside2 += tl.sum(b_dw * b_x * b_x, 1)
    b_dx = b_dw * (polynomial_slope(b_x, p_coefs, num_heads, HAS1, HAS2) * scale)
    b_dq = tl.dot(b_dx.to(OPERAND), b_k, b_dq, input_precision=PRECISION)
    return b_dq, b_inside0, b_inside1, b_inside2


@triton.jit(do_not_specialize=RUNTIME_SIZES)
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
    HKV: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
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

    `p_inside` and `p_read` `[3, B * H, padded]` receive, per query and power n, the gradient of coefficient n
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
    high_before = 0.0
    low_before = 0.0
    before = 1.0
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        # The decay up to the tile's first query; from there on the tile is on its own.
        inside = first > start + chunk * chunk_size
        high_before = tl.load(p_high + first - 1, mask=inside, other=0.0)
        low_before = tl.load(p_low + first - 1, mask=inside, other=0.0)
        before = decay_factor(high_before, low_before, 0.0, 0.0)
    b_g1 = tl.load(p_normaliser_gradient + local_row + o_local)
    b_dq = tl.zeros([BT, BD], dtype=tl.float32)
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        products: tl.constexpr = HAS2 * (d * (d + 1) // 2)
        rows: tl.constexpr = rest + products
        p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
        p_norm = p_rest + rest * e
        if HAS0 and READS:
            b_s0 = tl.load(p_rest + o_e, mask=o_e < e, other=0.0)
            b_gs = load_tile(p_gradient + local_row * e, e, m_t, BT, e, BE)
            b_read = tl.sum(b_gs.to(tl.float32) * b_s0[None, :], 1) + b_g1 * tl.load(p_norm)
            tl.store(
                p_read + local_row + o_local,
                b_read * before * decay_from(p_high, p_low, o_t, high_before, low_before, DECAY),
            )
        if HAS1:
            p_s1 = p_rest + HAS0 * e
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            if READS:
                b_q32 = load_tile(p_q, num_heads * d, m_t, BT, d, BD).to(tl.float32)
                b_read = b_g1 * tl.sum(b_q32 * b_z1[None, :], 1)
                p_g = p_gradient + local_row * e
                b_read += bilinear_form(
                    p_q, num_heads * d, p_g, e, m_t, p_s1, d, e, BT, 32 if BD >= 32 else 16, OPERAND, PRECISION
                )
                tl.store(
                    p_read + reads_stride + local_row + o_local,
                    b_read * (before * scale) * decay_from(p_high, p_low, o_t, high_before, low_before, DECAY),
                )
        if HAS2:
            p_products += (sequence * num_chunks + chunk) * products * e
            columns = tl.where((chunk > 0) | (first_reads != 0), d, 0)
            b_dq = times_symmetric(p_q, num_heads * d, m_t, p_norm + rest, d, BT, BD) * (2.0 * b_g1)[:, None]
            b_gs = load_tile(p_gradient + local_row * e, e, m_t, BT, e, BE)
            b_dq = contract_products(
                b_dq, p_q, num_heads * d, m_t, b_gs, p_products, columns, d, e, BT, BD, BE, PRECISION
            )
            b_dq *= before * scale * scale
            if READS:
                p_row = p_read + 2 * reads_stride + local_row
                b_q32 = load_tile(p_q, num_heads * d, m_t, BT, d, BD).to(tl.float32)
                tl.store(
                    p_row + o_local,
                    0.5 * tl.sum(b_dq * b_q32, 1) * decay_from(p_high, p_low, o_t, high_before, low_before, DECAY),
                )
            b_dq *= tl.load(p_coefs + 2 * num_heads)
        if HAS1:
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            coef = tl.load(p_coefs + num_heads) * before * scale
            b_dq += (coef * b_g1)[:, None] * b_z1[None, :]
            b_dq = add_product(
                b_dq, p_gradient + local_row * e, e, m_t, p_s1, coef, 1, e, e, d, BT, BD, 32, OPERAND, PRECISION
            )
    b_high_t = tl.zeros([BT], dtype=tl.float32)
    b_low_t = tl.zeros([BT], dtype=tl.float32)
    if DECAY:
        b_high_t = tl.load(p_high + o_t)
        b_low_t = tl.load(p_low + o_t)
    b_g1 = tl.load(p_normaliser_gradient + local_row + o_local)
    b_inside0 = tl.zeros([BT], dtype=tl.float32)
    b_inside1 = tl.zeros([BT], dtype=tl.float32)
    b_inside2 = tl.zeros([BT], dtype=tl.float32)
    b_q = load_tile(p_q, num_heads * d, m_t, BT, d, BD).to(OPERAND)
    b_g = load_tile(p_gradient + local_row * e, e, m_t, BT, e, BE)
    for s in range(start + chunk * chunk_size, first, BS):
        o_s = s + tl.arange(0, BS)
        b_decay = tl.zeros([BS], dtype=tl.float32) + 1.0
        if DECAY:
            b_decay = decay_factor(high_before, low_before, tl.load(p_high + o_s), tl.load(p_low + o_s))
        first_key = (batch * T + s) * HKV + kv_head
        b_dq, b_inside0, b_inside1, b_inside2 = _dq_from_keys(
            b_dq,
            b_inside0,
            b_inside1,
            b_inside2,
            b_q,
            b_g,
            b_g1,
            b_decay[None, :],
            p_k + first_key * d,
            p_v + first_key * e,
            p_weight + first_key,
            p_coefs,
            o_s < stop,
            scale,
            HKV,
            num_heads,
            d,
            e,
            BS,
            BD,
            BE,
            HAS0,
            HAS1,
            HAS2,
            READS,
            OPERAND,
            PRECISION,
        )
    if DECAY:
        b_after = decay_factor(b_high_t, b_low_t, high_before, low_before)
        b_dq *= b_after[:, None]
        b_inside0 *= b_after
        b_inside1 *= b_after
        b_inside2 *= b_after
    for s in range(first, tl.minimum(first + BT, stop), BS):
        o_s = s + tl.arange(0, BS)
        b_high_s = tl.zeros([BS], dtype=tl.float32)
        b_low_s = tl.zeros([BS], dtype=tl.float32)
        if DECAY:
            b_high_s = tl.load(p_high + o_s)
            b_low_s = tl.load(p_low + o_s)
        b_decay = causal_factor(
            o_t[:, None],
            b_high_t[:, None],
            b_low_t[:, None],
            o_s[None, :],
            b_high_s[None, :],
            b_low_s[None, :],
            DECAY,
        )
        first_key = (batch * T + s) * HKV + kv_head
        b_dq, b_inside0, b_inside1, b_inside2 = _dq_from_keys(
            b_dq,
            b_inside0,
            b_inside1,
            b_inside2,
            b_q,
            b_g,
            b_g1,
            b_decay,
            p_k + first_key * d,
            p_v + first_key * e,
            p_weight + first_key,
            p_coefs,
            o_s < stop,
            scale,
            HKV,
            num_heads,
            d,
            e,
            BS,
            BD,
            BE,
            HAS0,
            HAS1,
            HAS2,
            READS,
            OPERAND,
            PRECISION,
        )
    if READS:
        if HAS0:
            tl.store(p_inside + local_row + o_local, b_inside0)
        if HAS1:
            tl.store(p_inside + reads_stride + local_row + o_local, b_inside1)
        if HAS2:
            tl.store(p_inside + 2 * reads_stride + local_row + o_local, b_inside2)
    store_tile(p_dq + ((batch * TQ + first - ahead) * num_heads + head) * d, num_heads * d, b_dq, m_t, BT, d, BD)
