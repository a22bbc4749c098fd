"""The kernel for the gradient of the keys. `backward.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.triton.primitives import (
    RUNTIME_SIZES,
    add_product,
    causal_factor,
    contract_products,
    decay_factor,
    load_queries,
    load_tile,
    polynomial,
    polynomial_slope,
    store_tile,
    times_symmetric,
)


@triton.jit
def _dk_from_queries(
    b_dk,
    b_inside,
    b_k,
    b_v,
    b_weight,
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
    READS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to dk what comes from some queries; `b_decay` is `[keys, queries]`, or `[1, queries]` for all keys."""
    b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
    b_dw = tl.dot(b_v, tl.trans(b_g), input_precision=PRECISION) + b_weight[:, None] * b_g1[None, :]
    b_dw *= b_decay
    if READS:
        b_inside += tl.sum(b_dw * polynomial(b_x, p_coefs, num_heads, HAS0, HAS1, HAS2), 1)
    b_dx = b_dw * (polynomial_slope(b_x, p_coefs, num_heads, HAS1, HAS2) * scale)
    b_dk = tl.dot(b_dx.to(OPERAND), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_inside


@triton.jit(do_not_specialize=RUNTIME_SIZES)
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
    b_weight = tl.load(p_weight + first_key + o_local * HKV, mask=m_s, other=0.0)
    b_high_s = tl.zeros([BT], dtype=tl.float32)
    b_low_s = tl.zeros([BT], dtype=tl.float32)
    high_after = 0.0
    low_after = 0.0
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high_s = tl.load(p_high + o_s)
        b_low_s = tl.load(p_low + o_s)
        # The decay up to the tile's last key; what comes later decays all keys of the tile alike.
        high_after = tl.load(p_high + first + BT - 1)
        low_after = tl.load(p_low + first + BT - 1)
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
            b_dk = times_symmetric(p_k, HKV * d, m_s, p_norm + rest, d, BT, BD) * (2.0 * b_weight)[:, None]
            b_vs = load_tile(p_v + first_key * e, HKV * e, m_s, BT, e, BE).to(OPERAND)
            b_dk = contract_products(b_dk, p_k, HKV * d, m_s, b_vs, p_products, columns, d, e, BT, BD, BE, PRECISION)
        if HAS1:
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            b_dk += b_weight[:, None] * b_z1[None, :]
            b_dk = add_product(
                b_dk,
                p_v + first_key * e,
                HKV * e,
                m_s,
                p_rest + HAS0 * e,
                1.0,
                1,
                e,
                e,
                d,
                BT,
                BD,
                32,
                OPERAND,
                PRECISION,
            )
        if DECAY:
            last = start + (chunk + 1) * chunk_size - 1
            b_dk *= decay_factor(tl.load(p_high + last), tl.load(p_low + last), high_after, low_after)
    b_k = load_tile(p_k, HKV * d, m_s, BT, d, BD).to(OPERAND)
    b_v = load_tile(p_v + first_key * e, HKV * e, m_s, BT, e, BE).to(OPERAND)
    b_inside = tl.zeros([BT], dtype=tl.float32)
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
            b_dk, b_inside = _dk_from_queries(
                b_dk,
                b_inside,
                b_k,
                b_v,
                b_weight,
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
                READS,
                OPERAND,
                PRECISION,
            )
    if DECAY:
        b_to_tile_end = decay_factor(high_after, low_after, b_high_s, b_low_s)
        b_dk *= b_to_tile_end[:, None]
        b_inside *= b_to_tile_end
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
            b_dk, b_inside = _dk_from_queries(
                b_dk,
                b_inside,
                b_k,
                b_v,
                b_weight,
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
                READS,
                OPERAND,
                PRECISION,
            )
    if READS:
        tl.store(p_inside + sequence * padded_len + first - start + o_local, b_inside)
    store_tile(p_dk + first_key * d, HKV * d, b_dk, m_s, BT, d, BD)
