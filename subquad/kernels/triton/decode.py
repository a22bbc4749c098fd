"""Decoding: a few tokens that read, and may update, a state. Bound by the state's bytes, which are touched once.

All state rows look alike here: with a constant 1 appended to the key, row (i, j) holds the product of entries i and j,
so the linear rows are (i, 1) and the constant row is (1, 1).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.prepare import cumulated_decay
from subquad.kernels.triton.primitives import (
    NO_KEY,
    RELATIVE_FLOOR,
    RUNTIME_SIZES,
    causal_factor,
    decay_factor,
    load_tile,
    polynomial,
)
from subquad.kernels.triton.problem import Carry, Outputs, padded
from subquad.kernels.triton.tuning import num_processors

MAX_TOKENS = 64
MAX_QUERIES = 16
_PROGRAMS_PER_PROCESSOR = 8
_WARPS = 4


@triton.jit
def _entries(p_x, b_index, mask, d: tl.constexpr):
    """Gather entries of a vector with a 1 appended."""
    b_x = tl.load(p_x + b_index, mask=mask & (b_index < d), other=0.0).to(tl.float32)
    return tl.where(b_index < d, b_x, 1.0)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def read_state_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_high,
    p_low,
    p_coefs,
    p_values,
    p_normaliser,
    p_new_values,
    p_new_normaliser,
    p_table,
    p_read,
    p_read_normaliser,
    p_even,
    scale,
    T,
    TQ,
    rows,
    rows_per_program,
    HKV,
    decay_len,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    DECAY: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Read a stretch of state rows for all queries of a key/value head and, with WRITE, add the new tokens to it.

    `p_read [B * Hkv, splits, BM, e]` and `p_read_normaliser [B * Hkv, splits, BM]` receive the sums over the stretch,
    `p_even [B * Hkv, splits, 2]` the normaliser's constant row and the sum of its squares' rows, for the guard. The
    queries (token, head of the group) read the state as it is before the new tokens.
    """
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    batch = sequence // HKV
    kv_head = sequence % HKV
    num_heads = HKV * G
    o_m = tl.arange(0, BM)
    o_e = tl.arange(0, BE)
    m_m = o_m < TQ * G
    head = kv_head * G + o_m % G
    o_q = ((batch * TQ + o_m // G) * num_heads + head) * d
    b_c0 = tl.load(p_coefs + head, mask=m_m, other=0.0)
    b_c1 = tl.load(p_coefs + num_heads + head, mask=m_m, other=0.0) * scale
    b_c2 = tl.load(p_coefs + 2 * num_heads + head, mask=m_m, other=0.0) * scale * scale
    b_out = tl.zeros([BM, BR, BE], dtype=tl.float32)
    b_norm = tl.zeros([BM, BR], dtype=tl.float32)
    b_constant = tl.zeros([BR], dtype=tl.float32)
    b_squares = tl.zeros([BR], dtype=tl.float32)
    total = 1.0
    high_end = 0.0
    low_end = 0.0
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        high_end = tl.load(p_high + T - 1)
        low_end = tl.load(p_low + T - 1)
        total = decay_factor(high_end, low_end, 0.0, 0.0)
    first = split * rows_per_program
    for r in range(first, tl.minimum(first + rows_per_program, rows), BR):
        o_r = r + tl.arange(0, BR)
        m_r = o_r < rows
        b_i = tl.load(p_table + 2 * o_r, mask=m_r, other=d)
        b_j = tl.load(p_table + 2 * o_r + 1, mask=m_r, other=d)
        mask = m_r[:, None] & (o_e < e)[None, :]
        o_state = (sequence * rows + o_r)[:, None] * e + o_e[None, :]
        b_values = tl.load(p_values + o_state, mask=mask, other=0.0)
        b_z = tl.load(p_normaliser + sequence * rows + o_r, mask=m_r, other=0.0)
        m_q = m_m[:, None] & m_r[None, :]
        b_phi = _entries(p_q + o_q[:, None], b_i[None, :], m_q, d) * _entries(p_q + o_q[:, None], b_j[None, :], m_q, d)
        b_coef = tl.where(b_j[None, :] < d, b_c2[:, None], tl.where(b_i[None, :] < d, b_c1[:, None], b_c0[:, None]))
        b_many = tl.where((b_i != b_j) & (b_j < d), 2.0, 1.0)
        b_phi = tl.where(m_q, b_phi * b_coef * b_many[None, :], 0.0)
        b_out += b_phi[:, :, None] * b_values[None, :, :]
        b_norm += b_phi * b_z[None, :]
        b_constant += tl.where(b_i == d, b_z, 0.0)
        b_squares += tl.where((b_i == b_j) & (b_i < d), b_z, 0.0)
        if WRITE:
            b_values *= total
            b_z *= total
            for t in range(T):
                key = (batch * T + t) * HKV + kv_head
                b_phi_k = _entries(p_k + key * d, b_i, m_r, d) * _entries(p_k + key * d, b_j, m_r, d)
                if DECAY:
                    b_phi_k *= decay_factor(high_end, low_end, tl.load(p_high + t), tl.load(p_low + t))
                b_v = tl.load(p_v + key * e + o_e, mask=o_e < e, other=0.0).to(tl.float32)
                b_values += b_phi_k[:, None] * b_v[None, :]
                b_z += b_phi_k * tl.load(p_weight + key)
            tl.store(p_new_values + o_state, b_values, mask=mask)
            tl.store(p_new_normaliser + sequence * rows + o_r, b_z, mask=m_r)
    o_part = (sequence * splits + split) * BM + o_m
    o_read = o_part[:, None] * e + o_e[None, :]
    tl.store(p_read + o_read, tl.sum(b_out, 1), mask=m_m[:, None] & (o_e < e)[None, :])
    tl.store(p_read_normaliser + o_part, tl.sum(b_norm, 1), mask=m_m)
    tl.store(p_even + (sequence * splits + split) * 2, tl.sum(b_constant, 0))
    tl.store(p_even + (sequence * splits + split) * 2 + 1, tl.sum(b_squares, 0))


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def combine_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_high,
    p_low,
    p_coefs,
    p_read,
    p_read_normaliser,
    p_even,
    p_out,
    p_normaliser,
    scale,
    T,
    TQ,
    splits,
    HKV,
    decay_len,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BP: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Sum what one query read from the stretches of the state, add the new tokens, divide."""
    sequence = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    batch = sequence // HKV
    kv_head = sequence % HKV
    num_heads = HKV * G
    head = kv_head * G + query % G
    token = query // G
    position = T - TQ + token
    o_e = tl.arange(0, BE)
    o_d = tl.arange(0, BD)
    o_s = tl.arange(0, BT)
    m_s = o_s < T
    p_coefs += head
    b_out = tl.zeros([BE], dtype=tl.float32)
    norm = 0.0
    constant = 0.0
    squares = 0.0
    for first in range(0, splits, BP):
        o_p = first + tl.arange(0, BP)
        m_p = o_p < splits
        o_part = (sequence * splits + o_p) * BM + query
        inside = m_p[:, None] & (o_e < e)[None, :]
        b_out += tl.sum(tl.load(p_read + o_part[:, None] * e + o_e[None, :], mask=inside, other=0.0), 0)
        norm += tl.sum(tl.load(p_read_normaliser + o_part, mask=m_p, other=0.0), 0)
        constant += tl.sum(tl.load(p_even + (sequence * splits + o_p) * 2, mask=m_p, other=0.0), 0)
        squares += tl.sum(tl.load(p_even + (sequence * splits + o_p) * 2 + 1, mask=m_p, other=0.0), 0)
    b_q = tl.load(p_q + ((batch * TQ + token) * num_heads + head) * d + o_d, mask=o_d < d, other=0.0).to(tl.float32)
    size = tl.sum(b_q * b_q, 0) * scale * scale
    first_key = batch * T * HKV + kv_head
    b_k = load_tile(p_k + first_key * d, HKV * d, m_s, BT, d, BD).to(tl.float32)
    b_v = load_tile(p_v + first_key * e, HKV * e, m_s, BT, e, BE).to(tl.float32)
    b_weight = tl.load(p_weight + first_key + o_s * HKV, mask=m_s, other=0.0)
    b_high = tl.zeros([BT], dtype=tl.float32)
    b_low = tl.zeros([BT], dtype=tl.float32)
    high = 0.0
    low = 0.0
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
        b_high = tl.load(p_high + o_s, mask=m_s, other=0.0)
        b_low = tl.load(p_low + o_s, mask=m_s, other=0.0)
        high = tl.load(p_high + position)
        low = tl.load(p_low + position)
        before = decay_factor(high, low, 0.0, 0.0)
        b_out *= before
        norm *= before
        constant *= before
        squares *= before
    b_decay = causal_factor(position, high, low, o_s, b_high, b_low, DECAY)
    b_x = tl.sum(b_k * b_q[None, :], 1) * scale
    b_w = polynomial(b_x, p_coefs, num_heads, HAS0, HAS1, HAS2) * b_decay
    b_out += tl.sum(b_w[:, None] * b_v, 0)
    norm += tl.sum(b_w * b_weight, 0)
    row = (batch * TQ + token) * num_heads + head
    tl.store(p_normaliser + row, norm)
    if NORMALIZE:
        squares += tl.sum(b_decay * b_weight * tl.sum(b_k * b_k, 1), 0)
        constant += tl.sum(b_decay * b_weight, 0)
        bound = tl.abs(tl.load(p_coefs)) * constant
        bound += tl.abs(tl.load(p_coefs + 2 * num_heads)) * size * squares
        floor = bound * RELATIVE_FLOOR
        safe = tl.where(tl.abs(norm) < floor, tl.where(norm < 0, -floor, floor), norm)
        b_out = tl.where(tl.abs(norm) > NO_KEY, b_out / safe, 0.0)
    tl.store(p_out + row * e + o_e, b_out.to(p_out.dtype.element_ty), mask=o_e < e)


@functools.lru_cache(maxsize=64)
def row_table(head_dim: int, orders: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the entries (i, j) whose product each state row holds, `[rows, 2]` int32; entry `head_dim` is 1."""
    one = head_dim
    pairs: list[tuple[int, int]] = []
    for order in orders:
        if order == 0:
            pairs.append((one, one))
        elif order == 1:
            pairs += [(i, one) for i in range(head_dim)]
        else:
            pairs += [(i, j) for i in range(head_dim) for j in range(i, head_dim)]
    with torch.inference_mode(False):
        return torch.tensor(pairs, dtype=torch.int32, device=device)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor | None,
    coefs: Tensor,
    orders: tuple[int, ...],
    scale: float,
    state: Carry,
    normalize: bool,
    output_final: bool,
) -> tuple[Outputs, Carry | None]:
    """Let a few tokens read the state and each other.

    Args:
        q: `[B, Tq, H, d]` contiguous, like the next two; `Tq * G` at most 16.
        k: `[B, T, Hkv, d]`, T at most 64.
        v: `[B, T, Hkv, e]`, multiplied by the key weight.
        weight: `[B, T, Hkv]` float32.
        log_decay: `[B, T, Hkv]` float32, finite, or None.
        coefs: `[3, H]` float32.
        orders: The powers that have state rows.
        scale: Factor on q . k.
        state: The state before the first token.
        normalize: Whether to divide by the sum of weights.
        output_final: Whether to return the state after the last token (the given one is not changed).

    Returns:
        The outputs and, if asked for, the new state.
    """
    (batch_size, num_queries, num_heads, head_dim), (_, num_tokens, num_kv_heads, value_dim) = q.shape, v.shape
    groups, states, rows = num_heads // num_kv_heads, batch_size * num_kv_heads, state.normaliser.shape[1]
    high, low = (None, None) if log_decay is None else cumulated_decay(log_decay, num_tokens)
    block_m = 1 << (num_queries * groups - 1).bit_length()
    # As many rows as leave a program's sums in registers.
    block_rows = min(32, 4096 // (block_m * padded(value_dim)))
    splits = min(triton.cdiv(rows, block_rows), triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors(q.device), states))
    rows_per_program = triton.cdiv(triton.cdiv(rows, splits), block_rows) * block_rows
    splits = triton.cdiv(rows, rows_per_program)
    final = Carry(*(torch.empty_like(part) for part in state)) if output_final else None
    outputs = Outputs(
        out=q.new_empty(*q.shape[:3], value_dim, dtype=q.dtype if normalize else torch.float32),
        normaliser=weight.new_empty(q.shape[:3]),
        safe=weight.new_empty(0),
        normalize=normalize,
    )
    arguments = {
        "p_q": q,
        "p_k": k,
        "p_v": v,
        "p_weight": weight,
        "p_high": high,
        "p_low": low,
        "p_coefs": coefs,
        "p_values": state.values,
        "p_normaliser": state.normaliser,
        "p_new_values": None if final is None else final.values,
        "p_new_normaliser": None if final is None else final.normaliser,
        "p_table": row_table(head_dim, orders, q.device),
        "p_read": weight.new_empty(states, splits, block_m, value_dim),
        "p_read_normaliser": weight.new_empty(states, splits, block_m),
        "p_even": weight.new_empty(states, splits, 2),
        "scale": scale,
        "T": num_tokens,
        "TQ": num_queries,
        "rows": rows,
        "rows_per_program": rows_per_program,
        "splits": splits,
        "HKV": num_kv_heads,
        "decay_len": num_tokens,
        "G": groups,
        "d": head_dim,
        "e": value_dim,
        "BM": block_m,
        "BR": block_rows,
        "BT": padded(num_tokens),
        "BD": padded(head_dim),
        "BE": padded(value_dim),
        "BP": 32,
        **{f"HAS{order}": int(order in orders) for order in range(3)},
        "DECAY": high is not None,
        "WRITE": output_final,
        "NORMALIZE": normalize,
    }
    run(Launch(read_state_kernel, (states, splits), arguments, _WARPS, 2))
    own = arguments | {"p_out": outputs.out, "p_normaliser": outputs.normaliser}
    run(Launch(combine_kernel, (states, num_queries * groups), own, _WARPS, 1))
    return outputs, final
