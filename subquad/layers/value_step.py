"""Factors on v, one per token and key/value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from subquad.layers.from_input import SOFTPLUS_ONE, PerHead

# Cottention's exponent starts at sigmoid(0.5) = 0.62 [B].
START_POSITION_EXPONENT = 0.5


class SoftplusValueStep(PerHead):
    """`v_t <- softplus(W x_t + b) * v_t` per key/value head (Mamba-2S [C]); a factor of 1 at the start."""

    start_bias = SOFTPLUS_ONE

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the factors `[B, T, num_kv_heads]`, > 0, float32, from `[B, T, hidden_size]`."""
        return functional.softplus(self.linear(hidden_states))


class PositionValueStep(nn.Module):
    """`v_s <- v_s / s ** sigmoid(m)` per key/value head (Cottention [B]), s the position of the value's own token.

    s counts the real tokens of the token's own document, from 1: padding does not count, a packed document starts anew,
    and a cache continues the count. It stands in for a normaliser: the sum over t tokens grows like a power of t.
    Both of the paper's models divide by the number of tokens that the value's own token sees. In its decoder that is
    the position, in its BERT the number of real tokens of the whole sequence (the sum of the attention mask, in its
    public code), so that every value of a sequence has the same factor.

    Attributes:
        exponent: `[num_kv_heads]` float32, m; 0.5 at the start, as in [B].
    """

    def __init__(self, num_kv_heads: int) -> None:
        """Create the start.

        Args:
            num_kv_heads: exponents.
        """
        super().__init__()
        self.exponent = nn.Parameter(torch.zeros(num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the paper's start."""
        with torch.no_grad():
            self.exponent.fill_(START_POSITION_EXPONENT)

    def forward(self, rank: Tensor) -> Tensor:
        """Return the factors `[B, T, num_kv_heads]`, in (0, 1], float32.

        Args:
            rank: `[B, T]` real tokens that each position sees: those of the document up to it (0 only before its first
                real token), or in an encoder all.

        Returns:
            `rank ** -sigmoid(m)`.
        """
        log_rank = rank.clamp_min(1).to(self.exponent.dtype).log()
        return (-self.exponent.sigmoid() * log_rank[..., None]).exp()
