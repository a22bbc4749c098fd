"""Depthwise causal convolution on the q, k, v stream, identity at the start where it has no activation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class CausalConv(nn.Module):
    """Depthwise causal convolution with bias, as in 2Mamba [C]; identity at the start.

    With `activation="silu"` (Mamba-2 [D]) the convolution is the identity at the start, but SiLU follows, which no
    start can undo: it halves entries near 0, cuts negative ones to at least -0.28 and keeps large positive ones, so
    that scores and values of pretrained heads change from the first token on.

    Attributes:
        weight: `[channels, width]` float32; the last tap is the current token's (1 at the start, the others 0).
        bias: `[channels]` float32, 0 at the start.
    """

    def __init__(self, channels: int, width: int, activation: str = "none") -> None:
        """Create the identity.

        Args:
            channels: number of channels.
            width: taps, the current token's included.
            activation: `none` or `silu`.
        """
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.zeros(channels, width))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the identity."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, -1] = 1.0
            self.bias.zero_()

    def forward(self, x: Tensor, past: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
        """Convolve along dim 1; padding and other documents are not seen.

        Args:
            x: `[B, T, channels]`.
            past: `[B, width - 1, channels]`, the tokens before x; zeros at the start.
            real: `[B, T]` bool, False for padding; None is all real.
            documents: `[B, T]` ids; a token sees its own document only; None is one document.

        Returns:
            `[B, T, channels]`, dtype of x.
        """
        width = self.weight.shape[1]
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if real is not None:
            x = x * real[..., None].to(x.dtype)
        full = torch.cat([past, x], dim=1)
        out = x * weight[:, -1] + bias
        for lag in range(1, width):
            out = out + earlier_tokens(full, width - 1, lag, documents) * weight[:, -1 - lag]
        return functional.silu(out) if self.activation == "silu" else out

    def tail(self, x: Tensor, past: Tensor, real: Tensor | None) -> Tensor:
        """Return the last width - 1 tokens of (past, x), padding zeroed: the next call's `past`."""
        if real is not None:
            x = x * real[..., None].to(x.dtype)
        return torch.cat([past, x], dim=1)[:, -past.shape[1] :].clone()


def earlier_tokens(full: Tensor, num_past: int, lag: int, documents: Tensor | None) -> Tensor:
    """Return for every new token the one `lag` before it, 0 where that belongs to another document.

    Args:
        full: `[B, num_past + T, ...]`: the cached tokens, then the new ones.
        num_past: cached tokens, at least `lag`.
        lag: how far back, >= 1.
        documents: `[B, T]` ids; None is one document.

    Returns:
        `[B, T, ...]`.
    """
    earlier = full[:, num_past - lag : full.shape[1] - lag]
    if documents is None:
        return earlier
    same = torch.zeros_like(documents, dtype=torch.bool)
    same[:, lag:] = documents[:, lag:] == documents[:, : max(documents.shape[1] - lag, 0)]
    return earlier * same.view(*same.shape, *[1] * (full.dim() - 2)).to(full.dtype)
