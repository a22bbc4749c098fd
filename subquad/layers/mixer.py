"""`Mixer`: the learned parts of one converted layer and the far part they compute."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from subquad.kernels import PolyAttentionOutput, PolyState, WindowOutput, poly_attention
from subquad.layers.config import MixerConfig
from subquad.layers.conv import CausalConv
from subquad.layers.decay import SoftplusDecay, SoftplusValueStep
from subquad.layers.geometry import LayerGeometry
from subquad.layers.score import PolynomialScore

DEFAULT_SHORTEST_TIMESCALE = 64.0
START_LOG_MIX = -8.0
# Scores of odd degree can be negative, and so can their sum: below this the shared normaliser is not trusted.
MIN_SHARED_NORMALISER = 0.1
RMS_EPS = 1e-6


class FarStream(NamedTuple):
    """Keys, values, decays and write weights, in the order in which the far part reads them.

    Attributes:
        k: `[B, T, num_kv_heads, head_dim]`.
        v: `[B, T, num_kv_heads, head_dim]`.
        log_decay: `[B, T, num_kv_heads]` float32, or None.
        weight: `[B, T]` bool, False where nothing is written.
    """

    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    weight: Tensor


class Mixer(nn.Module):
    """The new parameters of a converted layer (float32) and the far part they define.

    Attributes:
        config: the parts this mixer has.
        geometry: sizes of the converted heads only.
        score: temperature, offset and q/k maps.
        conv: causal convolution of the stream, or None.
        decay: per-token decay, or None.
        value_step: per-token factor on v, or None.
        log_mix: `[num_heads]` float32, log weight of the far part against the window; None without a window.
        norm_weight: `[num_heads * head_dim]` float32 of the RMS norm, or None.
    """

    def __init__(self, config: MixerConfig, geometry: LayerGeometry, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.score = PolynomialScore(config, geometry)
        self.conv = CausalConv((heads + 2 * kv_heads) * dim, config.conv_width) if config.conv_width > 1 else None
        timescale = config.decay_timescale or (DEFAULT_SHORTEST_TIMESCALE, max(float(context_length), 64.0))
        self.decay = SoftplusDecay(geometry.hidden_size, kv_heads, timescale) if config.decay == "softplus" else None
        self.value_step = SoftplusValueStep(geometry.hidden_size, kv_heads) if config.value_step == "softplus" else None
        self.log_mix = nn.Parameter(torch.zeros(heads)) if config.window else None
        self.norm_weight = nn.Parameter(torch.ones(heads * dim)) if config.normaliser == "rms" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the far part small against the window, so that a fresh conversion is close to the window alone."""
        with torch.no_grad():
            if self.log_mix is not None:
                self.log_mix.fill_(START_LOG_MIX)
            if self.norm_weight is not None:
                self.norm_weight.fill_(1.0)

    def attend(
        self, q: Tensor, stream: FarStream, past: FarStream | None, state: PolyState | None, keep_state: bool
    ) -> PolyAttentionOutput:
        """Run the far part.

        Args:
            q: `[B, T, num_heads, head_dim]`.
            stream: what the T steps write, already delayed by the window.
            past: everything written before, for scores without a fixed-size state.
            state: the recurrent state before the first step.
            keep_state: whether to return the state after the last step.

        Returns:
            Numerator and normaliser when a window will be joined, the output otherwise.
        """
        config = self.config
        k, v, log_decay, weight = stream
        if past is not None:
            k, v, weight = (torch.cat(pair, dim=1) for pair in ((past.k, k), (past.v, v), (past.weight, weight)))
            log_decay = None if log_decay is None else torch.cat([past.log_decay, log_decay], dim=1)
        return poly_attention(
            self.score.map_queries(q),
            self.score.map_keys(k),
            v,
            log_decay,
            coefs=self.score.coefficients(),
            scale=config.scale,
            key_weight=weight[..., None].expand(-1, -1, self.geometry.num_kv_heads).float(),
            normalize=config.normalised and not config.window,
            initial_state=state,
            output_final_state=keep_state,
        )

    def finish(self, far: PolyAttentionOutput | None, near: WindowOutput | None) -> Tensor:
        """Normalise the far part and join it with the window.

        Args:
            far: the far part, None for the window alone.
            near: the window, None for the pure mixer.

        Returns:
            `[B, T, num_heads, head_dim]`.
        """
        if far is None:
            return near.out
        out = self._rms_norm(far.out) if self.norm_weight is not None else far.out
        if near is None:
            return out
        if not self.config.normalised:
            return near.out + self.log_mix.exp()[:, None].to(out.dtype) * out
        return self._join(out, far.normaliser, near)

    def _join(self, numerator: Tensor, normaliser: Tensor, near: WindowOutput) -> Tensor:
        """Share one normaliser: both parts as multiples of the larger one, so that nothing overflows."""
        if self.config.mix_reference == "near":
            near_mass = torch.ones_like(near.log_normaliser)
            far_unit = self.log_mix.exp().expand_as(near_mass)
        else:
            log_mix = self.log_mix.expand_as(near.log_normaliser)
            largest = torch.maximum(near.log_normaliser, log_mix)
            near_mass, far_unit = (near.log_normaliser - largest).exp(), (log_mix - largest).exp()
        total = (near_mass + far_unit * normaliser).clamp_min(MIN_SHARED_NORMALISER)
        joined = near_mass[..., None] * near.out + far_unit[..., None] * numerator
        return (joined / total[..., None]).to(near.out.dtype)

    def _rms_norm(self, out: Tensor) -> Tensor:
        flat = out.flatten(2).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS) * self.norm_weight.float()
        return flat.view(out.shape).to(out.dtype)
