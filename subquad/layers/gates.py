"""The output gate, the write gate and the token shift of keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from subquad.layers.conv import earlier_tokens
from subquad.layers.from_input import PerHead
from subquad.layers.geometry import LayerGeometry

GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": functional.silu}
# silu(1.2784645) = 1: the gate is exactly open. A sigmoid never is: 0.9933 at 5, where it can still learn to close.
OPEN_GATE_BIAS = {"sigmoid": 5.0, "silu": 1.278464542761074}
# A shift of sigmoid(-5) = 0.7 %: [E] starts at one half, which blurs pretrained keys.
START_SHIFT_BIAS = -5.0


class OutputGate(nn.Module):
    """`y <- y * g(W x + b)` per channel, from the layer's input x, before the output projection.

    g is a sigmoid (Forgetting Transformer Pro [E], the gate variant of [A]) or SiLU (Mamba-2 [D]). The papers start
    with a random W and no b. Here `W = 0` and b opens the gate: silu exactly (a factor of 1), a sigmoid to 0.9933.

    Attributes:
        weight: `[num_heads * head_dim, hidden_size]` float32, 0 at the start.
        bias: `[num_heads * head_dim]` float32.
    """

    def __init__(self, kind: str, geometry: LayerGeometry) -> None:
        """Create the open gate.

        Args:
            kind: `sigmoid` or `silu`.
            geometry: sizes of the converted heads only.
        """
        super().__init__()
        self.kind = kind
        channels = geometry.num_heads * geometry.head_dim
        self.weight = nn.Parameter(torch.zeros(channels, geometry.hidden_size))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Open the gate for every token."""
        with torch.no_grad():
            self.weight.zero_()
            self.bias.fill_(OPEN_GATE_BIAS[self.kind])

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the factors `[B, T, num_heads * head_dim]`, dtype of the input `[B, T, hidden_size]`."""
        weight, bias = self.weight.to(hidden_states.dtype), self.bias.to(hidden_states.dtype)
        return GATES[self.kind](functional.linear(hidden_states, weight, bias))


class WriteGate(PerHead):
    """`w_ts <- i_s w_ts` with `i_s = sigmoid(W x_s + b)` per key/value head: how much of a token is written at all.

    A squared score gives a key that matches about 1 / (1 + N / d) of the weight among N that do not, so that recall
    needs distractors that are hardly written. Here `W = 0` and `b = 0`: all tokens are written alike, by one half,
    which a sum of weights, or the far part's weight beside a window, takes back.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the factors `[B, T, num_kv_heads]` in (0, 1), float32, from `[B, T, hidden_size]`."""
        return self.linear(hidden_states).sigmoid()


class TokenShift(nn.Module):
    """`k_t <- a_t k_{t-1} + (1 - a_t) k_t` with `a_t = sigmoid(W x_t + b)` per head, and likewise v with its own W, b.

    The data-dependent token shift of Forgetting Transformer Pro [E], which has no b: its shift starts at one half. Here
    `W = 0` and `b = -5`, a shift of 0.7 %. The token before a document's first one, and padding, count as 0.

    Attributes:
        weight: `[2 * num_kv_heads, hidden_size]` float32, 0 at the start; the keys' rows, then the values'.
        bias: `[2 * num_kv_heads]` float32, -5 at the start.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int) -> None:
        """Create the start.

        Args:
            hidden_size: width of the layer's input.
            num_kv_heads: key/value heads.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * num_kv_heads, hidden_size))
        self.bias = nn.Parameter(torch.zeros(2 * num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the small shift."""
        with torch.no_grad():
            self.weight.zero_()
            self.bias.fill_(START_SHIFT_BIAS)

    def forward(self, kv: Tensor, past: Tensor, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        """Shift keys and values by part of a token.

        Args:
            kv: `[B, T, 2 * num_kv_heads, head_dim]`: keys, then values; padding zeroed.
            past: `[B, 1, 2 * num_kv_heads, head_dim]`, the token before; zeros at the start.
            hidden_states: `[B, T, hidden_size]`, the layer's input.
            documents: `[B, T]` ids; None is one document.

        Returns:
            The shape and dtype of `kv`.
        """
        weight, bias = self.weight.to(hidden_states.dtype), self.bias.to(hidden_states.dtype)
        share = functional.linear(hidden_states, weight, bias).sigmoid()[..., None].to(kv.dtype)
        before = earlier_tokens(torch.cat([past, kv], dim=1), 1, 1, documents)
        return share * before + (1 - share) * kv
