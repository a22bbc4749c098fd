"""Decay factors: every exponent is a sum of terms <= 0, taken inside a chunk in float64 and masked before `exp`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# exp(-1e4) is 0 in float64 too; without this bound one huge finite decay would swallow its neighbours in a sum.
LOWEST_LOG_DECAY = -1e4


class EdgeDecay(NamedTuple):
    """Decay between the tokens of a stretch of n tokens and its two ends; 0 across a reset.

    Attributes:
        from_start: `[B, Hkv, n]`, from what came before the stretch to token t.
        to_end: `[B, Hkv, n]`, from token s to the end of the stretch.
        total: `[B, Hkv]`, from what came before the stretch to its end.
    """

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
    return log_decay.masked_fill(resets, 0.0).clamp(LOWEST_LOG_DECAY, 0.0), resets


def reset_at(log_decay: Tensor | None, starts: Tensor, k: Tensor) -> Tensor:
    """Put a reset where a sequence starts, so that nothing crosses; without a decay all other tokens decay nothing.

    Args:
        log_decay: `[B, T, Hkv]`, or None.
        starts: `[B, T]` bool.
        k: `[B, T, Hkv, d]`, for shape and device.

    Returns:
        `[B, T, Hkv]`.
    """
    if log_decay is None:
        log_decay = k.new_zeros(k.shape[:3], dtype=torch.float32)
    return log_decay.masked_fill(starts[..., None], -torch.inf)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which log decays are summed: float64, but float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def edge_decay(log_decay: Tensor, resets: Tensor) -> EdgeDecay:
    """Compute the decay to and from both ends of a stretch of tokens.

    Args:
        log_decay: `[B, Hkv, n]`, finite, <= 0; its dtype is the result's.
        resets: `[B, Hkv, n]`, True where nothing from before the token may be seen.

    Returns:
        The factors, in [0, 1].
    """
    dtype = log_decay.dtype
    total, segment = _cumulate(log_decay, resets)
    return EdgeDecay(
        from_start=_factor(total, segment == 0, dtype),
        to_end=_factor(total[..., -1:] - total, segment == segment[..., -1:], dtype),
        total=_factor(total[..., -1], segment[..., -1] == 0, dtype),
    )


def pair_log_decay(log_decay: Tensor, num_queries: int) -> Tensor:
    """Compute `L_ts`, the sum of the log decays after s up to t, for the last queries and all keys.

    Args:
        log_decay: `[B, Hkv, T]`; held between `LOWEST_LOG_DECAY` and 0. Its dtype is the result's.
        num_queries: Tq; the queries are the last positions.

    Returns:
        `[B, Hkv, Tq, T]`, <= 0; 0 for keys after the query.
    """
    total = log_decay.clamp(LOWEST_LOG_DECAY, 0.0).to(wide_dtype(log_decay.device)).cumsum(-1)
    return (total[..., -num_queries:, None] - total[..., None, :]).clamp(max=0.0).to(log_decay.dtype)


def pair_decay(log_decay: Tensor, resets: Tensor) -> Tensor:
    """Compute `exp(L_ts)` for every query and key of a stretch of n tokens.

    Args:
        log_decay: `[B, Hkv, n]`, finite, <= 0; its dtype is the result's.
        resets: `[B, Hkv, n]`, True where nothing from before the token may be seen.
    Returns:
        `[B, Hkv, n, n]` (query, key), in [0, 1]; 0 for keys after the query and for keys before a reset.
    """
    total, segment = _cumulate(log_decay, resets)
    visible = (segment[..., :, None] == segment[..., None, :]).tril()
    return _factor(total[..., :, None] - total[..., None, :], visible, log_decay.dtype)


def _cumulate(log_decay: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
    return log_decay.to(wide_dtype(log_decay.device)).cumsum(-1), resets.cumsum(-1)


def _factor(exponent: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp(max=0.0).to(dtype).masked_fill(~visible, -torch.inf).exp()
