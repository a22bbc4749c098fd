"""The cache of one converted layer: what it holds, how many bytes that is, and the transformers cache-layer class."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.errors import ConfigError
from subquad.kernels.state import num_rows
from subquad.layers.config import MixerConfig
from subquad.layers.geometry import LayerGeometry


@dataclass(frozen=True)
class BufferSpec:
    """Shape (without the batch dimension) and dtype of one cached tensor; `grows` marks dim 0 as the length so far."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grows: bool = False


def cache_layout(mixer: MixerConfig, geometry: LayerGeometry, dtype: torch.dtype) -> dict[str, BufferSpec]:
    """List every tensor a converted layer caches, for one sequence.

    Both the allocation and `cache_bytes` read this, so the formula and the memory held are the same thing.

    Args:
        mixer: the layer's mixer.
        geometry: the whole layer's sizes.
        dtype: dtype of the model's activations; decays are float32 whatever it is, states and normalisers have the
            mixer's `state_dtype`.

    Returns:
        Buffer name to its spec. `values` and `normaliser` are the recurrent state; `far_*` the stream that waits to
        leave the window; `window_*`, `sink_*` and `kept_*` the exact part; `exact_*` the heads that stay softmax;
        `past_*` keys and values of scores without a state; `conv` and `shift` the last tokens' heads; `num_seen`
        counts real tokens.
    """
    split, mixed = geometry.split(mixer.exact_kv_heads)
    heads, dim = mixed.num_kv_heads, mixed.head_dim
    layout: dict[str, BufferSpec] = {}
    if split.exact:
        shape = (0, len(split.exact), dim)
        layout.update(
            exact_keys=BufferSpec(shape, dtype, grows=True),
            exact_values=BufferSpec(shape, dtype, grows=True),
            exact_valid=BufferSpec((0,), torch.bool, grows=True),
        )
    if mixer.score == "softmax" or not heads:
        return layout
    if mixer.linear:
        rows = num_rows(mixer.feature_dim or dim, mixer.score_orders())
        state = getattr(torch, mixer.state_dtype)
        layout["values"] = BufferSpec((heads, rows, dim), state)
        if mixer.normalised:
            layout["normaliser"] = BufferSpec((heads, rows), state)
    else:
        layout.update(
            past_keys=BufferSpec((0, heads, dim), dtype, grows=True),
            past_values=BufferSpec((0, heads, dim), dtype, grows=True),
            past_weight=BufferSpec((0,), torch.bool, grows=True),
        )
        if mixer.decay != "none":
            layout["past_log_decay"] = BufferSpec((0, heads), torch.float32, grows=True)
        if mixer.write_gate or mixer.kept_keys:
            layout["past_write"] = BufferSpec((0, heads), torch.float32, grows=True)
    if mixer.conv_width > 1:
        channels = (mixed.num_heads + 2 * heads) * dim
        layout["conv"] = BufferSpec((mixer.conv_width - 1, channels), dtype)
    if mixer.kv_shift:
        layout["shift"] = BufferSpec((1, 2 * heads, dim), dtype)
    if mixer.counts_tokens:
        layout["num_seen"] = BufferSpec((), torch.int64)
    if mixer.window:
        layout.update(_window_layout(mixer, heads, dim, dtype))
    return layout


def _window_layout(mixer: MixerConfig, heads: int, dim: int, dtype: torch.dtype) -> dict[str, BufferSpec]:
    stream = BufferSpec((mixer.window, heads, dim), dtype)
    layout = {
        "window_keys": stream,
        "window_values": stream,
        "window_valid": BufferSpec((mixer.window,), torch.bool),
    }
    if far_stream_differs(mixer):
        layout.update(far_keys=stream, far_values=stream)
    if mixer.decay != "none":
        layout["far_log_decay"] = BufferSpec((mixer.window, heads), torch.float32)
    if mixer.write_gate:
        layout["far_write"] = BufferSpec((mixer.window, heads), torch.float32)
    if mixer.sinks:
        sink = BufferSpec((mixer.sinks, heads, dim), dtype)
        layout.update(sink_keys=sink, sink_values=sink)
    if mixer.kept_keys:
        layout.update(_kept_layout(mixer, heads, dim, dtype))
    return layout


def _kept_layout(mixer: MixerConfig, heads: int, dim: int, dtype: torch.dtype) -> dict[str, BufferSpec]:
    token = BufferSpec((mixer.kept_keys, heads, dim), dtype)
    number = BufferSpec((mixer.kept_keys, heads), torch.float32)
    layout = {
        "kept_keys": token,
        "kept_values": token,
        "kept_scores": number,
        "kept_valid": BufferSpec((mixer.kept_keys, heads), torch.bool),
        "window_scores": BufferSpec((mixer.window, heads), torch.float32),
    }
    if far_stream_differs(mixer):
        layout.update(kept_far_keys=token, kept_far_values=token)
    if mixer.write_gate:
        layout["kept_write"] = number
    return layout


def far_stream_differs(mixer: MixerConfig) -> bool:
    """Return whether the far part's k and v differ from the window's, so that both wait in the cache."""
    changes_keys = mixer.conv_width > 1 or mixer.kv_shift or mixer.qk_norm or mixer.rope != "keep"
    return changes_keys or mixer.value_step != "none"


def cache_bytes(mixer: MixerConfig, geometry: LayerGeometry, batch_size: int, seq_len: int, dtype: torch.dtype) -> int:
    """Return the bytes one layer's cache holds after `seq_len` tokens.

    Args:
        mixer: the layer's mixer; `softmax` gives the KV cache's `2 * seq_len * num_kv_heads * head_dim` numbers.
        geometry: the layer's sizes.
        batch_size: sequences held.
        seq_len: tokens seen so far.
        dtype: dtype of the model's activations.

    Returns:
        Bytes, equal to what `SubquadCacheLayer` holds.
    """
    if mixer.score == "softmax":
        return 2 * batch_size * seq_len * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize
    total = 0
    for spec in cache_layout(mixer, geometry, dtype).values():
        numbers = math.prod(spec.shape[1:] if spec.grows else spec.shape)
        total += numbers * (seq_len if spec.grows else 1) * spec.dtype.itemsize
    return total * batch_size


class SubquadCacheLayer(CacheLayerMixin):
    """Cache of one converted layer: named tensors with the batch in dim 0, laid out by `cache_layout`.

    It lives in a transformers `Cache` like any stock layer. A recurrent state cannot be rolled back, so `crop` (used by
    assisted generation) is refused.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[str, Tensor] = {}
        self.seq_length = 0
        self.batch_size = -1
        self.mode: str | None = None

    def enter(self, mode: str) -> None:
        """Note the attention mode at the first use, and refuse another one later.

        Args:
            mode: `student`, or `window_only` and `exact_only`, which keep no state of the far part.

        Raises:
            ConfigError: The cache was begun in another mode.
        """
        if self.mode not in (None, mode):
            raise ConfigError(
                f"this cache was begun in {self.mode} mode and cannot continue in {mode} mode: window_only and "
                "exact_only keep no state of the far part, and each mode's keys and values are its own. Start with a "
                "new cache."
            )
        self.mode = mode

    def allocate(self, layout: dict[str, BufferSpec], batch_size: int, device: torch.device) -> None:
        """Create every buffer, zero-filled, at the first use; later calls do nothing."""
        if self.is_initialized:
            return
        self.buffers = {
            name: torch.zeros((batch_size, *spec.shape), dtype=spec.dtype, device=device)
            for name, spec in layout.items()
        }
        self.device = device
        self.batch_size = batch_size
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse the stock key/value path: the layer's own attention fills this cache."""
        raise ConfigError("a subquad cache layer is filled by its own attention layer, not through Cache.update")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse the stock key/value path: the layer's own attention fills this cache."""
        raise ConfigError(
            "this cache holds a converted layer's state; it cannot continue in teacher mode or in a softmax layer. "
            "Start with a new cache."
        )

    def num_bytes(self) -> int:
        """Return the bytes held now, whatever part of its storage a tensor shows."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.buffers.values())

    def get_seq_length(self) -> int:
        """Return the number of positions seen, padding included."""
        return self.seq_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, offset) for the model's mask: as for full attention."""
        return self.seq_length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no longest sequence."""
        return -1

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        self.buffers = {name: tensor.to("cpu", non_blocking=True) for name, tensor in self.buffers.items()}

    def prefetch(self) -> None:
        """Move the buffers back to their device."""
        if self.is_initialized:
            self.buffers = {name: tensor.to(self.device, non_blocking=True) for name, tensor in self.buffers.items()}

    def reset(self) -> None:
        """Forget everything; the buffers are allocated again at the next use."""
        self.buffers = {}
        self.seq_length = 0
        self.mode = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to roll back: a recurrent state does not keep its past."""
        if tokens_to_remove:
            raise ConfigError(
                f"cannot remove {abs(tokens_to_remove)} tokens: a converted layer's state cannot be rolled back. "
                "Use greedy, sampling or beam search instead of assisted generation."
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given batch rows, in that order."""
        self.buffers = {
            name: tensor.index_select(0, indices.to(tensor.device)) for name, tensor in self.buffers.items()
        }
        self._count_rows()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        self.buffers = {name: tensor.repeat_interleave(repeats, dim=0) for name, tensor in self.buffers.items()}
        self._count_rows()

    def _count_rows(self) -> None:
        if self.buffers:
            self.batch_size = next(iter(self.buffers.values())).shape[0]


def cache_argument(model: nn.Module | type[nn.Module]) -> str:
    """Return what a transformers model's `forward` calls its cache.

    Args:
        model: a model or its class.

    Returns:
        `cache`, or `past_key_values` as before transformers 5.24 (which warns about the old name at every call).
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def subquad_cache_layer(cache: Cache, layer_idx: int) -> SubquadCacheLayer:
    """Return the cache's slot for a converted layer, putting a `SubquadCacheLayer` there at the first use.

    Args:
        cache: any transformers cache that is a list of layers.
        layer_idx: the layer's index in the model.

    Returns:
        The slot's cache layer.

    Raises:
        ConfigError: The slot already holds another kind of cache (for example one filled in teacher mode).
    """
    while len(cache.layers) <= layer_idx:
        cache.layers.append(SubquadCacheLayer())
    layer = cache.layers[layer_idx]
    if isinstance(layer, SubquadCacheLayer):
        return layer
    if getattr(layer, "is_initialized", False):
        raise ConfigError(
            f"layer {layer_idx} is converted but its cache slot already holds a {type(layer).__name__}; "
            "a cache filled in teacher mode cannot be continued by the student. Start with a new cache."
        )
    cache.layers[layer_idx] = SubquadCacheLayer()
    return cache.layers[layer_idx]
