"""Per-token decays, one number per key/value head, from the layer's input.

The papers train from scratch and start by forgetting within ten tokens, which is fatal for pretrained weights: here
every decay starts with `W = 0` and a time constant T per head, `a = exp(-1 / T)`, whatever its form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from subquad.layers.config import MixerConfig
from subquad.layers.from_input import SOFTPLUS_ONE, PerHead

DEFAULT_SHORTEST_TIMESCALE = 64.0
# An exp score starts as its teacher: after this many contexts a token still counts e^-1.
EXP_TIMESCALE_CONTEXTS = 16.0


class SoftplusDecay(PerHead):
    """`log a_t = -softplus(W x_t + b)` per key/value head (2Mamba [C]), independent of the token at the start.

    The papers start at a = 0.5; here `W = 0` and `b` is set so that `a = exp(-1 / T)` with time constants T log-spaced
    over the heads.

    Attributes:
        timescale: (shortest, longest) time constant at the start, in tokens.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int, timescale: tuple[float, float]) -> None:
        """Create the start.

        Args:
            hidden_size: width of the layer's input.
            num_kv_heads: decays per token.
            timescale: (shortest, longest) time constant in tokens.
        """
        super().__init__(hidden_size, num_kv_heads)
        self.timescale = timescale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W to 0 and the time constants log-spaced between the two ends of `timescale`."""
        super().reset_parameters()
        self.set_timescale(log_spaced(self.timescale, self.bias.numel()))

    @torch.no_grad()
    def set_timescale(self, timescale: Tensor) -> None:
        """Set the time constant `[num_kv_heads]` in tokens, > 0, inf for no decay, as long as W is 0."""
        self.bias.copy_(timescale_bias(timescale))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `log_decay` `[B, T, num_kv_heads]`, natural log, <= 0, float32, from `[B, T, hidden_size]`."""
        return -functional.softplus(self.linear(hidden_states))


class LogSigmoidDecay(SoftplusDecay):
    """`log a_t = logsigmoid(W x_t + b)` per key/value head (Forgetting Transformer [E]).

    This is the softplus form with the signs of W and b turned, `logsigmoid(u) = -softplus(-u)`: a large b forgets
    nothing. [E] has one gate per query head, which is the same without grouped queries.
    """

    @torch.no_grad()
    def set_timescale(self, timescale: Tensor) -> None:
        """Set the time constant `[num_kv_heads]` in tokens, > 0, inf for no decay, as long as W is 0."""
        self.bias.copy_(-timescale_bias(timescale))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `log_decay` `[B, T, num_kv_heads]`, natural log, <= 0, float32, from `[B, T, hidden_size]`."""
        return functional.logsigmoid(self.linear(hidden_states))


class Mamba2Decay(PerHead):
    """`a_t = exp(-exp(A_log) dt_t)` with `dt_t = softplus(W x_t + b)` per key/value head (Mamba-2 [D]).

    With `value_step: softplus` the same dt scales the values, `v_t <- dt_t v_t`, as the discretisation has it. [D]
    starts with dt in 0.001 ... 0.1 and A in 1 ... 16; here dt starts at 1, so that pretrained values are kept, and
    `exp(A_log) = 1 / T` sets the time constants T, log-spaced over the heads.

    Attributes:
        timescale: (shortest, longest) time constant at the start, in tokens.
        log_rate: `[num_kv_heads]` float32, A_log; `-log T` at the start.
    """

    start_bias = SOFTPLUS_ONE

    def __init__(self, hidden_size: int, num_kv_heads: int, timescale: tuple[float, float]) -> None:
        """Create the start.

        Args:
            hidden_size: width of the layer's input.
            num_kv_heads: decays per token.
            timescale: (shortest, longest) time constant in tokens.
        """
        super().__init__(hidden_size, num_kv_heads)
        self.timescale = timescale
        self.log_rate = nn.Parameter(torch.zeros(num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set dt to 1 for every token and the time constants log-spaced between the two ends of `timescale`."""
        super().reset_parameters()
        self.set_timescale(log_spaced(self.timescale, self.bias.numel()))

    @torch.no_grad()
    def set_timescale(self, timescale: Tensor) -> None:
        """Set the time constant `[num_kv_heads]` in tokens, > 0, inf for no decay, as long as dt is 1."""
        self.log_rate.copy_(-timescale.log().clamp(max=-_LOWEST_BIAS))

    def step(self, hidden_states: Tensor) -> Tensor:
        """Return dt `[B, T, num_kv_heads]`, > 0, float32, from `[B, T, hidden_size]`."""
        return functional.softplus(self.linear(hidden_states))

    def of_step(self, step: Tensor) -> Tensor:
        """Return `log_decay` `[B, T, num_kv_heads]`, natural log, <= 0, float32, of dt."""
        return -self.log_rate.to(step.dtype).exp() * step

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `log_decay` `[B, T, num_kv_heads]`, natural log, <= 0, float32, from `[B, T, hidden_size]`."""
        return self.of_step(self.step(hidden_states))


Decay = SoftplusDecay | Mamba2Decay
DECAYS: dict[str, type[SoftplusDecay] | type[Mamba2Decay]] = {
    "softplus": SoftplusDecay,
    "logsigmoid": LogSigmoidDecay,
    "mamba2": Mamba2Decay,
}
# Where no decay is asked for: e^-20 per token is nothing over any context, and still finite.
_LOWEST_BIAS = -20.0


def timescale_bias(timescale: Tensor) -> Tensor:
    """Return the bias b with `exp(-softplus(b)) = exp(-1 / timescale)`; `timescale` > 0 in tokens, inf is no decay."""
    return torch.log(torch.expm1(1.0 / timescale)).clamp(min=_LOWEST_BIAS)


def log_spaced(timescale: tuple[float, float], count: int) -> Tensor:
    """Return `[count]` time constants, log-spaced from the shortest to the longest."""
    return torch.logspace(math.log10(timescale[0]), math.log10(timescale[1]), count)


def start_timescale(config: MixerConfig, context_length: int) -> tuple[float, float]:
    """Return the (shortest, longest) start of the decay's time constant in tokens."""
    if config.decay_timescale is not None:
        return config.decay_timescale
    if config.score == "exp":
        return (EXP_TIMESCALE_CONTEXTS * context_length,) * 2
    return DEFAULT_SHORTEST_TIMESCALE, max(float(context_length), DEFAULT_SHORTEST_TIMESCALE)
