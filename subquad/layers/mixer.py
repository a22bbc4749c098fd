"""`Mixer`: the learned parts of one converted layer and the far part they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad.kernels import PolyAttentionOutput, PolyState, WindowOutput, poly_attention
from subquad.layers.cache import far_stream_differs
from subquad.layers.config import MixerConfig
from subquad.layers.conv import CausalConv
from subquad.layers.decay import SoftplusDecay, SoftplusValueStep
from subquad.layers.geometry import LayerGeometry
from subquad.layers.inputs import Buffers, HeadInputs
from subquad.layers.score import PolynomialScore
from subquad.layers.stream import FarStream, WindowStream, past_stream, remember_stream, reset_at_documents

DEFAULT_SHORTEST_TIMESCALE = 64.0
# Sums of squared scores over hundreds of keys reach 1e4: e^-14 keeps a fresh far part at a hundredth of the window.
START_LOG_MIX = -14.0
# An output that an RMS norm has given unit size needs less.
START_LOG_MIX_UNSHARED = -6.0
# Scores of odd degree can be negative, and so can their sum: below this the shared normaliser is not trusted.
MIN_SHARED_NORMALISER = 0.1
RMS_EPS = 1e-6


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
        """Create the parts.

        Args:
            config: which parts.
            geometry: sizes of the converted heads only.
            context_length: longest start of the decay's time constant, where the config does not say.
        """
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
                self.log_mix.fill_(START_LOG_MIX if self.config.normalised else START_LOG_MIX_UNSHARED)
            if self.norm_weight is not None:
                self.norm_weight.fill_(1.0)

    def parts(
        self, inputs: HeadInputs, *, window_only: bool = False
    ) -> tuple[PolyAttentionOutput | None, WindowOutput | None]:
        """Compute the far part and the window, before they are joined.

        Args:
            inputs: the converted heads; their cache is updated.
            window_only: leave the far part out of the result and of the cache.

        Returns:
            The far part (None where nothing left the window) and the window (None for the pure mixer).
        """
        config, buffers = self.config, inputs.buffers
        if not config.window:
            q, k, v, log_decay = self._far_inputs(inputs)
            written = FarStream(k, v, reset_at_documents(log_decay, inputs.sequence, k), inputs.real())
            return self._attend(q, written, buffers), None
        stream = WindowStream(inputs, config.window, config.sinks)
        shared = None
        if buffers is not None and not far_stream_differs(config):
            shared = (buffers["window_keys"], buffers["window_values"])
        rotated = inputs.rotate(inputs.q, inputs.k)
        near = stream.near(*rotated, inputs.v)
        # Nobody reads the far part of the control, or without a cache that of a window longer than the input.
        if window_only or (buffers is None and config.window >= inputs.q.shape[1]):
            return None, near
        q, k, v, log_decay = self._far_inputs(inputs, rotated)
        return self._attend(q, stream.delay(k, v, log_decay, shared), buffers), near

    def _far_inputs(
        self, inputs: HeadInputs, rotated: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the far part's q, k, v and log decay, not yet delayed; `rotated` is the teacher's q and k if known."""
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.conv is not None:
            q, k, v = self._convolve(self.conv, inputs)
        if self.config.rope == "keep":
            q, k = rotated if rotated is not None and self.conv is None else inputs.rotate(q, k)
        if self.value_step is not None:
            v = self.value_step(v, inputs.hidden_states)
        log_decay = None if self.decay is None else self.decay(inputs.hidden_states)
        if log_decay is not None and inputs.sequence.real is not None:
            log_decay = log_decay.masked_fill(~inputs.sequence.real[..., None], 0.0)
        return q, k, v, log_decay

    def _convolve(self, conv: CausalConv, inputs: HeadInputs) -> list[Tensor]:
        heads = (inputs.q, inputs.k, inputs.v)
        flat = torch.cat([x.flatten(2) for x in heads], dim=-1)
        past = flat.new_zeros(flat.shape[0], self.config.conv_width - 1, flat.shape[2])
        if inputs.buffers is not None:
            past = inputs.buffers["conv"].to(flat.dtype)
            inputs.buffers["conv"] = conv.tail(flat, past, inputs.sequence.real).to(inputs.buffers["conv"].dtype)
        mixed = conv(flat, past, inputs.sequence.real, inputs.sequence.documents)
        sizes = [x.shape[2] * x.shape[3] for x in heads]
        return [part.view(x.shape) for part, x in zip(mixed.split(sizes, dim=-1), heads, strict=True)]

    def _attend(self, q: Tensor, written: FarStream, buffers: Buffers | None) -> PolyAttentionOutput:
        """Run the op on what the T steps write, continuing and updating the cache."""
        config = self.config
        state = None
        if buffers is not None and config.linear:
            values = buffers["values"]
            # A mixer without a sum normaliser does not cache one; the op still carries it along.
            state = PolyState(values, buffers.get("normaliser", values.new_zeros(values.shape[:-1])))
        elif buffers is not None:
            remember_stream(buffers, written)
            written = past_stream(buffers)
        far = poly_attention(
            self.score.map_queries(q),
            self.score.map_keys(written.k.to(q.dtype)),
            written.v.to(q.dtype),
            written.log_decay,
            coefs=self.score.coefficients(),
            scale=config.scale,
            key_weight=written.weight[..., None].expand(-1, -1, self.geometry.num_kv_heads).float(),
            normalize=config.normalised and not config.window,
            initial_state=state,
            output_final_state=state is not None,
            precision=config.precision,
        )
        if buffers is not None and far.final_state is not None:
            buffers["values"] = far.final_state.values
            if "normaliser" in buffers:
                buffers["normaliser"] = far.final_state.normaliser
        return far

    def finish(self, far: PolyAttentionOutput | None, near: WindowOutput | None) -> Tensor:
        """Normalise the far part and join it with the window.

        Args:
            far: the far part, None for the window alone.
            near: the window, None for the pure mixer.

        Returns:
            `[B, T, num_heads, head_dim]`; float32 where the far part's numerator is not divided by the sum of weights.
        """
        if far is None:
            assert near is not None, "a mixer has a window or a far part"
            return near.out
        out = far.out if self.norm_weight is None else _rms_norm(far.out, self.norm_weight)
        if near is None:
            return out
        assert self.log_mix is not None, "a mixer with a window weighs its far part"
        if not self.config.normalised:
            return near.out + self.log_mix.exp()[:, None].to(out.dtype) * out
        near_mass, far_unit = self._units(near)
        total = (near_mass + far_unit * far.normaliser).clamp_min(MIN_SHARED_NORMALISER)
        joined = near_mass[..., None] * near.out + far_unit[..., None] * out
        return (joined / total[..., None]).to(near.out.dtype)

    def _units(self, near: WindowOutput) -> tuple[Tensor, Tensor]:
        """Return the window's mass and the unit of the far part's, `[B, T, num_heads]`, up to a common factor."""
        assert self.log_mix is not None, "a mixer with a window weighs its far part"
        if self.config.mix_reference == "near":
            near_mass = torch.ones_like(near.log_normaliser)
            return near_mass, self.log_mix.exp().expand_as(near_mass)
        # Both as multiples of the larger one, so that nothing overflows.
        log_mix = self.log_mix.expand_as(near.log_normaliser)
        largest = torch.maximum(near.log_normaliser, log_mix)
        return (near.log_normaliser - largest).exp(), (log_mix - largest).exp()

    def far_share(self, far: PolyAttentionOutput | None, near: WindowOutput | None) -> Tensor | None:
        """Return the far part's share of the attention mass.

        Args:
            far: the far part, None for the window alone.
            near: the window, None for the pure mixer.

        Returns:
            `[B, T, num_heads]`; below 0 where an odd score's weights sum to less than 0. None where the two share no
            mass: without a window, or without a sum of weights.
        """
        if near is None or not self.config.normalised:
            return None
        if far is None:
            return torch.zeros_like(near.log_normaliser)
        near_mass, far_unit = self._units(near)
        far_mass = far_unit * far.normaliser
        return far_mass / (near_mass + far_mass).clamp_min(MIN_SHARED_NORMALISER)


def _rms_norm(out: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the concatenated heads (Mamba-2S [C])."""
    flat = out.flatten(2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS) * weight.float()
    return flat.view(out.shape).to(out.dtype)
