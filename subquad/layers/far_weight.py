"""`FarWeight`: how much the far part counts beside the window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from subquad.kernels import WindowOutput
from subquad.layers.config import MixerConfig
from subquad.layers.geometry import LayerGeometry

# Sums of squared scores over hundreds of keys reach 1e4: e^-14 keeps a fresh far part at a hundredth of the window.
START_LOG_MIX = -14.0
# An output that an RMS norm has given unit size needs less.
START_LOG_MIX_UNSHARED = -6.0
# A sum of scores grows with the text. The odds of a teacher's far share grow with the first tokens that leave the
# window, and from 128 to 1,500 tokens hardly (SmolLM2-135M, `docs/log.md`): as n / (n + 128). So a text longer than
# those of calibration does not drown its window.
LENGTH_SCALE = 128.0
START_LENGTH_EXPONENT = -1.0
START_MEAN_LOG_LENGTH = 6.5
SMALLEST_MASS = 1e-6
# A query of padding sees nothing: the log of its window's mass is -inf.
_LOWEST_LOG = -1e4
# The weight is a factor beside a window of mass 1: e^60 leaves nothing of it and still is a float32.
_LARGEST_LOG_WEIGHT = 60.0


class FarInputs(NamedTuple):
    """What the far part's weight may follow.

    Attributes:
        hidden_states: `[B, T, hidden_size]`, the layer's input.
        tokens: `[B, T]`, real tokens that have left the window; below 1 where none has.
    """

    hidden_states: Tensor
    tokens: Tensor


class FarWeight(nn.Module):
    """The log weight u of a unit of far mass, per head: `log_mix + a log Z_t + b log S_t + c log(n_t + 128) + W x_t`.

    Z is the window's mass (the sum of e^logit over window and sinks), S the far part's own sum of weights, n the number
    of tokens in it, x the layer's input. With `mix_reference: near` u counts in multiples of Z, so that a = b = 0, the
    start, give a far share that a match in the window does not move. c starts at -1, since S grows with the text.
    A teacher's far share does follow them: of the log ratio of its far mass to its window's mass, S and n explain 46 %
    and all three 65 % of the variance within a head (SmolLM2-135M, 1,024 tokens, mean over heads; `docs/log.md`).

    Each log is taken as the difference from its mean at calibration, which leaves log_mix its meaning and the exponents
    well-conditioned.

    Attributes:
        log_mix: `[num_heads]` float32.
        exponents: `[3, num_heads]` float32, a, b and c; 0, 0 and -1 at the start; None without `mix_by_mass`.
        means: `[3, num_heads]` float32, the means of the logs at calibration; before it 0, 0 and 6.5; None without
            `mix_by_mass`.
        input_weight: `[num_heads, hidden_size]` float32, W, 0 at the start; None without `mix_by_input`.
    """

    means: Tensor | None

    def __init__(self, config: MixerConfig, geometry: LayerGeometry) -> None:
        """Create the constant weight.

        Args:
            config: the mixer, with a window.
            geometry: sizes of the converted heads only.
        """
        super().__init__()
        self.config = config
        heads = geometry.num_heads
        self.log_mix = nn.Parameter(torch.zeros(heads))
        self.exponents = nn.Parameter(torch.zeros(3, heads)) if config.mix_by_mass else None
        self.register_buffer("means", torch.zeros(3, heads) if config.mix_by_mass else None)
        self.input_weight = nn.Parameter(torch.zeros(heads, geometry.hidden_size)) if config.mix_by_input else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the far part small against the window, so that a fresh conversion is close to the window alone."""
        with torch.no_grad():
            self.log_mix.fill_(START_LOG_MIX if self.config.normalised else START_LOG_MIX_UNSHARED)
            for tensor in (self.exponents, self.means, self.input_weight):
                if tensor is not None:
                    tensor.zero_()
            if self.exponents is not None and self.means is not None:
                self.exponents[2] = START_LENGTH_EXPONENT
                self.means[2] = START_MEAN_LOG_LENGTH

    def forward(self, near: WindowOutput, mass: Tensor | None, inputs: FarInputs) -> Tensor:
        """Return log u.

        Args:
            near: the window.
            mass: `[B, T, num_heads]`, S; None where the mixer has no sum of weights.
            inputs: what else it may follow.

        Returns:
            `[B, T, num_heads]` float32.
        """
        weight = self.log_mix.expand_as(near.log_normaliser)
        if self.exponents is not None and self.means is not None:
            logs = self.logs(near, mass, inputs)
            weight = weight + ((logs - self.means[:, None, None]) * self.exponents[:, None, None]).sum(0)
        if self.input_weight is not None:
            with torch.autocast(near.out.device.type, enabled=False):
                weight = weight + nn.functional.linear(inputs.hidden_states.float(), self.input_weight.float())
        return weight.clamp_max(_LARGEST_LOG_WEIGHT)

    def logs(self, near: WindowOutput, mass: Tensor | None, inputs: FarInputs) -> Tensor:
        """Return log Z, log S and log (n + 128), `[3, B, T, num_heads]` float32; arguments as for `forward`."""
        assert mass is not None, "mix_by_mass goes with a sum of weights"
        tokens = (inputs.tokens.clamp_min(0) + LENGTH_SCALE).log()[..., None].expand_as(near.log_normaliser)
        window = near.log_normaliser.float().clamp_min(_LOWEST_LOG)
        return torch.stack([window, mass.abs().clamp_min(SMALLEST_MASS).log(), tokens])
