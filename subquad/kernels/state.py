"""The fixed-size state of a polynomial score and the packing of keys and queries into its rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

MAX_STATE_ORDER = 2

Coefs = tuple[float | Tensor, ...]


class PolyState(NamedTuple):
    """The state of one layer: what all tokens seen so far contribute to the queries to come.

    Rows are, in this order and only where the power's coefficient is not an exact `0.0`: one constant row (power 0),
    `d` rows with the key (power 1), `d (d + 1) / 2` rows with the products `k_i k_j`, `i <= j`, in the order of
    `torch.triu_indices(d, d)` (power 2). They hold raw decayed sums: multiplicities, scale and coefficients are applied
    on the query side, so a state does not depend on them.

    Attributes:
        values: `[B, Hkv, rows, e]`, `sum_s key_weight_s exp(L_ts) phi(k_s) v_s^T`. float32
            (float64 for float64 inputs).
        normaliser: `[B, Hkv, rows]`, the same sum without `v_s`.
    """

    values: Tensor
    normaliser: Tensor


def active_orders(coefs: Coefs) -> tuple[int, ...]:
    """Return the powers whose coefficient is not an exact number 0 (a tensor always counts, whatever it holds)."""
    return tuple(n for n, coef in enumerate(coefs) if isinstance(coef, Tensor) or coef != 0)


def order_rows(head_dim: int, order: int) -> int:
    """Return the number of distinct products of `order` (at most 2) out of `head_dim` key entries."""
    return (1, head_dim, head_dim * (head_dim + 1) // 2)[order]


def num_rows(head_dim: int, orders: tuple[int, ...]) -> int:
    """Return the number of state rows.

    Args:
        head_dim: Width d of a key.
        orders: Powers whose rows are kept, each at most 2.

    Returns:
        1, d and d(d+1)/2 rows for powers 0, 1, 2, summed over `orders`.
    """
    return sum(order_rows(head_dim, order) for order in orders)


def row_slices(head_dim: int, orders: tuple[int, ...]) -> dict[int, slice]:
    """Return which rows belong to each power, in the order in which they are stored."""
    slices, start = {}, 0
    for order in orders:
        stop = start + order_rows(head_dim, order)
        slices[order] = slice(start, stop)
        start = stop
    return slices


def state_numel(num_kv_heads: int, head_dim: int, value_head_dim: int, orders: tuple[int, ...]) -> int:
    """Return how many numbers one sequence's state holds: `num_kv_heads * rows * (value_head_dim + 1)`."""
    return num_kv_heads * num_rows(head_dim, orders) * (value_head_dim + 1)


def state_bytes(num_kv_heads: int, head_dim: int, value_head_dim: int, orders: tuple[int, ...]) -> int:
    """Return the bytes of one sequence's float32 state (values and normaliser)."""
    return 4 * state_numel(num_kv_heads, head_dim, value_head_dim, orders)


def zero_state(
    batch_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    orders: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> PolyState:
    """Return the state before the first token."""
    shape = (batch_size, num_kv_heads, num_rows(head_dim, orders))
    return PolyState(
        torch.zeros(*shape, value_head_dim, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    )


def join_state(state: PolyState) -> Tensor:
    """Return `[B, Hkv, rows, e + 1]`: the normaliser as the last column of the values."""
    return torch.cat([state.values, state.normaliser.unsqueeze(-1)], dim=-1)


def split_state(joined: Tensor) -> PolyState:
    """Undo `join_state`; the parts own their memory, so that holding one does not hold the other."""
    return PolyState(joined[..., :-1].contiguous(), joined[..., -1].contiguous())


class _UpperTriangle(NamedTuple):
    """The upper triangle of a d x d matrix, row by row: flat positions, multiplicities, where the diagonal stands."""

    flat: Tensor
    multiplicity: Tensor
    diagonal: Tensor


@functools.lru_cache(maxsize=32)
def _upper_triangle(head_dim: int, device: torch.device) -> _UpperTriangle:
    # Outside inference mode: a cached inference tensor could not take part in autograd later on.
    with torch.inference_mode(False):
        rows, cols = torch.triu_indices(head_dim, head_dim, device=device)
        square = rows == cols
        return _UpperTriangle(
            rows * head_dim + cols, torch.where(square, 1.0, 2.0).double(), square.nonzero().squeeze(-1)
        )


def multiplicity(head_dim: int, like: Tensor) -> Tensor:
    """Return `[d (d + 1) / 2]` in the dtype of `like`: 1 for rows `k_i k_i`, 2 for rows `k_i k_j` (also `k_j k_i`)."""
    return _upper_triangle(head_dim, like.device).multiplicity.to(like.dtype)


def square_rows(head_dim: int, device: torch.device) -> Tensor:
    """Return `[d]`: which of the rows of power 2 hold the squares `k_i k_i`."""
    return _upper_triangle(head_dim, device).diagonal


def product_rows_within(head_dim: int, wider: int, orders: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `[rows]`: where the rows of a state stand in that of keys padded with zeros from `head_dim` to `wider`."""
    rows, start = [], 0
    for order in orders:
        upper = torch.triu_indices(wider, wider, device=device)
        inside = (
            (upper < head_dim).all(0)
            if order == 2
            else torch.arange(order_rows(wider, order), device=device) < (order_rows(head_dim, order))
        )
        rows.append(inside.nonzero().squeeze(-1) + start)
        start += order_rows(wider, order)
    return torch.cat(rows)


def key_features(k: Tensor, orders: tuple[int, ...]) -> Tensor:
    """Pack keys into state rows (differentiable).

    Args:
        k: `[..., d]`.
        orders: Powers whose rows are kept.

    Returns:
        `[..., rows]`: `[1; k; k_i k_j (i <= j)]`, without multiplicities.
    """
    parts = []
    for order in orders:
        if order == 0:
            parts.append(torch.ones_like(k[..., :1]))
        elif order == 1:
            parts.append(k)
        else:
            # One gather from the outer product: for a few tokens, four times as fast as gathering both factors.
            outer = (k.unsqueeze(-1) * k.unsqueeze(-2)).flatten(-2)
            parts.append(outer[..., _upper_triangle(k.shape[-1], k.device).flat])
    return torch.cat(parts, dim=-1)


def query_features(q: Tensor, coefs: Tensor, orders: tuple[int, ...]) -> Tensor:
    """Pack queries so that `query_features(q) . key_features(k) = sum_n coefs_n (q . k)**n` (differentiable).

    Args:
        q: `[..., d]`, already multiplied by the scale.
        coefs: `[len(orders), ...]`, each entry broadcastable to the leading dimensions of `q`.
        orders: Powers whose rows are kept.

    Returns:
        `[..., rows]`.
    """
    features = key_features(q, orders)
    parts = []
    for coef, (order, rows) in zip(coefs, row_slices(q.shape[-1], orders).items(), strict=True):
        part = features[..., rows] * coef.unsqueeze(-1)
        parts.append(part * multiplicity(q.shape[-1], q) if order == 2 else part)
    return torch.cat(parts, dim=-1)
