"""`PerHead`: one number per token and key/value head, from the layer's input."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

# softplus(log(e - 1)) = 1
SOFTPLUS_ONE = math.log(math.expm1(1.0))


class PerHead(nn.Module):
    """`u_t = W x_t + b` per key/value head, in float32; what a subclass makes of u is its own.

    Attributes:
        weight: `[num_kv_heads, hidden_size]` float32, W; 0 at the start, which so is the same for every token.
        bias: `[num_kv_heads]` float32, b; `start_bias` at the start.
        start_bias: start of every b.
    """

    start_bias: ClassVar[float] = 0.0

    def __init__(self, hidden_size: int, num_kv_heads: int) -> None:
        """Create the start.

        Args:
            hidden_size: width of the layer's input.
            num_kv_heads: numbers per token.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_kv_heads, hidden_size))
        self.bias = nn.Parameter(torch.full((num_kv_heads,), self.start_bias))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the start, the same for every token."""
        self.weight.zero_()
        self.bias.fill_(self.start_bias)

    def linear(self, hidden_states: Tensor) -> Tensor:
        """Return u `[B, T, num_kv_heads]` float32, also under autocast, from `[B, T, hidden_size]`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return functional.linear(hidden_states.float(), self.weight.float(), self.bias.float())
