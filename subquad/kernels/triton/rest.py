"""The state rows that are few: value rows of powers 0 and 1, normaliser rows of all powers.

They are summed chunk by chunk in parallel, then carried along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.primitives import RUNTIME_SIZES, decay_factor, load_tile, product_row
from subquad.kernels.triton.problem import Carry, Segment

_CARRY_BLOCK = 256


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def sum_rest_kernel(
    p_x,
    p_y,
    p_y1,
    p_high,
    p_low,
    p_coefs,
    p_rest,
    scale,
    T,
    start,
    stop,
    chunk_size,
    num_chunks,
    decay_len,
    HKV: tl.constexpr,
    ahead,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    HAS0: tl.constexpr,
    HAS1: tl.constexpr,
    HAS2: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum one chunk of one head: BC columns of the value rows of powers 0 and 1, and of the normaliser's matrix.

    Forward, x = k, y = v and y1 = the key weight, `[B, T, Hkv, ...]`, decayed to the chunk's end. Backwards, x = q
    `[B, T, H, d]`, y and y1 are the gradients `[B * H, tokens, ...]`, decayed from the chunk's start, and coefficients
    and scale apply.
    """
    sequence = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first_column = tl.program_id(2) * BC
    batch = sequence // HKV
    kv_head = sequence % HKV
    num_heads = HKV * G
    rest: tl.constexpr = HAS0 + HAS1 * d
    rows: tl.constexpr = rest + HAS2 * (d * (d + 1) // 2)
    o_d = tl.arange(0, BD)
    o_c = first_column + tl.arange(0, BC)
    o_local = tl.arange(0, BT)
    b_s0 = tl.zeros([BC], dtype=tl.float32)
    b_s1 = tl.zeros([BD, BC], dtype=tl.float32)
    b_z0 = tl.zeros([BT], dtype=tl.float32)
    b_z1 = tl.zeros([BD], dtype=tl.float32)
    b_z2 = tl.zeros([BD, BC], dtype=tl.float32)
    chunk_start = start + chunk * chunk_size
    chunk_stop = tl.minimum(chunk_start + chunk_size, stop)
    if DECAY:
        p_high += sequence * decay_len
        p_low += sequence * decay_len
    padded_len = num_chunks * chunk_size
    for head in range(G):
        c0 = 1.0
        c1 = 1.0
        c2 = 1.0
        if REVERSE:
            if HAS0:
                c0 = tl.load(p_coefs + kv_head * G + head)
            if HAS1:
                c1 = tl.load(p_coefs + num_heads + kv_head * G + head) * scale
            if HAS2:
                c2 = tl.load(p_coefs + 2 * num_heads + kv_head * G + head) * scale * scale
        for t in range(chunk_start, chunk_stop, BT):
            o_t = t + o_local
            m_t = o_t < chunk_stop
            row = (batch * T + t - ahead) * num_heads + kv_head * G + head
            m_x = m_t & (o_t >= ahead)
            b_x = load_tile(p_x + row * d, num_heads * d, m_x, BT, d, BD)
            if REVERSE:
                row_y = (sequence * G + head) * padded_len + t - start
                stride = 1
            else:
                row_y = row
                stride = num_heads
            b_edge = tl.where(m_t, 1.0, 0.0)
            if DECAY:
                b_high = tl.load(p_high + o_t, mask=m_t, other=0.0)
                b_low = tl.load(p_low + o_t, mask=m_t, other=0.0)
                if REVERSE:
                    b_edge = decay_factor(b_high, b_low, 0.0, 0.0)
                else:
                    last = chunk_start + chunk_size - 1
                    b_edge = decay_factor(tl.load(p_high + last), tl.load(p_low + last), b_high, b_low)
            b_y1 = tl.load(p_y1 + row_y + o_local * stride, mask=m_x, other=0.0) * b_edge
            b_x32 = b_x.to(tl.float32)
            if HAS0 or HAS1:
                p_tile = p_y + row_y * e + o_local[:, None] * (stride * e) + o_c[None, :]
                b_y = tl.load(p_tile, mask=m_x[:, None] & (o_c < e)[None, :], other=0.0).to(tl.float32)
                b_y *= b_edge[:, None]
                if HAS0:
                    b_s0 += tl.sum(b_y, 0) * c0
                    b_z0 += b_y1 * c0
                if HAS1:
                    b_xt = tl.trans(b_x.to(OPERAND))
                    b_s1 += tl.dot(b_xt, b_y.to(OPERAND), input_precision=PRECISION) * c1
                    b_z1 += tl.sum(b_x32 * b_y1[:, None], 0) * c1
            if HAS2:
                p_tile = p_x + row * d + o_local[:, None] * (num_heads * d) + o_c[None, :]
                b_xc = tl.load(p_tile, mask=m_x[:, None] & (o_c < d)[None, :], other=0.0).to(tl.float32)
                b_xc *= (b_y1 * c2)[:, None]
                b_z2 = tl.dot(tl.trans(b_x32), b_xc, b_z2, input_precision="tf32x3")
    p_rest += (sequence * num_chunks + chunk) * (rest * e + rows)
    p_norm = p_rest + rest * e
    if HAS0:
        tl.store(p_rest + o_c, b_s0, mask=o_c < e)
        tl.store(p_norm, tl.sum(b_z0, 0), mask=first_column == 0)
    if HAS1:
        inside = (o_d < d)[:, None] & (o_c < e)[None, :]
        tl.store(p_rest + HAS0 * e + o_d[:, None] * e + o_c[None, :], b_s1, mask=inside)
        tl.store(p_norm + HAS0 + o_d, b_z1, mask=(o_d < d) & (first_column == 0))
    if HAS2:
        upper = (o_d[:, None] <= o_c[None, :]) & (o_c < d)[None, :]
        tl.store(p_norm + rest + product_row(o_d[:, None], o_c[None, :], d), b_z2, mask=upper)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def carry_kernel(
    p_rest,
    p_total,
    p_initial,
    p_final,
    num_chunks,
    width,
    BW: tl.constexpr,
    REVERSE: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Turn the sums of the chunks into the state before each chunk (after each, backwards), in place."""
    sequence = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BW + tl.arange(0, BW)
    mask = o_w < width
    b_state = tl.zeros([BW], dtype=tl.float32)
    if INITIAL:
        b_state = tl.load(p_initial + sequence * width + o_w, mask=mask, other=0.0)
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if REVERSE else step
        p_chunk = p_rest + (sequence * num_chunks + chunk) * width + o_w
        b_added = tl.load(p_chunk, mask=mask, other=0.0)
        tl.store(p_chunk, b_state, mask=mask)
        b_state = b_state * tl.load(p_total + sequence * num_chunks + chunk) + b_added
    if FINAL:
        tl.store(p_final + sequence * width + o_w, b_state, mask=mask)


def sum_rest(segment: Segment, x: Tensor, y: Tensor, y1: Tensor, reverse: bool) -> Tensor:
    """Return the sums of every chunk, laid out as `States.rest`."""
    problem, tile = segment.problem, segment.problem.tiles.sums
    width = problem.num_rest_rows * problem.v.shape[3] + problem.num_rows
    rest = segment.workspace(segment.num_chunks, width, dtype=torch.float32)
    arguments = segment.arguments() | {
        "p_x": x,
        "p_y": y,
        "p_y1": y1,
        "p_coefs": problem.coefs,
        "p_rest": rest,
        "scale": problem.scale,
        "T": x.shape[1],
        "ahead": problem.seq_len - x.shape[1],
        "G": problem.num_groups if reverse else 1,
        "BT": tile.rows,
        "BC": tile.block,
        "REVERSE": reverse,
    }
    columns = max(problem.k.shape[3], problem.v.shape[3])
    grid = (problem.num_states, segment.num_chunks, triton.cdiv(columns, tile.block))
    run(Launch(sum_rest_kernel, grid, arguments, tile.num_warps, tile.num_stages))
    return rest


def carry_rest(
    segment: Segment, rest: Tensor, total: Tensor, initial: Carry | None, final: Carry | None, reverse: bool
) -> None:
    """Carry the sums along the chunks, in place, and write the value rows and normaliser of `final`."""
    problem = segment.problem
    few, width = problem.num_rest_rows, rest.shape[-1]
    joined = None if initial is None else torch.cat([initial.values[:, :few].flatten(1), initial.normaliser], dim=1)
    last = None if final is None else rest.new_empty(rest.shape[0], width)
    run(
        Launch(
            carry_kernel,
            (problem.num_states, triton.cdiv(width, _CARRY_BLOCK)),
            {
                "p_rest": rest,
                "p_total": total,
                "p_initial": joined,
                "p_final": last,
                "num_chunks": segment.num_chunks,
                "width": width,
                "BW": _CARRY_BLOCK,
                "REVERSE": reverse,
                "INITIAL": initial is not None,
                "FINAL": final is not None,
            },
            4,
            1,
        )
    )
    if final is not None and last is not None:
        values = last[:, : width - problem.num_rows]
        final.values[:, :few] = values.unflatten(1, (few, problem.v.shape[3]))
        final.normaliser.copy_(last[:, width - problem.num_rows :])
