"""`SubquadAttention`: an attention layer that runs as its mixer or as its teacher, or measures one by the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from subquad.kernels import PolyAttentionOutput, PolyState, WindowOutput
from subquad.layers.cache import SubquadCacheLayer, cache_layout, far_stream_differs, subquad_cache_layer
from subquad.layers.config import MixerConfig
from subquad.layers.geometry import LayerGeometry
from subquad.layers.mixer import FarStream, Mixer
from subquad.layers.sequence import SequenceInfo
from subquad.layers.stream import Buffers, WindowStream, reset_at_documents
from subquad.layers.transfer import local_loss

Rope = tuple[Tensor, Tensor]
Projected = tuple[Tensor, Tensor, Tensor]


class SubquadAttention(nn.Module):
    """Replaces a Llama attention module; keeps its q, k, v, o projections and adds parameters under `mixer`.

    `mode` says what a forward computes: `student` the mixer, `teacher` the original softmax attention, `window_only`
    the window and sinks without the far part (the control), `transfer` the teacher's output, recording in `local_loss`
    how far the student is from it.

    Attributes:
        mixer_config: the parts of this layer's mixer.
        mixer: the new parameters; None when every head stays exact.
        split: which heads are exact and which are converted.
        mode: see above; set by `attention_mode`.
        local_loss: scalar of the last `transfer` forward, None otherwise.
    """

    def __init__(self, attention: nn.Module, mixer_config: MixerConfig) -> None:
        """Take over an attention module.

        Args:
            attention: a Llama attention module; its projections are used, not copied.
            mixer_config: any mixer but `softmax`, whose layers are left as they are.
        """
        super().__init__()
        config = attention.config
        self.config = config
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.num_key_value_groups = attention.num_key_value_groups
        self.scaling = attention.scaling
        self.attention_dropout = attention.attention_dropout
        self.is_causal = True
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.mixer_config = mixer_config
        self.geometry = layer_geometry(config)
        self.split, mixed = self.geometry.split(mixer_config.exact_kv_heads)
        self.mixer = Mixer(mixer_config, mixed, config.max_position_embeddings) if mixed.num_kv_heads else None
        self.mode = "student"
        self.local_loss: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rope | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        sequence: SequenceInfo | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer's output; arguments are those of transformers' Llama attention.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            position_embeddings: (cos, sin), each `[B or 1, T, head_dim]`.
            attention_mask: the model's mask, used in teacher mode only.
            cache: transformers cache (named `past_key_values` before 5.24).
            past_key_values: the same, by its older name.
            sequence: padding and packed documents of the new tokens.
            **kwargs: passed on to the attention function in teacher mode, as transformers does.

        Returns:
            `[B, T, hidden_size]` and attention weights (teacher mode with eager attention only, else None).
        """
        cache = past_key_values if cache is None else cache
        q, k, v = self.project(hidden_states)
        if self.mode in ("teacher", "transfer"):
            out, weights = self._teacher(q, k, v, position_embeddings, attention_mask, cache, kwargs)
            if self.mode == "transfer":
                self.local_loss = local_loss(self, (hidden_states, q, k, v), position_embeddings, sequence, out)
            return out, weights
        layer_cache = None if cache is None else subquad_cache_layer(cache, self.layer_idx)
        heads = self.student_heads(hidden_states, (q, k, v), position_embeddings, sequence, layer_cache)
        return self.o_proj(heads.flatten(2)), None

    def project(self, hidden_states: Tensor) -> Projected:
        """Return q `[B, T, num_heads, head_dim]`, k and v `[B, T, num_kv_heads, head_dim]`, not rotated."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return tuple(proj(hidden_states).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))

    def _teacher(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope,
        attention_mask: Tensor | None,
        cache: Cache | None,
        kwargs: dict[str, object],
    ) -> tuple[Tensor, Tensor | None]:
        """Run the original attention exactly as transformers' Llama does."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *rope)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2).contiguous()), weights

    def student_heads(
        self,
        hidden_states: Tensor,
        projected: Projected,
        rope: Rope,
        sequence: SequenceInfo | None,
        layer_cache: SubquadCacheLayer | None = None,
    ) -> Tensor:
        """Compute the student's output per head, before `o_proj`.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            projected: q `[B, T, num_heads, head_dim]`, k and v `[B, T, num_kv_heads, head_dim]`, not rotated.
            rope: (cos, sin).
            sequence: padding and documents; None is neither.
            layer_cache: this layer's cache, updated.

        Returns:
            `[B, T, num_heads, head_dim]`.
        """
        sequence = sequence or SequenceInfo()
        buffers = self._open_cache(hidden_states, layer_cache)
        q, k, v = projected
        if not self.split.exact:
            return self.mixer.finish(*self.mixed_parts(hidden_states, (q, k, v), rope, sequence, buffers))
        out = torch.empty_like(q)
        exact_queries = self.split.query_heads(self.split.exact)
        exact = self.select_heads(projected, self.split.exact)
        parts = [(exact_queries, self.exact_heads(exact, rope, sequence, buffers))]
        if self.mixer is not None:
            mixed = self.select_heads(projected, self.split.mixed)
            far, near = self.mixed_parts(hidden_states, mixed, rope, sequence, buffers)
            parts.append((self.split.query_heads(self.split.mixed), self.mixer.finish(far, near)))
        for heads, part in parts:
            out = out.index_copy(2, torch.tensor(heads, device=out.device), part.to(out.dtype))
        return out

    def select_heads(self, projected: Projected, kv_heads: tuple[int, ...]) -> Projected:
        """Return q, k, v of some key/value heads and of the query heads that read them."""
        q, k, v = projected
        heads = list(kv_heads)
        return q[:, :, self.split.query_heads(kv_heads)], k[:, :, heads], v[:, :, heads]

    def _open_cache(self, hidden_states: Tensor, layer_cache: SubquadCacheLayer | None) -> Buffers | None:
        if layer_cache is None:
            return None
        layout = cache_layout(self.mixer_config, self.geometry, self.q_proj.weight.dtype)
        layer_cache.allocate(layout, hidden_states.shape[0], hidden_states.device)
        layer_cache.seq_length += hidden_states.shape[1]
        return layer_cache.buffers

    def exact_heads(
        self, projected: Projected, rope: Rope, sequence: SequenceInfo, buffers: Buffers | None = None
    ) -> Tensor:
        """Attend with softmax over all tokens.

        Args:
            projected: q, k, v of any key/value heads with their query heads, not rotated.
            rope: (cos, sin).
            sequence: padding and documents.
            buffers: this layer's cached tensors, updated; None without a cache.

        Returns:
            `[B, T, query heads, head_dim]`, before `o_proj`.
        """
        q, k, v = projected
        q, k = apply_rotary_pos_emb(q, k, *rope, unsqueeze_dim=2)
        valid = sequence.real if sequence.real is not None else q.new_ones(q.shape[:2], dtype=torch.bool)
        if buffers is not None:
            k, v = _append(buffers, "exact_keys", k), _append(buffers, "exact_values", v)
            valid = _append(buffers, "exact_valid", valid)
        num_new, seq_len = q.shape[1], k.shape[1]
        steps = torch.arange(seq_len, device=q.device)
        causal = steps <= steps[seq_len - num_new :, None]
        seen = causal & valid[:, None]
        if sequence.documents is not None:
            seen = seen & (sequence.documents[:, :, None] == sequence.documents[:, None])
        # A padding query sees nothing: let it see itself, so that no row of the softmax is empty.
        seen = seen | (steps == steps[seq_len - num_new :, None])
        k, v = (x.repeat_interleave(self.split.group_size, dim=2).transpose(1, 2) for x in (k, v))
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=seen[:, None], scale=self.scaling
        )
        return out.transpose(1, 2)

    def mixed_parts(
        self,
        hidden_states: Tensor,
        projected: Projected,
        rope: Rope,
        sequence: SequenceInfo,
        buffers: Buffers | None = None,
    ) -> tuple[PolyAttentionOutput | None, WindowOutput | None]:
        """Compute the far part and the window of the converted heads, before they are joined.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            projected: q, k, v of the converted heads, not rotated.
            rope: (cos, sin).
            sequence: padding and documents.
            buffers: this layer's cached tensors, updated; None without a cache.

        Returns:
            The far part (None where nothing left the window) and the window (None for the pure mixer).
        """
        config = self.mixer_config
        rotated = (*apply_rotary_pos_emb(projected[0], projected[1], *rope, unsqueeze_dim=2), projected[2])
        far_in = self._far_inputs(hidden_states, projected, rotated, rope, sequence, buffers)
        if not config.window:
            return self._far(far_in, None, None, sequence, buffers), None
        stream = WindowStream(projected[0], config.window, config.sinks, sequence, buffers)
        shared = None
        if buffers is not None and not far_stream_differs(config):
            shared = (buffers["window_keys"], buffers["window_values"])
        near = stream.near(*rotated, self.scaling)
        # Without a cache nobody reads the far part of the control, or of a window longer than the input.
        unread = self.mode == "window_only" or config.window >= hidden_states.shape[1]
        if buffers is None and unread:
            return None, near
        far = self._far(far_in, stream, shared, sequence, buffers)
        return (None if self.mode == "window_only" else far), near

    def _far_inputs(
        self,
        hidden_states: Tensor,
        projected: Projected,
        rotated: Projected,
        rope: Rope,
        sequence: SequenceInfo,
        buffers: Buffers | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the far part's q, k, v and log decay, not yet delayed."""
        mixer, config = self.mixer, self.mixer_config
        q, k, v = rotated
        if mixer.conv is not None:
            sizes = [x.shape[2] * x.shape[3] for x in projected]
            flat = torch.cat([x.flatten(2) for x in projected], dim=-1)
            past = None if buffers is None else buffers["conv"].to(flat.dtype)
            mixed = mixer.conv(flat, past, sequence.real, sequence.documents)
            if buffers is not None:
                buffers["conv"] = mixer.conv.tail(flat, past, sequence.real).to(buffers["conv"].dtype)
            q, k, v = (part.view(x.shape) for part, x in zip(mixed.split(sizes, dim=-1), projected, strict=True))
            if config.rope == "keep":
                q, k = apply_rotary_pos_emb(q, k, *rope, unsqueeze_dim=2)
        elif config.rope == "drop":
            q, k = projected[0], projected[1]
        if mixer.value_step is not None:
            v = mixer.value_step(v, hidden_states)
        log_decay = None if mixer.decay is None else mixer.decay(hidden_states)
        if log_decay is not None and sequence.real is not None:
            log_decay = log_decay.masked_fill(~sequence.real[..., None], 0.0)
        return q, k, v, log_decay

    def _far(
        self,
        far_in: tuple[Tensor, Tensor, Tensor, Tensor | None],
        stream: WindowStream | None,
        shared: tuple[Tensor, Tensor] | None,
        sequence: SequenceInfo,
        buffers: Buffers | None,
    ) -> PolyAttentionOutput:
        q, k, v, log_decay = far_in
        if stream is not None:
            written = stream.delay(k, v, log_decay, shared)
        else:
            real = sequence.real if sequence.real is not None else k.new_ones(k.shape[:2], dtype=torch.bool)
            written = FarStream(k, v, reset_at_documents(log_decay, sequence, k), real)
        past = state = None
        if buffers is not None and self.mixer_config.linear:
            values = buffers["values"]
            # A mixer without a sum normaliser does not cache one; the op still carries it along.
            state = PolyState(values, buffers.get("normaliser", values.new_zeros(values.shape[:-1])))
        elif buffers is not None:
            past = _past_stream(buffers)
            _remember(buffers, written)
        far = self.mixer.attend(q, written, past, state, keep_state=state is not None)
        if state is not None:
            buffers["values"] = far.final_state.values
            if "normaliser" in buffers:
                buffers["normaliser"] = far.final_state.normaliser
        return far

    def extra_repr(self) -> str:
        """Show what this layer became."""
        return f"layer_idx={self.layer_idx}, mixer={self.mixer_config.score}, order={self.mixer_config.order}"


def layer_geometry(config: object) -> LayerGeometry:
    """Read a Llama config's attention sizes."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LayerGeometry(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim)


def count_parameters(mixer_config: MixerConfig, geometry: LayerGeometry) -> int:
    """Return how many parameters converting one layer adds.

    Args:
        mixer_config: the layer's mixer; `softmax` adds none.
        geometry: the layer's sizes.

    Returns:
        Number of new parameters.
    """
    _, mixed = geometry.split(mixer_config.exact_kv_heads)
    if mixer_config.score == "softmax" or not mixed.num_kv_heads:
        return 0
    with torch.device("meta"):
        mixer = Mixer(mixer_config, mixed, context_length=1)
    return sum(parameter.numel() for parameter in mixer.parameters())


def _append(buffers: Buffers, name: str, new: Tensor) -> Tensor:
    buffers[name] = torch.cat([buffers[name], new.to(buffers[name].dtype)], dim=1)
    return buffers[name].to(new.dtype)


def _past_stream(buffers: Buffers) -> FarStream:
    """Return everything the far part has read so far, for scores without a fixed-size state."""
    return FarStream(
        buffers["past_keys"],
        buffers["past_values"],
        buffers.get("past_log_decay"),
        buffers["past_weight"],
    )


def _remember(buffers: Buffers, written: FarStream) -> None:
    _append(buffers, "past_keys", written.k)
    _append(buffers, "past_values", written.v)
    _append(buffers, "past_weight", written.weight)
    if written.log_decay is not None:
        _append(buffers, "past_log_decay", written.log_decay)
