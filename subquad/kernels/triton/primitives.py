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
def add_product(
    b_out,
    p_x,
    x_stride,
    m_rows,
    p_s,
    factor,
    inner_stride: tl.constexpr,
    column_stride: tl.constexpr,
    inner: tl.constexpr,
    columns: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add `factor * x S` to `[BR, BC]` for a tile of rows x and a float32 matrix S, in steps of BK columns of x.

    All of S at once would need more registers than there are.
    """
    o_k = tl.arange(0, BK)
    o_c = tl.arange(0, BC)
    p_rows = p_x + tl.arange(0, BR)[:, None] * x_stride + o_k[None, :]
    p_matrix = p_s + o_k[:, None] * inner_stride + o_c[None, :] * column_stride
    for k in range(0, inner, BK):
        m_k = o_k < inner - k
        b_x = tl.load(p_rows + k, mask=m_rows[:, None] & m_k[None, :], other=0.0)
        b_s = tl.load(p_matrix + k * inner_stride, mask=m_k[:, None] & (o_c < columns)[None, :], other=0.0) * factor
        b_out = tl.dot(b_x.to(OPERAND), b_s.to(OPERAND), b_out, input_precision=PRECISION)
    return b_out


@triton.jit
def bilinear_form(
    p_x,
    x_stride,
    p_y,
    y_stride,
    m_rows,
    p_s,
    inner: tl.constexpr,
    columns: tl.constexpr,
    BR: tl.constexpr,
    BB: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `x^T S y` of each pair of rows x and y of two tiles, `[BR]` float32, block by block."""
    o_b = tl.arange(0, BB)
    o_r = tl.arange(0, BR)
    b_form = tl.zeros([BR], dtype=tl.float32)
    for j in range(0, columns, BB):
        m_j = o_b < columns - j
        b_sx = tl.zeros([BR, BB], dtype=tl.float32)
        for i in range(0, inner, BB):
            m_i = o_b < inner - i
            b_x = tl.load(
                p_x + o_r[:, None] * x_stride + (i + o_b)[None, :], mask=m_rows[:, None] & m_i[None, :], other=0.0
            )
            b_s = tl.load(
                p_s + (i + o_b)[:, None] * columns + (j + o_b)[None, :], mask=m_i[:, None] & m_j[None, :], other=0.0
            )
            b_sx = tl.dot(b_x.to(OPERAND), b_s.to(OPERAND), b_sx, input_precision=PRECISION)
        b_y = tl.load(
            p_y + o_r[:, None] * y_stride + (j + o_b)[None, :], mask=m_rows[:, None] & m_j[None, :], other=0.0
        )
        b_form += tl.sum(b_sx * b_y.to(tl.float32), 1)
    return b_form


@triton.jit
def times_symmetric(p_x, row_stride, m_rows, p_z, d: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Return `x Z` for a tile of rows x, `[BR, BD]` float32, Z symmetric and stored as its upper triangle row by row.

    float32 whatever the operands: sums of weights decide about the guard. In steps of 16 columns of x, since three tf32
    products of the whole tile would need more registers than there are.
    """
    o_k = tl.arange(0, 16)
    o_d = tl.arange(0, BD)
    p_rows = p_x + tl.arange(0, BR)[:, None] * row_stride + o_k[None, :]
    b_out = tl.zeros([BR, BD], dtype=tl.float32)
    for k in range(0, d, 16):
        b_x = tl.load(p_rows + k, mask=m_rows[:, None], other=0.0).to(tl.float32)
        row = product_row((k + o_k)[:, None], o_d[None, :], d)
        b_z = tl.load(p_z + row, mask=(o_d < d)[None, :], other=0.0)
        b_out = tl.dot(b_x, b_z, b_out, input_precision="tf32x3")
    return b_out


@triton.jit
def quadratic_form(p_x, row_stride, m_rows, p_z, d: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr):
    """Return `x^T Z x` of each of a tile of rows x, `[BR]` float32, Z and its precision as in `times_symmetric`.

    Only the blocks of BB x BB on and above the diagonal are read; those above count twice.
    """
    o_b = tl.arange(0, BB)
    p_rows = p_x + tl.arange(0, BR)[:, None] * row_stride + o_b[None, :]
    b_form = tl.zeros([BR], dtype=tl.float32)
    for j in range(0, d, BB):
        m_j = m_rows[:, None] & (o_b < d - j)[None, :]
        b_zx = tl.zeros([BR, BB], dtype=tl.float32)
        for i in range(0, j + BB, BB):
            b_x = tl.load(p_rows + i, mask=m_rows[:, None] & (o_b < d - i)[None, :], other=0.0).to(tl.float32)
            row = product_row((i + o_b)[:, None], (j + o_b)[None, :], d)
            inside = (o_b < d - i)[:, None] & (o_b < d - j)[None, :]
            b_z = tl.load(p_z + row, mask=inside, other=0.0)
            b_zx = tl.dot(b_x * tl.where(i == j, 1.0, 2.0), b_z, b_zx, input_precision="tf32x3")
        b_form += tl.sum(b_zx * tl.load(p_rows + j, mask=m_j, other=0.0).to(tl.float32), 1)
    return b_form


@triton.jit
def trace_symmetric(p_z, d: tl.constexpr, BD: tl.constexpr):
    """Return the trace of a matrix stored as in `times_symmetric`."""
    o_d = tl.arange(0, BD)
    return tl.sum(tl.load(p_z + product_row(o_d, o_d, d), mask=o_d < d, other=0.0), 0)


@triton.jit
def decay_factor(b_high_t, b_low_t, b_high_s, b_low_s):
    """Return the decay from s to t, from cumulated log2 decays that broadcast against each other.

    They come as two float32 each: the difference keeps 24 bits where that of single float32 would cancel.
    """
    return tl.exp2(tl.minimum((b_high_t - b_high_s) + (b_low_t - b_low_s), 0.0))


@triton.jit
def decay_from(p_high, p_low, o_t, high_s, low_s, DECAY: tl.constexpr):
    """Load the cumulated decays at o_t and return the decay since s: loaded where it is used, it takes no registers."""
    if DECAY:
        b_decay = decay_factor(tl.load(p_high + o_t), tl.load(p_low + o_t), high_s, low_s)
    else:
        b_decay = tl.zeros_like(o_t).to(tl.float32) + 1.0
    return b_decay


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
    b_out,
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
    """Add `2 sum_i x_i (y . S_ij)` over j, the gradient of `query_products` under y, to `[BR, BD]` float32."""
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    inside = (o_d < d)[None, :] & (o_e < e)[:, None]
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
