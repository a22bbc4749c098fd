"""`Mixer`: the learned parts of one converted layer and the far part they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad.kernels import PolyState, exp_attention, poly_attention
from subquad.layers.cache import far_stream_differs
from subquad.layers.config import MixerConfig
from subquad.layers.conv import CausalConv
from subquad.layers.decay import DECAYS, Decay, Mamba2Decay, start_timescale
from subquad.layers.far_weight import SMALLEST_MASS, FarInputs, FarWeight
from subquad.layers.gates import OutputGate, TokenShift, WriteGate
from subquad.layers.geometry import LayerGeometry
from subquad.layers.inputs import Buffers, HeadInputs
from subquad.layers.kept_keys import KeptStream, KeyScore
from subquad.layers.mixer_parts import ExactPart, FarHeads, MixerParts, Reach
from subquad.layers.norms import QKNorm, head_norm, rms_over_heads
from subquad.layers.score import ScoreMap
from subquad.layers.stream import (
    FarStream,
    WindowStream,
    count_tokens,
    past_stream,
    remember_stream,
    reset_at_documents,
    visible_tokens,
)
from subquad.layers.value_step import PositionValueStep, SoftplusValueStep

# Scores of odd degree can be negative, and so can their sum: below this the shared normaliser is not trusted.
MIN_SHARED_NORMALISER = 0.1
_NORMS_OVER_HEADS = ("rms", "gated_rms")
_HEAD_NORMS = ("head_l2", "head_rms", "head_layer")


class Mixer(nn.Module):
    """The new parameters of a converted layer (float32) and the far part they define.

    Attributes:
        config: the parts this mixer has.
        geometry: sizes of the converted heads only.
        score: temperature, offset, q/k maps and feature map.
        shift: token shift of k and v, or None.
        conv: causal convolution of the stream, or None.
        qk_norm: RMS norm of q and k, or None.
        decay: per-token decay, or None.
        value_step: factor on v, or None (with `decay: mamba2` the softplus step is the decay's).
        write_gate: how much of each token is written, or None.
        far_weight: how much the far part counts beside the window; None without a window.
        key_score: which keys stay exact behind the window, or None.
        norm_weight: `[num_heads * head_dim]` float32 of the output's norm, or None.
        norm_bias: the same of a layer norm, or None.
        skip: `[num_heads]` float32, D of Mamba-2 [D]: `y_t <- y_t + D v_t` (v before its step), 0 at the start, since
            softmax has no skip; or None.
        gate: output gate, or None.
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
        heads, kv_heads, dim, hidden = (
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.hidden_size,
        )
        self.score = ScoreMap(config, geometry)
        self.shift = TokenShift(hidden, kv_heads) if config.kv_shift else None
        channels = (heads + 2 * kv_heads) * dim
        width = config.conv_width
        self.conv = CausalConv(channels, width, config.conv_activation) if width > 1 else None
        self.qk_norm = QKNorm(heads, kv_heads, dim) if config.qk_norm else None
        self.decay: Decay | None = None
        if config.decay != "none":
            self.decay = DECAYS[config.decay](hidden, kv_heads, start_timescale(config, context_length))
        own_step = config.value_step == "softplus" and config.decay != "mamba2"
        self.value_step = SoftplusValueStep(hidden, kv_heads) if own_step else None
        self.position_step = PositionValueStep(kv_heads) if config.value_step == "position" else None
        self.write_gate = WriteGate(hidden, kv_heads) if config.write_gate else None
        self.far_weight = FarWeight(config, geometry) if config.window else None
        self.key_score = KeyScore(geometry) if config.kept_keys else None
        normed = config.normaliser in (*_NORMS_OVER_HEADS, *_HEAD_NORMS)
        self.norm_weight = nn.Parameter(torch.ones(heads * dim)) if normed else None
        self.norm_bias = nn.Parameter(torch.zeros(heads * dim)) if config.normaliser == "head_layer" else None
        self.skip = nn.Parameter(torch.zeros(heads)) if config.skip else None
        self.gate = None if config.output_gate == "none" else OutputGate(config.output_gate, geometry)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the start of the parts that are no modules of their own."""
        with torch.no_grad():
            if self.norm_weight is not None:
                self.norm_weight.fill_(1.0)
            for parameter in (self.norm_bias, self.skip):
                if parameter is not None:
                    parameter.zero_()

    def parts(self, inputs: HeadInputs, reach: Reach = "all", exact: ExactPart | None = None) -> MixerParts:
        """Compute the far part and the window, before they are joined.

        Args:
            inputs: the converted heads; their cache is updated.
            reach: `exact_only` leaves the far part out of the result and of the cache, `window_only` the kept keys too.
            exact: `exact_part` of the same inputs, where it is known and there is no cache.

        Returns:
            Everything `finish` needs.
        """
        config, buffers = self.config, inputs.buffers
        gate = None if self.gate is None else self.gate(inputs.hidden_states).view(inputs.q.shape)
        near = None
        if config.window:
            exact = self.exact_part(inputs, reach) if exact is None else exact
            near = exact.near
            # Nobody reads the far part of the control, or without a cache that of a window longer than the input.
            if exact.reach != "all" or (buffers is None and config.window >= inputs.q.shape[1]):
                return MixerParts(None, None, near, gate=gate)
        far, written, tokens = self.far_stream(inputs, exact)
        if config.score == "exp":
            out, mass = self._attend_exactly(far.q, written, inputs), None
        else:
            out, mass = self._attend(far.q, written, buffers)
        if near is not None:
            assert tokens is not None, "a window counts tokens"
            return MixerParts(out, mass, near, gate=gate, far_inputs=FarInputs(inputs.hidden_states, tokens))
        if config.normaliser == "count":
            assert tokens is not None, "a count needs positions"
            out = out / tokens.clamp_min(1)[..., None, None].to(out.dtype)
        return MixerParts(out, mass, None, self._skipped(far.skipped), gate)

    def exact_part(self, inputs: HeadInputs, reach: Reach = "all") -> ExactPart:
        """Compute window, sinks and kept keys: what no parameter of the far part changes.

        Args:
            inputs: the converted heads of a mixer with a window; their cache is updated.
            reach: as for `parts`.

        Returns:
            The exact part.
        """
        config = self.config
        stream = WindowStream(inputs, count_tokens(inputs), config.window, config.sinks)
        rotated = inputs.rotate(inputs.q, inputs.k)
        kept = None
        if self.key_score is not None and reach != "window_only":
            kept = KeptStream(config, self.key_score, inputs, stream)
        read = kept is not None or not far_stream_differs(config)
        leaving = stream.peek(rotated[1], inputs.v) if read else None
        near = stream.near(*rotated, inputs.v)
        if kept is not None and leaving is not None:
            near = kept.attend(near, rotated[0], *leaving)
        return ExactPart(near, stream, kept, rotated, leaving, reach)

    def far_stream(self, inputs: HeadInputs, exact: ExactPart | None) -> tuple[FarHeads, FarStream, Tensor | None]:
        """Return the far part's heads, what each step writes into it, and how many tokens it holds.

        Args:
            inputs: the converted heads; their cache is updated.
            exact: `exact_part` of the same inputs with `reach` all; None for a mixer without a window.

        Returns:
            The heads before their maps, the stream, and `[B, T]` tokens (below 1 where there are none yet; None where
            nothing counts them).
        """
        config = self.config
        if exact is None:
            rank = visible_tokens(inputs, config.causal) if config.counts_tokens else None
            far = self.far_heads(inputs, rank)
            log_decay = far.log_decay
            if config.score != "exp":
                log_decay = reset_at_documents(log_decay, inputs.sequence, far.k)
            return far, FarStream(far.k, far.v, log_decay, inputs.real(), far.write), rank
        stream, shared = exact.stream, not far_stream_differs(config)
        far = self.far_heads(inputs, stream.rank, exact.rotated)
        written = stream.delay(far.k, far.v, far.log_decay, far.write, exact.leaving if shared else None)
        if exact.kept is not None:
            written = exact.kept.reroute(written, shared)
        return far, written, stream.rank - config.window - config.sinks - config.kept_keys

    def far_heads(
        self, inputs: HeadInputs, rank: Tensor | None, rotated: tuple[Tensor, Tensor] | None = None
    ) -> FarHeads:
        """Return the far part's heads before its maps, not yet delayed.

        Args:
            inputs: the converted heads; what a shift or convolution remembers in their cache is updated.
            rank: `[B, T]` real tokens up to each position; None where nothing counts them.
            rotated: the teacher's rotated q and k, if known.

        Returns:
            The heads.
        """
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.shift is not None:
            k, v = self._shift(self.shift, inputs)
        if self.conv is not None:
            q, k, v = self._convolve(self.conv, inputs._replace(q=q, k=k, v=v))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        rope = self.config.rope
        unchanged = self.shift is None and self.conv is None and self.qk_norm is None and rope == "keep"
        q, k = rotated if rotated is not None and unchanged else inputs.rotate(q, k, rope)
        skipped, hidden_states = v, inputs.hidden_states
        log_decay = step = None
        if isinstance(self.decay, Mamba2Decay):
            step = self.decay.step(hidden_states)
            log_decay = self.decay.of_step(step)
            step = step if self.config.value_step == "softplus" else None
        elif self.decay is not None:
            log_decay = self.decay(hidden_states)
        if self.value_step is not None:
            step = self.value_step(hidden_states)
        if self.position_step is not None:
            assert rank is not None, "a position step needs positions"
            step = self.position_step(rank)
        if step is not None:
            v = v * step[..., None].to(v.dtype)
        if log_decay is not None and inputs.sequence.real is not None:
            log_decay = log_decay.masked_fill(~inputs.sequence.real[..., None], 0.0)
        write = None if self.write_gate is None else self.write_gate(hidden_states)
        return FarHeads(q, k, v, log_decay, write, skipped)

    def _shift(self, shift: TokenShift, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        """Return shifted k and v, remembering the last token."""
        kv = torch.cat([inputs.k, inputs.v], dim=2)
        if inputs.sequence.real is not None:
            kv = kv * inputs.sequence.real[..., None, None].to(kv.dtype)
        past = torch.zeros_like(kv[:, :1])
        if inputs.buffers is not None:
            past = inputs.buffers["shift"].to(kv.dtype)
            inputs.buffers["shift"] = kv[:, -1:].to(inputs.buffers["shift"].dtype, copy=True)
        k, v = shift(kv, past, inputs.hidden_states, inputs.sequence.documents).chunk(2, dim=2)
        return k, v

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

    def _skipped(self, v: Tensor) -> Tensor | None:
        """Return what the skip connection adds to every query head, or None."""
        if self.skip is None:
            return None
        return v.repeat_interleave(self.geometry.group_size, dim=2) * self.skip[:, None].to(v.dtype)

    def _attend_exactly(self, q: Tensor, written: FarStream, inputs: HeadInputs) -> Tensor:
        """Run the exp score on the T new tokens and all before them.

        A norm per head does not see the division by the sum of weights: only a count needs the numerator itself.
        """
        config, buffers = self.config, inputs.buffers
        everything_real = inputs.sequence.real is None and buffers is None
        if buffers is not None:
            remember_stream(buffers, written)
            written = past_stream(buffers)
        return exp_attention(
            self.score.map_queries(q),
            self.score.map_keys(written.k.to(q.dtype)),
            written.v.to(q.dtype),
            written.log_decay,
            scale=config.scale,
            clamp=config.score_clamp,
            valid=None if everything_real else written.weight,
            documents=inputs.sequence.documents,
            causal=config.causal,
            normalize=config.normaliser != "count",
        )

    def _attend(self, q: Tensor, written: FarStream, buffers: Buffers | None) -> tuple[Tensor, Tensor]:
        """Run the op on what the T steps write, continuing and updating the cache; return its output and mass."""
        config = self.config
        state = None
        if buffers is not None and config.linear:
            values = buffers["values"].float()
            # A mixer without a sum normaliser does not cache one; the op still carries it along.
            normaliser = buffers.get("normaliser")
            state = PolyState(values, values.new_zeros(values.shape[:-1]) if normaliser is None else normaliser.float())
        elif buffers is not None:
            remember_stream(buffers, written)
            written = past_stream(buffers)
        weight = written.weight[..., None].expand(-1, -1, self.geometry.num_kv_heads).float()
        far = poly_attention(
            self.score.map_queries(q),
            self.score.map_keys(written.k.to(q.dtype)),
            written.v.to(q.dtype),
            written.log_decay,
            coefs=self.score.coefficients(),
            scale=config.scale,
            key_weight=weight if written.write is None else weight * written.write,
            causal=config.causal,
            normalize=config.normalised and not config.window,
            initial_state=state,
            output_final_state=state is not None,
            precision=config.precision,
        )
        if buffers is not None and far.final_state is not None:
            for name in ("values", "normaliser"):
                if name in buffers:
                    buffers[name] = getattr(far.final_state, name).to(buffers[name].dtype)
        return far.out, far.normaliser

    def finish(self, parts: MixerParts) -> Tensor:
        """Normalise the far part, join it with the window, and gate the result.

        Args:
            parts: from `parts`.

        Returns:
            `[B, T, num_heads, head_dim]`; float32 where the far part's numerator is not divided by the sum of weights.
        """
        out = None if parts.far is None else self._normalise(parts.far, parts)
        if parts.near is not None:
            out = self._join(out, parts)
        assert out is not None, "a mixer has a window or a far part"
        if parts.gate is None or self.config.normaliser == "gated_rms":
            return out
        return out * parts.gate.to(out.dtype)

    def _normalise(self, out: Tensor, parts: MixerParts) -> Tensor:
        """Apply norm and skip to the far part. A norm over the heads is of their sum with the skip, as in Mamba-2."""
        kind = self.config.normaliser
        if self.norm_weight is not None and kind in _HEAD_NORMS:
            out = head_norm(kind, out, self.norm_weight, self.norm_bias)
        if parts.skip is not None:
            out = out + parts.skip.to(out.dtype)
        if kind == "gated_rms":
            assert parts.gate is not None, "a gated norm has a gate"
            out = out * parts.gate.to(out.dtype)
        if self.norm_weight is not None and kind in _NORMS_OVER_HEADS:
            out = rms_over_heads(out, self.norm_weight)
        return out

    def _join(self, out: Tensor | None, parts: MixerParts) -> Tensor:
        """Join the far part with the window."""
        near = parts.near
        assert near is not None, "there is a window"
        if out is None:
            return near.out
        if not self.config.normalised:
            return near.out + self._log_weight(parts).exp()[..., None].to(out.dtype) * out
        near_mass, far_unit = self._units(parts)
        assert parts.mass is not None, "a shared normaliser needs the far part's mass"
        total = (near_mass + far_unit * parts.mass).clamp_min(MIN_SHARED_NORMALISER)
        joined = near_mass[..., None] * near.out + far_unit[..., None] * out
        return (joined / total[..., None]).to(near.out.dtype)

    def _log_weight(self, parts: MixerParts) -> Tensor:
        """Return the log weight of a unit of the far part, `[B, T, num_heads]`."""
        assert self.far_weight is not None, "a mixer with a window weighs its far part"
        assert parts.near is not None, "there is a window"
        assert parts.far_inputs is not None, "there is a far part"
        return self.far_weight(parts.near, parts.mass if self.config.normalised else None, parts.far_inputs)

    def _units(self, parts: MixerParts) -> tuple[Tensor, Tensor]:
        """Return the window's mass and the unit of the far part's, `[B, T, num_heads]`, up to a common factor."""
        assert parts.near is not None, "there is a window"
        log_near, log_far = parts.near.log_normaliser, self._log_weight(parts)
        if self.config.mix_reference == "near":
            return torch.ones_like(log_near), log_far.exp()
        # Both as multiples of the larger mass, so that nothing overflows and their sum is 1 or more.
        assert parts.mass is not None, "a shared normaliser needs the far part's mass"
        largest = torch.maximum(log_near, log_far + parts.mass.abs().clamp_min(SMALLEST_MASS).log()).detach()
        return (log_near - largest).exp(), (log_far - largest).exp()

    def far_share(self, parts: MixerParts) -> Tensor | None:
        """Return the far part's share of the attention mass.

        Args:
            parts: from `parts`.

        Returns:
            `[B, T, num_heads]`; below 0 where an odd score's weights sum to less than 0. None where the two share no
            mass: without a window, or without a sum of weights.
        """
        near = parts.near
        if near is None or not self.config.normalised:
            return None
        if parts.mass is None:
            return torch.zeros_like(near.log_normaliser)
        near_mass, far_unit = self._units(parts)
        far_mass = far_unit * parts.mass
        return far_mass / (near_mass + far_mass).clamp_min(MIN_SHARED_NORMALISER)
