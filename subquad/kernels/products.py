"""The d (d + 1) / 2 products of a vector's entries, for many tokens, row by row.

A loop over d slices: on a CPU, gathering both factors with `index_select` takes 20 times as long (18 against 0.95 ms
for 3 x 64 x 384 entries, one thread), and scattering the gradient with `index_add_` 16 times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor


def products(x: Tensor) -> Tensor:
    """Return `x_i x_j` for `i <= j`, in the order of `torch.triu_indices`.

    Args:
        x: `[..., d, n]`, entries before tokens.

    Returns:
        `[..., d (d + 1) / 2, n]`.
    """
    x = x.contiguous()
    dim, start = x.shape[-2], 0
    out = x.new_empty(*x.shape[:-2], dim * (dim + 1) // 2, x.shape[-1])
    for i in range(dim):
        stop = start + dim - i
        torch.mul(x[..., i : i + 1, :], x[..., i:, :], out=out[..., start:stop, :])
        start = stop
    return out


def products_backward(x: Tensor, d_products: Tensor) -> Tensor:
    """Return the gradient of `x` from the gradient of `products(x)`; same layouts."""
    grad, start = torch.zeros_like(x), 0
    for i in range(x.shape[-2]):
        stop = start + x.shape[-2] - i
        part = d_products[..., start:stop, :]
        grad[..., i, :] += (part * x[..., i:, :]).sum(-2)
        grad[..., i:, :].addcmul_(part, x[..., i : i + 1, :])
        start = stop
    return grad
