"""Depthwise causal convolution on the q, k, v stream, identity at the start."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CausalConv(nn.Module):
    """Depthwise causal convolution with bias and no activation, as in 2Mamba [C]; identity at the start.

    Attributes:
        weight: `[channels, width]` float32; the last tap is the current token's (1 at the start, the others 0).
        bias: `[channels]` float32, 0 at the start.
    """

    def __init__(self, channels: int, width: int) -> None:
        """Create the identity.

        Args:
            channels: number of channels.
            width: taps, the current token's included.
        """
        super().__init__()
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
            earlier = full[:, width - 1 - lag : full.shape[1] - lag]
            if documents is not None:
                same = torch.zeros_like(documents, dtype=torch.bool)
                same[:, lag:] = documents[:, lag:] == documents[:, : documents.shape[1] - lag]
                earlier = earlier * same[..., None].to(x.dtype)
            out = out + earlier * weight[:, -1 - lag]
        return out

    def tail(self, x: Tensor, past: Tensor, real: Tensor | None) -> Tensor:
        """Return the last width - 1 tokens of (past, x), padding zeroed: the next call's `past`."""
        if real is not None:
            x = x * real[..., None].to(x.dtype)
        return torch.cat([past, x], dim=1)[:, -past.shape[1] :].clone()
