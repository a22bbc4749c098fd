"""The forward kernel: what queries read from the state before their chunk and from the keys of their chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.triton.guard import even_sums
from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.primitives import (
    NO_KEY,
    RELATIVE_FLOOR,
    RUNTIME_SIZES,
    add_product,
    causal_factor,
    decay_factor,
    load_tile,
    polynomial,
    quadratic_form,
    query_products,
    store_tile,
)
from subquad.kernels.triton.problem import Outputs, Segment, States


@triton.jit
def _attend_keys(
    b_out,
    b_norm,
    b_q,
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
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what a tile of queries reads from BS keys; `b_decay` is `[queries, keys]`, or `[1, keys]` for all queries."""
    b_k = load_tile(p_k, HKV * d, m_s, BS, d, BD).to(OPERAND)
    b_v = load_tile(p_v, HKV * e, m_s, BS, e, BE).to(OPERAND)
    b_weight = tl.load(p_weight + tl.arange(0, BS) * HKV, mask=m_s, other=0.0)
    b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    b_w = polynomial(b_x, p_coefs, num_heads, HAS0, HAS1, HAS2) * b_decay
    b_norm += tl.sum(b_w * b_weight[None, :], 1)
    b_out = tl.dot(b_w.to(OPERAND), b_v, b_out, input_precision=PRECISION)
    return b_out, b_norm


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_high,
    p_low,
    p_coefs,
    p_products,
    p_rest,
    p_even,
    p_pairs,
    p_out,
    p_normaliser,
    p_safe,
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
    NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of BT query positions of one head.

    The heads of a group and the tiles of a chunk are neighbours in the grid: they read the same state.
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
    o_t = first + tl.arange(0, BT)
    m_t = (o_t >= ahead) & (o_t < stop)
    o_e = tl.arange(0, BE)
    o_d = tl.arange(0, BD)
    first_row = (batch * TQ + first - ahead) * num_heads + head
    p_q += first_row * d
    p_coefs += head
    b_high_t = tl.zeros([BT], dtype=tl.float32)
    b_low_t = tl.zeros([BT], dtype=tl.float32)
    high_before = 0.0
    low_before = 0.0
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high_t = tl.load(p_high + o_t)
        b_low_t = tl.load(p_low + o_t)
        # The decay up to the tile's first query; from there on the tile is on its own.
        inside = first > start + chunk * chunk_size
        high_before = tl.load(p_high + first - 1, mask=inside, other=0.0)
        low_before = tl.load(p_low + first - 1, mask=inside, other=0.0)
    b_q32 = load_tile(p_q, num_heads * d, m_t, BT, d, BD).to(tl.float32)
    b_size = tl.sum(b_q32 * b_q32, 1) * (scale * scale)
    b_out = tl.zeros([BT, BE], dtype=tl.float32)
    b_norm = tl.zeros([BT], dtype=tl.float32)
    if STATE:
        rest: tl.constexpr = HAS0 + HAS1 * d
        products: tl.constexpr = HAS2 * (d * (d + 1) // 2)
        rows: tl.constexpr = rest + products
        p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
        p_norm = p_rest + rest * e
        if HAS1:
            b_z1 = tl.load(p_norm + HAS0 + o_d, mask=o_d < d, other=0.0)
            b_linear = tl.sum(b_q32 * b_z1[None, :], 1)
        if HAS2:
            p_products += (sequence * num_chunks + chunk) * products * e
            # A chunk that nothing came before reads zeros: its loop has no turns.
            pairs = tl.where((chunk > 0) | (first_reads != 0), num_pairs, 0)
            coef = tl.load(p_coefs + 2 * num_heads) * scale * scale
            b_form = quadratic_form(p_q, num_heads * d, m_t, p_norm + rest, d, BT, 32 if BD >= 32 else 16)
            b_norm += b_form * coef
            b_out = query_products(p_q, num_heads * d, m_t, p_products, p_pairs, pairs, d, e, BT, BE, BP, PRECISION)
            b_out *= coef
        if HAS1:
            coef = tl.load(p_coefs + num_heads) * scale
            b_norm += b_linear * coef
            b_out = add_product(
                b_out, p_q, num_heads * d, m_t, p_rest + HAS0 * e, coef, e, 1, d, e, BT, BE, 32, OPERAND, PRECISION
            )
        if HAS0:
            coef = tl.load(p_coefs)
            b_s0 = tl.load(p_rest + o_e, mask=o_e < e, other=0.0)
            b_out += b_s0[None, :] * coef
            b_norm += tl.load(p_norm) * coef
        if DECAY:
            before = decay_factor(high_before, low_before, 0.0, 0.0)
            b_out *= before
            b_norm *= before
    b_q = load_tile(p_q, num_heads * d, m_t, BT, d, BD).to(OPERAND)
    for s in range(start + chunk * chunk_size, first, BS):
        o_s = s + tl.arange(0, BS)
        b_decay = tl.zeros([BS], dtype=tl.float32) + 1.0
        if DECAY:
            b_decay = decay_factor(high_before, low_before, tl.load(p_high + o_s), tl.load(p_low + o_s))
        first_key = (batch * T + s) * HKV + kv_head
        b_out, b_norm = _attend_keys(
            b_out,
            b_norm,
            b_q,
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
            OPERAND,
            PRECISION,
        )
    if DECAY:
        b_after = decay_factor(b_high_t, b_low_t, high_before, low_before)
        b_out *= b_after[:, None]
        b_norm *= b_after
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
        b_out, b_norm = _attend_keys(
            b_out,
            b_norm,
            b_q,
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
            OPERAND,
            PRECISION,
        )
    o_row = first_row + tl.arange(0, BT) * num_heads
    tl.store(p_normaliser + o_row, b_norm, mask=m_t)
    if NORMALIZE:
        b_bound = tl.zeros([BT], dtype=tl.float32)
        padded_len = num_chunks * chunk_size
        if HAS0 or HAS2:
            p_even += sequence * 2 * padded_len + first - start
        if HAS0:
            b_bound += tl.abs(tl.load(p_coefs)) * tl.load(p_even + tl.arange(0, BT))
        if HAS2:
            b_squares = tl.load(p_even + padded_len + tl.arange(0, BT))
            b_bound += tl.abs(tl.load(p_coefs + 2 * num_heads)) * b_size * b_squares
        b_floor = b_bound * RELATIVE_FLOOR
        b_safe = tl.where(tl.abs(b_norm) < b_floor, tl.where(b_norm < 0, -b_floor, b_floor), b_norm)
        # A row that sees no key gives 0, with gradient 0.
        b_safe = tl.where(tl.abs(b_norm) > NO_KEY, b_safe, float("inf"))
        tl.store(p_safe + o_row, b_safe, mask=m_t)
        b_out = b_out / b_safe[:, None]
    store_tile(p_out + first_row * e, num_heads * e, b_out, m_t, BT, e, BE)


def attend(segment: Segment, states: States | None, outputs: Outputs) -> None:
    """Compute the outputs of a segment's queries.

    Args:
        segment: The tokens.
        states: The states before the segment's chunks; None for one chunk without a past.
        outputs: Written at the segment's positions.
    """
    tiles = segment.problem.tiles.forward
    num_tiles = segment.num_query_tiles(tiles.rows)
    if num_tiles == 0:
        return
    run(
        Launch(
            forward_kernel,
            (num_tiles * segment.problem.num_states * segment.problem.num_groups,),
            {
                **segment.pair_arguments(tiles),
                **segment.state_arguments(states, tiles),
                "p_even": even_sums(segment, states) if outputs.normalize else None,
                "p_out": outputs.out,
                "p_normaliser": outputs.normaliser,
                "p_safe": outputs.safe,
                "num_tiles": num_tiles,
                "NORMALIZE": outputs.normalize,
            },
            tiles.num_warps,
            tiles.num_stages,
        )
    )
