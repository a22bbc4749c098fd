"""The kernel for the gradients of the values and of the key weights. `backward.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.triton.primitives import (
    RUNTIME_SIZES,
    add_product,
    causal_factor,
    decay_factor,
    load_queries,
    load_tile,
    polynomial,
    quadratic_form,
    query_products,
    store_tile,
)


@triton.jit
def _dv_from_queries(
    b_dv,
    b_d_weight,
    b_k,
    b_decay,
    b_q,
    b_g,
    b_g1,
    p_coefs,
    scale,
    num_heads,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to dv and the key weight's gradient what comes from some queries; `b_decay` as in `_dk_from_queries`."""
    b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
    b_w = polynomial(b_x, p_coefs, num_heads, HAS0, HAS1, HAS2) * b_decay
    b_d_weight += tl.sum(b_w * b_g1[None, :], 1)
    b_dv = tl.dot(b_w.to(OPERAND), b_g, b_dv, input_precision=PRECISION)
    return b_dv, b_d_weight


@triton.jit(do_not_specialize=RUNTIME_SIZES)
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
    HKV: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BP: tl.constexpr,
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
    b_high_s = tl.zeros([BT], dtype=tl.float32)
    b_low_s = tl.zeros([BT], dtype=tl.float32)
    high_after = 0.0
    low_after = 0.0
    b_to_tile_end = tl.zeros([BT], dtype=tl.float32) + 1.0
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high_s = tl.load(p_high + o_s)
        b_low_s = tl.load(p_low + o_s)
        high_after = tl.load(p_high + first + BT - 1)
        low_after = tl.load(p_low + first + BT - 1)
        b_to_tile_end = decay_factor(high_after, low_after, b_high_s, b_low_s)
    b_dv = tl.zeros([BT, BE], dtype=tl.float32)
    b_d_weight = tl.zeros([BT], dtype=tl.float32)
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        products: tl.constexpr = HAS2 * (d * (d + 1) // 2)
        rows: tl.constexpr = rest + products
        p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
        p_norm = p_rest + rest * e
        if HAS1:
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            b_k32 = load_tile(p_k, HKV * d, m_s, BT, d, BD).to(tl.float32)
            b_d_weight += tl.sum(b_k32 * b_z1[None, :], 1)
        if HAS2:
            p_products += (sequence * num_chunks + chunk) * products * e
            pairs = tl.where((chunk < num_chunks - 1) | (first_reads != 0), num_pairs, 0)
            b_d_weight += quadratic_form(p_k, HKV * d, m_s, p_norm + rest, d, BT, 32 if BD >= 32 else 16)
            b_dv = query_products(p_k, HKV * d, m_s, p_products, p_pairs, pairs, d, e, BT, BE, BP, PRECISION)
        if HAS1:
            b_dv = add_product(
                b_dv, p_k, HKV * d, m_s, p_rest + HAS0 * e, 1.0, e, 1, d, e, BT, BE, 32, OPERAND, PRECISION
            )
        if HAS0:
            b_dv += tl.load(p_rest + o_e, mask=o_e < e, other=0.0)[None, :]
            b_d_weight += tl.load(p_norm)
        if DECAY:
            last = start + (chunk + 1) * chunk_size - 1
            after = decay_factor(tl.load(p_high + last), tl.load(p_low + last), high_after, low_after)
            b_dv *= after
            b_d_weight *= after
        if READS:
            b_v = load_tile(p_v + first_key * e, HKV * e, m_s, BT, e, BE).to(tl.float32)
            b_weight = tl.load(p_weight + first_key + o_local * HKV, mask=m_s, other=0.0)
            b_written = (tl.sum(b_dv * b_v, 1) + b_d_weight * b_weight) * b_to_tile_end
            tl.store(p_written + sequence * padded_len + first - start + o_local, b_written)
    b_k = load_tile(p_k, HKV * d, m_s, BT, d, BD).to(OPERAND)
    chunk_stop = tl.minimum(start + (chunk + 1) * chunk_size, stop)
    for group in range(G):
        head = kv_head * G + group
        for t in range(first + BT, chunk_stop, BS):
            o_t = t + tl.arange(0, BS)
            first_row = (batch * TQ + t - ahead) * num_heads + head
            local_row = (sequence * G + group) * padded_len + t - start
            b_q, b_g, b_g1 = load_queries(
                p_q,
                p_gradient,
                p_normaliser_gradient,
                first_row,
                local_row,
                (o_t >= ahead) & (o_t < stop),
                num_heads,
                d,
                e,
                BS,
                BD,
                BE,
                OPERAND,
            )
            b_decay = tl.zeros([BS], dtype=tl.float32) + 1.0
            if DECAY:
                b_decay = decay_factor(tl.load(p_high + o_t), tl.load(p_low + o_t), high_after, low_after)
            b_dv, b_d_weight = _dv_from_queries(
                b_dv,
                b_d_weight,
                b_k,
                b_decay[None, :],
                b_q,
                b_g,
                b_g1,
                p_coefs + head,
                scale,
                num_heads,
                HAS0,
                HAS1,
                HAS2,
                OPERAND,
                PRECISION,
            )
    b_dv *= b_to_tile_end[:, None]
    b_d_weight *= b_to_tile_end
    for group in range(G):
        head = kv_head * G + group
        for t in range(first, tl.minimum(first + BT, chunk_stop), BS):
            o_t = t + tl.arange(0, BS)
            first_row = (batch * TQ + t - ahead) * num_heads + head
            local_row = (sequence * G + group) * padded_len + t - start
            b_q, b_g, b_g1 = load_queries(
                p_q,
                p_gradient,
                p_normaliser_gradient,
                first_row,
                local_row,
                (o_t >= ahead) & (o_t < stop),
                num_heads,
                d,
                e,
                BS,
                BD,
                BE,
                OPERAND,
            )
            b_high_t = tl.zeros([BS], dtype=tl.float32)
            b_low_t = tl.zeros([BS], dtype=tl.float32)
            if DECAY:
                b_high_t = tl.load(p_high + o_t)
                b_low_t = tl.load(p_low + o_t)
            b_decay = causal_factor(
                o_t[None, :],
                b_high_t[None, :],
                b_low_t[None, :],
                o_s[:, None],
                b_high_s[:, None],
                b_low_s[:, None],
                DECAY,
            )
            b_dv, b_d_weight = _dv_from_queries(
                b_dv,
                b_d_weight,
                b_k,
                b_decay,
                b_q,
                b_g,
                b_g1,
                p_coefs + head,
                scale,
                num_heads,
                HAS0,
                HAS1,
                HAS2,
                OPERAND,
                PRECISION,
            )
    tl.store(p_d_weight + first_key + o_local * HKV, b_d_weight, mask=m_s)
    store_tile(p_dv + first_key * e, HKV * e, b_dv, m_s, BT, e, BE)
