"""Device functions that the kernels share. `README.md` one folder up holds the maths, `docs/kernels.md` the design.

Names in the kernels: `p_x` is a pointer, `o_x` a vector of offsets, `m_x` a mask, `b_x` a tile; `BT`, `BS`, `BD`, `BE`
are tile sizes in queries, keys, key width and value width. `d` and `e` are the true widths.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change from call to call: specialising on them (1, or a multiple of 16) would only mean more compiling.
RUNTIME_SIZES = [
    "T",
    "TQ",
    "start",
    "stop",
    "num_chunks",
    "num_tiles",
    "num_pairs",
    "first_reads",
    "HKV",
    "ahead",
    "rows",
    "rows_per_program",
    "row_offset",
    "splits",
    "width",
]


# `normalise.py` has the same two numbers.
RELATIVE_FLOOR = tl.constexpr(1e-6)
NO_KEY = tl.constexpr(1e-30)


@triton.jit
def product_row(i, j, d: tl.constexpr):
    """Return the row of the product `x_i x_j` in the order of `torch.triu_indices(d, d)`; symmetric in i and j."""
    low = tl.minimum(i, j)
    high = tl.maximum(i, j)
    return low * d - (low * (low - 1)) // 2 + high - low


@triton.jit
def load_tile(p_x, row_stride, m_rows, BR: tl.constexpr, width: tl.constexpr, BW: tl.constexpr):
    """Load `[BR, BW]` from `p_x` on, zeros outside the mask and beyond `width`; a row's columns are contiguous."""
    o_cols = tl.arange(0, BW)
    pointers = p_x + tl.arange(0, BR)[:, None] * row_stride + o_cols[None, :]
    if width == BW:
        return tl.load(pointers, mask=m_rows[:, None], other=0.0)
    return tl.load(pointers, mask=m_rows[:, None] & (o_cols < width)[None, :], other=0.0)


@triton.jit
def store_tile(p_x, row_stride, b_x, m_rows, BR: tl.constexpr, width: tl.constexpr, BW: tl.constexpr):
    """Store `[BR, BW]` where the mask is set, without the columns beyond `width`."""
    o_cols = tl.arange(0, BW)
    mask = m_rows[:, None] & (o_cols < width)[None, :]
    pointers = p_x + tl.arange(0, BR)[:, None] * row_stride + o_cols[None, :]
    tl.store(pointers, b_x.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(p_x, rows: tl.constexpr, cols: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Load a contiguous `rows x cols` matrix, padded with zeros to `[BR, BC]`."""
    return load_tile(p_x, cols, tl.arange(0, BR) < rows, BR, cols, BC)


@triton.jit
def load_symmetric(p_x, d: tl.constexpr, BD: tl.constexpr):
    """Load the `d x d` matrix whose upper triangle is stored row by row, padded with zeros to `[BD, BD]`."""
    o_d = tl.arange(0, BD)
    inside = (o_d < d)[:, None] & (o_d < d)[None, :]
    row = tl.where(inside, product_row(o_d[:, None], o_d[None, :], d), 0)
    return tl.load(p_x + row, mask=inside, other=0.0)


@triton.jit
def decay_factor(b_high_t, b_low_t, b_high_s, b_low_s):
    """Return the decay from s to t, from cumulated log2 decays that broadcast against each other.

    They come as two float32 each: the difference keeps 24 bits where that of single float32 would cancel.
    """
    return tl.exp2(tl.minimum((b_high_t - b_high_s) + (b_low_t - b_low_s), 0.0))


@triton.jit
def causal_factor(o_t, b_high_t, b_low_t, o_s, b_high_s, b_low_s, DECAY: tl.constexpr):
    """Return `decay_factor`, 0 for keys after the query; positions and decays broadcast against each other."""
    visible = o_t >= o_s
    if DECAY:
        return tl.where(visible, decay_factor(b_high_t, b_low_t, b_high_s, b_low_s), 0.0)
    return tl.where(visible, 1.0, 0.0)


@triton.jit
def polynomial(b_x, p_coefs, coef_stride, HAS0: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr):
    """Evaluate `c_0 + c_1 x + c_2 x**2`, without the powers that are not there."""
    b_y = tl.zeros_like(b_x)
    if HAS2:
        b_y = b_x * tl.load(p_coefs + 2 * coef_stride)
    if HAS1:
        b_y += tl.load(p_coefs + coef_stride)
    if HAS1 or HAS2:
        b_y *= b_x
    if HAS0:
        b_y += tl.load(p_coefs)
    return b_y


@triton.jit
def polynomial_slope(b_x, p_coefs, coef_stride, HAS1: tl.constexpr, HAS2: tl.constexpr):
    """Evaluate the derivative of `polynomial`."""
    b_y = tl.zeros_like(b_x)
    if HAS2:
        b_y = b_x * (2.0 * tl.load(p_coefs + 2 * coef_stride))
    if HAS1:
        b_y += tl.load(p_coefs + coef_stride)
    return b_y


@triton.jit
def query_products(
    p_x,
    row_stride,
    m_rows,
    p_state,
    p_pairs,
    num_pairs,
    d: tl.constexpr,
    e: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `sum_ij x_i x_j S_ij` for a tile of rows x, `[BR, BE]` float32, S symmetric and stored as packed rows.

    `p_pairs` lists the blocks (i0, j0), i0 <= j0, of the matrix in steps of BP; blocks off the diagonal count twice.
    The factor 2 is exact in any format. A block on the diagonal holds both (i, j) and (j, i), which are one row.
    """
    o_i = tl.arange(0, BP)
    o_p = tl.arange(0, BP * BP)
    o_e = tl.arange(0, BE)
    b_out = tl.zeros([BR, BE], dtype=tl.float32)
    for pair in range(num_pairs):
        i0 = tl.load(p_pairs + 2 * pair)
        j0 = tl.load(p_pairs + 2 * pair + 1)
        p_rows = p_x + tl.arange(0, BR)[:, None] * row_stride
        b_i = tl.load(p_rows + (i0 + o_i)[None, :], mask=m_rows[:, None], other=0.0)
        b_j = tl.load(p_rows + (j0 + o_i)[None, :], mask=m_rows[:, None], other=0.0)
        row = product_row(i0 + o_p // BP, j0 + o_p % BP, d)
        if e == BE:
            b_s = tl.load(p_state + row[:, None] * e + o_e[None, :])
        else:
            b_s = tl.load(p_state + row[:, None] * e + o_e[None, :], mask=(o_e < e)[None, :], other=0.0)
        b_i = b_i.to(b_s.dtype) * tl.where(i0 == j0, 1.0, 2.0).to(b_s.dtype)
        b_phi = tl.reshape(b_i[:, :, None] * b_j.to(b_s.dtype)[:, None, :], [BR, BP * BP])
        b_out = tl.dot(b_phi, b_s, b_out, input_precision=PRECISION)
    return b_out


@triton.jit
def contract_products(
    p_x,
    row_stride,
    m_rows,
    b_y,
    p_state,
    num_columns,
    d: tl.constexpr,
    e: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `2 sum_i x_i (y . S_ij)` over j, the gradient of `query_products` under y: `[BR, BD]` float32."""
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    inside = (o_d < d)[None, :] & (o_e < e)[:, None]
    b_out = tl.zeros([BR, BD], dtype=tl.float32)
    for i in range(num_columns):
        row = product_row(i, o_d, d)
        if d == BD and e == BE:
            b_s = tl.load(p_state + row[None, :] * e + o_e[:, None])
        else:
            b_s = tl.load(p_state + row[None, :] * e + o_e[:, None], mask=inside, other=0.0)
        b_x = tl.load(p_x + tl.arange(0, BR) * row_stride + i, mask=m_rows, other=0.0).to(tl.float32)
        b_out += tl.dot(b_y, b_s, input_precision=PRECISION) * (2.0 * b_x)[:, None]
    return b_out


@triton.jit
def load_queries(
    p_q,
    p_gradient,
    p_normaliser_gradient,
    first_row,
    local_row,
    m_t,
    num_heads,
    d: tl.constexpr,
    e: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Load BS queries of one head and the gradients of what they read, which are 0 where there is no query."""
    b_q = load_tile(p_q + first_row * d, num_heads * d, m_t, BS, d, BD).to(OPERAND)
    b_g = load_tile(p_gradient + local_row * e, e, tl.arange(0, BS) >= 0, BS, e, BE)
    b_g1 = tl.load(p_normaliser_gradient + local_row + tl.arange(0, BS))
    return b_q, b_g, b_g1
