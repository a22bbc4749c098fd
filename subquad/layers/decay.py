"""Per-token decay and value step, one number per key/value head, from the layer's input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class SoftplusDecay(nn.Module):
    """`log a_t = -softplus(W x_t + b)` per key/value head (2Mamba [C]), independent of the token at the start.

    The papers start at a = 0.5, which forgets everything within ten tokens and is fatal for pretrained weights; here
    `W = 0` and `b` is set so that `a = exp(-1 / T)` with time constants T log-spaced over the heads.

    Attributes:
        weight: `[num_kv_heads, hidden_size]` float32.
        bias: `[num_kv_heads]` float32.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int, timescale: tuple[float, float]) -> None:
        """Create the start.

        Args:
            hidden_size: width of the layer's input.
            num_kv_heads: decays per token.
            timescale: (shortest, longest) time constant in tokens.
        """
        super().__init__()
        self.timescale = timescale
        self.weight = nn.Parameter(torch.zeros(num_kv_heads, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W to 0 and the time constants log-spaced between the two ends of `timescale`."""
        short, long = self.timescale
        with torch.no_grad():
            self.weight.zero_()
            self.bias.copy_(timescale_bias(torch.logspace(math.log10(short), math.log10(long), self.bias.numel())))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `log_decay` `[B, T, num_kv_heads]`, natural log, <= 0, float32, from `[B, T, hidden_size]`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return -functional.softplus(
                functional.linear(hidden_states.float(), self.weight.float(), self.bias.float())
            )


def timescale_bias(timescale: Tensor) -> Tensor:
    """Return the bias b with `exp(-softplus(b)) = exp(-1 / timescale)`; `timescale` > 0 in tokens, inf is no decay."""
    return torch.log(torch.expm1(1.0 / timescale)).clamp(min=-20.0)


class SoftplusValueStep(nn.Module):
    """`v_t <- softplus(W x_t + b) * v_t` per key/value head (Mamba-2S [C]); a factor of 1 at the start.

    Attributes:
        weight: `[num_kv_heads, hidden_size]` float32, 0 at the start.
        bias: `[num_kv_heads]` float32, log(e - 1) at the start.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int) -> None:
        """Create the start.

        Args:
            hidden_size: width of the layer's input.
            num_kv_heads: factors per token.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_kv_heads, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a factor of one for every token."""
        with torch.no_grad():
            self.weight.zero_()
            self.bias.fill_(math.log(math.expm1(1.0)))

    def forward(self, v: Tensor, hidden_states: Tensor) -> Tensor:
        """Return v `[B, T, num_kv_heads, value_head_dim]` scaled per token and head, same dtype."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            step = functional.softplus(functional.linear(hidden_states.float(), self.weight.float(), self.bias.float()))
        return v * step[..., None].to(v.dtype)
