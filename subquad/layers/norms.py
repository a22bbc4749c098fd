"""Norms: of the mixer's output in place of a sum of weights, and of q and k."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

RMS_EPS = 1e-6


def rms_over_heads(out: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the concatenated heads (Mamba-2S [C]; of the gated output in Mamba-2 [D]).

    Args:
        out: `[B, T, num_heads, head_dim]`.
        weight: `[num_heads * head_dim]`.

    Returns:
        The shape and dtype of `out`; `y / sqrt(mean(y ** 2)) * weight` with the mean over heads and channels.
    """
    return _rms(out.flatten(2), weight).view(out.shape)


def head_norm(kind: str, out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Normalise every head on its own, in place of dividing by the sum of weights (softmax with a norm [A]).

    Each of these is blind to a factor on a head's numerator, hence to the sum of weights itself: it gives the same on
    the numerator and on the weighted mean, up to the epsilon.

    Args:
        kind: `head_l2` (`y / |y|`), `head_rms` (`y / sqrt(mean(y ** 2))`) or `head_layer` (layer norm).
        out: `[B, T, num_heads, head_dim]`, numerator or mean.
        weight: `[num_heads * head_dim]`, a factor on the result.
        bias: the same shape, added at the end (`head_layer` only).

    Returns:
        The shape and dtype of `out`.
    """
    shaped = weight.view(out.shape[2:])
    if kind == "head_rms":
        return _rms(out, shaped)
    wide = out if out.dtype == torch.float64 else out.float()
    if kind == "head_l2":
        normed = functional.normalize(wide, dim=-1, eps=RMS_EPS)
    else:
        normed = functional.layer_norm(wide, wide.shape[-1:], eps=RMS_EPS)
    normed = normed * shaped.to(wide.dtype)
    if bias is not None:
        normed = normed + bias.view(out.shape[2:]).to(wide.dtype)
    return normed.to(out.dtype)


class QKNorm(nn.Module):
    """RMS norm over every head's q and k, before the rotary embedding (Forgetting Transformer Pro [E]).

    A norm keeps a vector's direction and drops its length, which pretrained scores need: it has no identity start. The
    lengths it gives are constants, `sqrt(head_dim)` at the start, and learned per head and channel.

    Attributes:
        query_weight: `[num_heads, head_dim]` float32, 1 at the start.
        key_weight: `[num_kv_heads, head_dim]` float32, 1 at the start.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Create the start.

        Args:
            num_heads: query heads.
            num_kv_heads: key/value heads.
            head_dim: width of a head.
        """
        super().__init__()
        self.query_weight = nn.Parameter(torch.ones(num_heads, head_dim))
        self.key_weight = nn.Parameter(torch.ones(num_kv_heads, head_dim))

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            self.query_weight.fill_(1.0)
            self.key_weight.fill_(1.0)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed q `[B, T, num_heads, head_dim]` and k `[B, T, num_kv_heads, head_dim]`, same dtypes."""
        return _rms(q, self.query_weight), _rms(k, self.key_weight)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)
    return (normed * weight.to(wide.dtype)).to(x.dtype)
