"""The scan of the value rows of power 2 over the chunks of a segment, in registers, a block of rows per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.prepare import ScanInput
from subquad.kernels.triton.primitives import RUNTIME_SIZES, product_row
from subquad.kernels.triton.problem import Carry, Segment, block_pairs, padded, scan_tile


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def scan_products_kernel(
    p_xt,
    p_y,
    p_total,
    p_initial,
    p_products,
    p_final,
    p_states,
    p_partial,
    p_pairs,
    num_chunks,
    padded_len,
    chunk_size,
    rows,
    row_offset,
    G: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    BE: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BT: tl.constexpr,
    REVERSE: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scan a block of BI x BJ product rows of one head over the chunks.

    `p_xt [heads, d, tokens]`, `p_y [heads, tokens, e]` carry all factors and are 0 beyond the end, so there is nothing
    to mask. Backwards, the G heads of a group are summed here (no atomics), and `p_partial` receives
    `<gradient, state>` of these rows per chunk, for the gradient of the decay.
    """
    sequence = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    D: tl.constexpr = d * (d + 1) // 2
    i0 = tl.load(p_pairs + 2 * pair)
    j0 = tl.load(p_pairs + 2 * pair + 1)
    o_r = tl.arange(0, BI * BJ)
    r_i = i0 + o_r // BJ
    r_j = j0 + o_r % BJ
    o_e = tl.arange(0, BE)
    row = product_row(r_i, r_j, d)
    # A block on the diagonal holds (i, j) and (j, i): the row is stored, and counted, once.
    mask = (r_i <= r_j)[:, None] & (o_e < e)[None, :]
    many = tl.where(r_i == r_j, 1.0, 2.0)
    o_state = row[:, None] * e + o_e[None, :]
    o_i = (i0 + tl.arange(0, BI)) * padded_len
    o_j = (j0 + tl.arange(0, BJ)) * padded_len
    o_t = tl.arange(0, BT)
    b_state = tl.zeros([BI * BJ, BE], dtype=tl.float32)
    o_carry = (sequence * rows + row_offset) * e
    if INITIAL:
        # Both copies of a row on a diagonal block go on: they are equal, so only the store is masked.
        b_state = tl.load(p_initial + o_carry + o_state, mask=(o_e < e)[None, :], other=0.0)
        if REVERSE:
            b_state = b_state / many[:, None]
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if REVERSE else step
        o_chunk = (sequence * num_chunks + chunk) * D * e
        tl.store(p_products + o_chunk + o_state, b_state.to(p_products.dtype.element_ty), mask=mask)
        total = tl.load(p_total + sequence * num_chunks + chunk)
        if REVERSE:
            b_before = tl.load(p_states + o_chunk + o_state, mask=mask, other=0.0).to(tl.float32)
            partial = tl.sum(tl.sum(b_before * b_state, 1) * many, 0) * total
            tl.store(p_partial + (sequence * num_chunks + chunk) * tl.num_programs(1) + pair, partial)
        b_state *= total
        for head in range(G):
            p_x = p_xt + (sequence * G + head) * d * padded_len + chunk * chunk_size
            p_yh = p_y + ((sequence * G + head) * padded_len + chunk * chunk_size) * e
            for t in range(0, chunk_size, BT):
                b_i = tl.load(p_x + o_i[:, None] + (t + o_t)[None, :])
                b_j = tl.load(p_x + o_j[:, None] + (t + o_t)[None, :])
                p_tile = p_yh + (t + o_t)[:, None] * e + o_e[None, :]
                b_y = tl.load(p_tile) if e == BE else tl.load(p_tile, mask=(o_e < e)[None, :], other=0.0)
                b_phi = tl.reshape(b_i[:, None, :] * b_j[None, :, :], [BI * BJ, BT])
                b_state = tl.dot(b_phi, b_y, b_state, input_precision=PRECISION)
    if FINAL:
        if REVERSE:
            b_state = b_state * many[:, None]
        tl.store(p_final + o_carry + o_state, b_state, mask=mask)


def scan_products(
    segment: Segment,
    scan: ScanInput,
    total: Tensor,
    initial: Carry | None,
    final: Carry | None,
    states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Scan the value rows of power 2; backwards where `states` are given, with the partial inner products."""
    problem, tile = segment.problem, scan_tile(segment.problem)
    head_dim, value_dim = problem.k.shape[3], problem.v.shape[3]
    reverse = states is not None
    pairs = block_pairs(head_dim, tile.block_i, tile.block_j, problem.k.device)
    products = segment.workspace(segment.num_chunks, head_dim * (head_dim + 1) // 2, value_dim)
    partial = segment.workspace(segment.num_chunks if reverse else 0, pairs.shape[0], dtype=torch.float32)
    run(
        Launch(
            scan_products_kernel,
            (problem.num_states, pairs.shape[0]),
            {
                "p_xt": scan.xt,
                "p_y": scan.y,
                "p_total": total,
                "p_initial": None if initial is None else initial.values,
                "p_products": products,
                "p_final": None if final is None else final.values,
                "p_states": states,
                "p_partial": partial,
                "p_pairs": pairs,
                "num_chunks": segment.num_chunks,
                "padded_len": segment.padded_len,
                "chunk_size": problem.chunk_size,
                "rows": problem.num_rows,
                "row_offset": problem.num_rest_rows,
                "G": problem.num_groups if reverse else 1,
                "d": head_dim,
                "e": value_dim,
                "BE": padded(value_dim),
                "BI": tile.block_i,
                "BJ": tile.block_j,
                "BT": tile.tokens,
                "REVERSE": reverse,
                "INITIAL": initial is not None,
                "FINAL": final is not None,
                "PRECISION": problem.operands.precision,
            },
            tile.num_warps,
            tile.num_stages,
        )
    )
    return products, partial
