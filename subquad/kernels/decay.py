"""Decay factors. Every exponent is a sum of terms <= 0, taken chunk-locally in float64, and masked before `exp`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# exp(-1e4) is 0 in float64 too; without the bound one huge finite decay would swallow its neighbours in a cumulative sum.
_LOWEST_LOG_DECAY = -1e4


class ChunkDecay(NamedTuple):
    """Decay factors of one chunk of n tokens, all in [0, 1].

    Attributes:
        pair: `[B, Hkv, n, n]`, `exp(L_ts)` for `s <= t` in one segment, else 0.
        from_start: `[B, Hkv, n]`, from the state before the chunk to token t.
        to_end: `[B, Hkv, n]`, from token s to the end of the chunk.
        total: `[B, Hkv]`, from the state before the chunk to its end.
    """

    pair: Tensor
    from_start: Tensor
    to_end: Tensor
    total: Tensor


def split_resets(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Take the resets out of a log decay, because `-inf` may never enter a difference.

    Args:
        log_decay: Per-token log decay; values above 0 count as 0.

    Returns:
        The finite log decay (0 at a reset, and with gradient 0 there) and the boolean mask of the resets.
    """
    resets = log_decay == -torch.inf
    return log_decay.masked_fill(resets, 0.0).clamp(_LOWEST_LOG_DECAY, 0.0), resets


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which log decays are summed: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _factor(exponent: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp(max=0.0).to(dtype).masked_fill(~visible, -torch.inf).exp()


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return `[num_queries, num_keys]`, True where a query sees a key; the queries are the last positions."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def chunk_decay(log_decay: Tensor, resets: Tensor, num_queries: int) -> ChunkDecay:
    """Compute the decay factors of one chunk (differentiable).

    Args:
        log_decay: `[B, Hkv, n]`, finite, <= 0; its dtype is the result's.
        resets: `[B, Hkv, n]`, True where nothing from before the token may be seen.
        num_queries: How many of the last tokens are queried; `pair` and `from_start` have that many rows.

    Returns:
        The factors.
    """
    dtype = log_decay.dtype
    total = log_decay.to(wide_dtype(log_decay.device)).cumsum(-1)
    segment = resets.cumsum(-1)
    rows = slice(log_decay.shape[-1] - num_queries, None)
    visible = segment[..., rows, None] == segment[..., None, :]
    visible = visible & causal_mask(num_queries, log_decay.shape[-1], log_decay.device)
    return ChunkDecay(
        pair=_factor(total[..., rows, None] - total[..., None, :], visible, dtype),
        from_start=_factor(total[..., rows], segment[..., rows] == 0, dtype),
        to_end=_factor(total[..., -1:] - total, segment[..., -1:] == segment, dtype),
        total=_factor(total[..., -1], segment[..., -1] == 0, dtype),
    )
