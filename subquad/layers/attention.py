"""`SubquadAttention`: an attention layer that runs as its mixer or as its teacher, or measures one by the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from subquad.errors import ConfigError
from subquad.layers.cache import cache_layout, subquad_cache_layer
from subquad.layers.config import MixerConfig
from subquad.layers.geometry import LayerGeometry
from subquad.layers.inputs import HeadInputs
from subquad.layers.mixer import Mixer
from subquad.layers.mixer_parts import Reach
from subquad.layers.sequence import SequenceInfo
from subquad.layers.stream import append
from subquad.layers.transfer import local_loss

_REACHES: dict[str, Reach] = {"window_only": "window_only", "exact_only": "exact_only"}


class SubquadAttention(nn.Module):
    """Replaces a Llama attention module; keeps its q, k, v, o projections and adds parameters under `mixer`.

    What another family names or does otherwise is in the class attributes, `projections`, `dropout_rate`,
    `project_out` and `forward`, which its subclass overrides (`bert_attention.py`).

    `mode` says what a forward computes: `student` the mixer, `teacher` the original softmax attention, `window_only`
    the window and sinks alone (the control), `exact_only` these and the kept keys, `transfer` the teacher's output,
    recording in `local_loss` how far the student is from it.

    Attributes:
        mixer_config: the parts of this layer's mixer.
        mixer: the new parameters; None when every head stays exact.
        geometry: sizes of the whole layer.
        split: which heads are exact and which are converted.
        mode: see above; set by `attention_mode`.
        softmax_share: `[num_kv_heads]`, how much of each head's output its own softmax gives, the mixer the rest; None,
            as everywhere but in the choice of exact heads (`distill/heads.py`), is the mixer alone.
        local_loss: scalar of the last `transfer` forward, None otherwise.
        teacher_attributes: names of what a converted layer takes over from the layer it replaces.
        eager_attention: the family's attention function where the config asks for none of the others.
    """

    teacher_attributes: ClassVar[tuple[str, ...]] = (
        "layer_idx",
        "head_dim",
        "num_key_value_groups",
        "scaling",
        "attention_dropout",
        "is_causal",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    eager_attention: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]] = staticmethod(eager_attention_forward)

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    attention_dropout: float
    config: PretrainedConfig
    layer_idx: int
    scaling: float
    mixer: Mixer | None

    def __init__(self, attention: nn.Module, mixer_config: MixerConfig) -> None:
        """Take over an attention module.

        Args:
            attention: the attention module of the teacher; its projections are used, not copied.
            mixer_config: any mixer but `softmax`, whose layers are left as they are.
        """
        super().__init__()
        for name in self.teacher_attributes:
            setattr(self, name, getattr(attention, name))
        self.config = attention.config
        self.mixer_config = mixer_config
        self.geometry = layer_geometry(self.config)
        self.split, mixed = self.geometry.split(mixer_config.exact_kv_heads)
        self.mixer = Mixer(mixer_config, mixed, self.config.max_position_embeddings) if mixed.num_kv_heads else None
        self.mode = "student"
        self.softmax_share: Tensor | None = None
        self.local_loss: Tensor | None = None

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """The projections of q, k and v."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def dropout_rate(self) -> float:
        """The teacher's dropout on its attention weights while training; a mixer has none."""
        return self.attention_dropout

    def project_out(self, heads: Tensor) -> Tensor:
        """Turn heads `[B, T, num_heads, head_dim]` into what the layer returns, `[B, T, hidden_size]`."""
        return self.o_proj(heads.flatten(2).contiguous())

    def start_from_projections(self) -> None:
        """Set what the mixer takes over from the teacher's projections: a learned feature map's start."""
        if self.mixer is None or self.mixer.score.features is None:
            return
        weights = []
        query_heads = self.split.query_heads(self.split.mixed)
        for project, heads in zip(self.projections, (query_heads, self.split.mixed), strict=False):
            by_head = project.weight.detach().unflatten(0, (-1, self.geometry.head_dim))
            weights.append(by_head[list(heads)].flatten(0, 1))
        self.mixer.score.features.start_from(*weights)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        sequence: SequenceInfo | None = None,
        **kwargs: Any,
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

        Raises:
            ConfigError: No `position_embeddings`, or a cache that was begun in another mode.
        """
        if position_embeddings is None:
            raise ConfigError("position_embeddings are missing: pass the (cos, sin) of the model's rotary embedding")
        cache = past_key_values if cache is None else cache
        inputs = self.inputs(hidden_states, position_embeddings, sequence)
        if self.mode in ("teacher", "transfer"):
            return self.teach(inputs, attention_mask, cache, kwargs)
        if cache is not None:
            layer_cache = subquad_cache_layer(cache, self.layer_idx)
            layer_cache.enter(self.mode)
            layout = cache_layout(self.mixer_config, self.geometry, hidden_states.dtype)
            layer_cache.allocate(layout, hidden_states.shape[0], hidden_states.device)
            layer_cache.seq_length += hidden_states.shape[1]
            inputs = inputs._replace(buffers=layer_cache.buffers)
        return self.project_out(self.student_heads(inputs)), None

    def inputs(
        self, hidden_states: Tensor, rope: tuple[Tensor, Tensor] | None, sequence: SequenceInfo | None = None
    ) -> HeadInputs:
        """Project the layer's input into heads.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            rope: (cos, sin), or None where positions are in the embeddings.
            sequence: padding and packed documents; None is neither.

        Returns:
            q, k, v of all heads, not rotated.
        """
        shape = (*hidden_states.shape[:-1], -1, self.geometry.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in self.projections)
        return HeadInputs(hidden_states, q, k, v, rope, sequence or SequenceInfo())

    def teach(
        self, inputs: HeadInputs, attention_mask: Tensor | None, cache: Cache | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's output and weights; in the mode `transfer`, record how far the student is from it.

        Args:
            inputs: all heads of the layer.
            attention_mask: the model's mask.
            cache: transformers cache, filled with keys and values.
            kwargs: passed on to the attention function.

        Returns:
            As `forward`.
        """
        out, weights = self._teacher(inputs, attention_mask, cache, kwargs)
        if self.mode == "transfer":
            self.local_loss = local_loss(self, inputs, out)
        return out, weights

    def _teacher(
        self, inputs: HeadInputs, attention_mask: Tensor | None, cache: Cache | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the original attention exactly as transformers does."""
        q, k = (x.transpose(1, 2) for x in inputs.rotate(inputs.q, inputs.k))
        v = inputs.v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager_attention)
        dropout = self.dropout_rate if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.project_out(out), weights

    def student_heads(self, inputs: HeadInputs) -> Tensor:
        """Compute the student's output per head, before `o_proj`.

        Args:
            inputs: all heads of the layer; their cache is updated.

        Returns:
            `[B, T, num_heads, head_dim]`.
        """
        reach = _REACHES.get(self.mode, "all")
        if self.mixer is None:
            return self.exact_heads(inputs)
        if not self.split.exact:
            out = self.mixer.finish(self.mixer.parts(inputs, reach)).to(inputs.v.dtype)
            return out if self.softmax_share is None else self._blend(out, inputs, self.softmax_share)
        exact = self.exact_heads(inputs.select(self.split, self.split.exact))
        mixed = self.mixer.parts(inputs.select(self.split, self.split.mixed), reach)
        out = torch.cat([exact, self.mixer.finish(mixed).to(exact.dtype)], dim=2)
        order = self.split.query_heads(self.split.exact) + self.split.query_heads(self.split.mixed)
        return out[:, :, torch.tensor(order, device=out.device).argsort()]

    def _blend(self, out: Tensor, inputs: HeadInputs, softmax_share: Tensor) -> Tensor:
        """Mix the heads' softmax into the mixer's output."""
        share = softmax_share.repeat_interleave(self.split.group_size)[:, None].to(out.dtype)
        return torch.lerp(out, self.exact_heads(inputs), share)

    def exact_heads(self, inputs: HeadInputs) -> Tensor:
        """Attend with softmax over all tokens.

        Args:
            inputs: any key/value heads with their query heads; their cache is updated.

        Returns:
            `[B, T, query heads, head_dim]`, before `o_proj`.
        """
        q, k = inputs.rotate(inputs.q, inputs.k)
        v, valid = inputs.v, inputs.real()
        if inputs.buffers is not None:
            k, v = append(inputs.buffers, "exact_keys", k), append(inputs.buffers, "exact_values", v)
            valid = append(inputs.buffers, "exact_valid", valid)
        num_new, seq_len = q.shape[1], k.shape[1]
        steps = torch.arange(seq_len, device=q.device)
        own = steps[seq_len - num_new :, None]
        seen = ((steps <= own) | (not self.mixer_config.causal)) & valid[:, None]
        documents = inputs.sequence.documents
        if documents is not None:
            seen = seen & (documents[:, :, None] == documents[:, None])
        # A padding query sees nothing: let it see itself, so that no row of the softmax is empty.
        seen = (seen | (steps == own))[:, None]
        k, v = (x.repeat_interleave(self.split.group_size, dim=2).transpose(1, 2) for x in (k, v))
        out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen, scale=self.scaling)
        return out.transpose(1, 2)

    def extra_repr(self) -> str:
        """Show what this layer became."""
        return f"layer_idx={self.layer_idx}, mixer={self.mixer_config.score}, order={self.mixer_config.order}"


def layer_geometry(config: PretrainedConfig) -> LayerGeometry:
    """Read a config's attention sizes; one that knows neither key/value heads nor their width has the plain ones."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return LayerGeometry(config.hidden_size, config.num_attention_heads, num_kv_heads, head_dim)


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
