"""What a conversion will do to every layer, decided and checked before any weight is touched. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from subquad.convert.families import Family, find_family
from subquad.convert.shape import check_shape
from subquad.errors import ConfigError
from subquad.kernels.cost import DEFAULT_CHUNK_SIZE, bidirectional_crossover, decode_crossover, flops_crossover
from subquad.kernels.counts import HeadShape
from subquad.layers import LayerGeometry, cache_bytes, count_parameters
from subquad.layers.config import MixerConfig
from subquad.layers.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RANGE = re.compile(r"(?P<first>-?\d+)(?:-(?P<last>\d+))?")
# far beyond any context: a cache that is not smaller here never is
_LONGEST = 2**40
_COMPARED_LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class LayerPlan:
    """What one layer becomes.

    Attributes:
        layer_idx: Index of the layer in the model.
        mixer: Its new mixer; `score="softmax"` leaves the layer as it is.
        label: The mixer's preset name, with what differs from the preset.
        added_parameters: Number of new parameters.
        cache_bytes: Bytes the layer's cache holds after so many tokens, for one sequence; empty for an encoder, which
            has none.
        kv_bytes: The same for the teacher's key/value cache.
        crossover: Tokens from which on the layer's cache is smaller than its KV cache; None where it never is.
        prefill_crossover: Tokens from which on a prompt, or an encoder's sequence, needs fewer FLOPs than with softmax;
            None where it never does.
        training_crossover: The same for the forward and backward pass over one document; None for an encoder, too.
        decode_crossover: Tokens from which on a generated token moves fewer bytes than with a KV cache; None as above.
    """

    layer_idx: int
    mixer: MixerConfig
    label: str
    added_parameters: int
    cache_bytes: Mapping[int, int]
    kv_bytes: Mapping[int, int]
    crossover: int | None
    prefill_crossover: int | None
    training_crossover: int | None
    decode_crossover: int | None

    @property
    def converted(self) -> bool:
        """Whether the layer changes at all."""
        return self.mixer.score != "softmax"


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion; `apply_plan` carries it out.

    Attributes:
        family: The model family, whose names the surgery uses.
        geometry: Sizes of the attention layers (the same in every layer).
        layers: One entry per layer of the model, in order.
        context_length: The model's longest sequence.
        dtype: Dtype of the model's activations, in which keys and values are cached.
    """

    family: Family
    geometry: LayerGeometry
    layers: tuple[LayerPlan, ...]
    context_length: int
    dtype: torch.dtype

    @property
    def mixers(self) -> dict[int, MixerConfig]:
        """The new mixer of every converted layer."""
        return {layer.layer_idx: layer.mixer for layer in self.layers if layer.converted}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sequence lengths at which the caches are compared."""
        return tuple(self.layers[0].cache_bytes)

    @property
    def added_parameters(self) -> int:
        """New parameters of all layers."""
        return sum(layer.added_parameters for layer in self.layers)

    def total_cache_bytes(self, seq_len: int) -> tuple[int, int]:
        """Return (cache bytes, KV bytes) of all layers at one of `lengths`."""
        return (
            sum(layer.cache_bytes[seq_len] for layer in self.layers),
            sum(layer.kv_bytes[seq_len] for layer in self.layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "family": self.family.name,
            "causal": self.family.causal,
            "context_length": self.context_length,
            "dtype": str(self.dtype).removeprefix("torch."),
            "added_parameters": self.added_parameters,
            "chunk_size": DEFAULT_CHUNK_SIZE,
            "layers": [
                {
                    "layer_idx": layer.layer_idx,
                    "from": "softmax",
                    "to": layer.label,
                    "mixer": layer.mixer.model_dump(mode="json"),
                    "added_parameters": layer.added_parameters,
                    "cache_bytes": {str(length): size for length, size in layer.cache_bytes.items()},
                    "kv_bytes": {str(length): size for length, size in layer.kv_bytes.items()},
                    "crossover": layer.crossover,
                    "prefill_crossover": layer.prefill_crossover,
                    "training_crossover": layer.training_crossover,
                    "decode_crossover": layer.decode_crossover,
                }
                for layer in self.layers
            ],
        }


def plan_conversion(
    hf_config: PretrainedConfig,
    mixer: MixerConfig,
    layers: Mapping[str, MixerConfig] | None = None,
    *,
    exact_kv_heads: Mapping[int, Sequence[int]] | None = None,
    lengths: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Decide what every layer becomes. Pure: loads nothing and changes nothing.

    Args:
        hf_config: The teacher's config.
        mixer: The mixer of every layer that `layers` does not name.
        layers: Layer ranges to mixers: `"0-3"`, `"5,7"`, `"0-2,9"`, `"-1"` (the last layer).
        exact_kv_heads: Layer index to key/value heads that stay softmax, in place of those the mixers name. A layer all
            of whose heads do is left as it is.
        lengths: Sequence lengths at which to compare the caches; None is 1,024, 4,096, ... and the context length. An
            encoder has no cache to compare.
        dtype: Dtype the model will run in; None takes the config's, or float32.

    Returns:
        The plan.

    Raises:
        ConfigError: Every rule that is broken: a layer range that is malformed, outside the model or given twice,
            a causal mixer in an encoder or a bidirectional one in a decoder, `exact_kv_heads` outside the layer, a
            window beyond the context.
        SourceError: The model's family is not supported, or its shape cannot be converted.
    """
    family = find_family(hf_config.model_type)
    check_shape(hf_config, family)
    num_layers = family.size(hf_config, "num_layers")
    context_length = family.size(hf_config, "context_length")
    geometry = LayerGeometry(
        **{name: family.size(hf_config, name) for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim")}
    )
    chosen, problems = _assign_mixers(mixer, layers or {}, num_layers)
    for where, candidate in {"mixer": mixer, **(layers or {})}.items():
        problems += [f"{where}: {problem}" for problem in _mixer_problems(candidate, family, geometry, context_length)]
    for layer_idx, heads in (exact_kv_heads or {}).items():
        wrong = [head for head in heads if not 0 <= head < geometry.num_kv_heads]
        if wrong or not 0 <= layer_idx < num_layers:
            problems.append(
                f"exact heads {list(heads)} of layer {layer_idx}: layers are 0 to {num_layers - 1}, "
                f"key/value heads 0 to {geometry.num_kv_heads - 1}"
            )
            continue
        if chosen[layer_idx].score == "softmax":
            problems.append(f"exact heads {list(heads)} of layer {layer_idx}: the whole layer stays softmax already")
            continue
        chosen[layer_idx] = _with_exact_heads(chosen[layer_idx], heads, geometry)
        problems += _mixer_problems(chosen[layer_idx], family, geometry, context_length)
    if problems:
        raise ConfigError("the conversion cannot be done:\n  " + "\n  ".join(problems))
    dtype = dtype or _config_dtype(hf_config)
    lengths = lengths or (*(n for n in _COMPARED_LENGTHS if n < context_length), context_length)
    lengths = lengths if family.causal else ()
    costs = {each: _measure(each, geometry, lengths, dtype) for each in set(chosen)}
    return ConversionPlan(
        family=family,
        geometry=geometry,
        layers=tuple(LayerPlan(layer_idx, each, **costs[each]) for layer_idx, each in enumerate(chosen)),
        context_length=context_length,
        dtype=dtype,
    )


def _with_exact_heads(mixer: MixerConfig, heads: Sequence[int], geometry: LayerGeometry) -> MixerConfig:
    """Return the mixer with these key/value heads left softmax."""
    if mixer.score == "softmax" or len(set(heads)) == geometry.num_kv_heads:
        return PRESETS["softmax"]
    return mixer.model_copy(update={"exact_kv_heads": tuple(sorted(heads))})


def _config_dtype(hf_config: PretrainedConfig) -> torch.dtype:
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _measure(
    mixer: MixerConfig, geometry: LayerGeometry, lengths: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the fields of `LayerPlan` that depend on the mixer only; sizes come from the layer itself."""
    softmax = PRESETS["softmax"]

    def saved(seq_len: int) -> int:
        return cache_bytes(softmax, geometry, 1, seq_len, dtype) - cache_bytes(mixer, geometry, 1, seq_len, dtype)

    return {
        "label": mixer_label(mixer),
        "added_parameters": count_parameters(mixer, geometry),
        "cache_bytes": {n: cache_bytes(mixer, geometry, 1, n, dtype) for n in lengths},
        "kv_bytes": {n: cache_bytes(softmax, geometry, 1, n, dtype) for n in lengths},
        "crossover": _first_gain(saved) if lengths else None,
        **_work_crossovers(mixer, geometry, dtype),
    }


def _work_crossovers(mixer: MixerConfig, geometry: LayerGeometry, dtype: torch.dtype) -> dict[str, int | None]:
    """Return from which lengths the op needs less work than softmax, by the counts of `kernels/cost.py`.

    Heads that stay softmax (`exact_kv_heads`) cost the same on both sides, so that they do not move these lengths.
    """
    never: dict[str, int | None] = dict.fromkeys(("prefill_crossover", "training_crossover", "decode_crossover"))
    if not mixer.linear:
        return never
    shape = HeadShape(
        head_dim=geometry.head_dim,
        value_head_dim=geometry.head_dim,
        group_size=geometry.group_size,
        orders=mixer.score_orders(),
        window=mixer.window,
        sinks=mixer.sinks,
        feature_dim=mixer.feature_dim,
        kept_keys=mixer.kept_keys,
    )
    if not mixer.causal:
        return {**never, "prefill_crossover": bidirectional_crossover(shape)}
    return {
        # generation goes on from the state after the prompt
        "prefill_crossover": flops_crossover(shape, DEFAULT_CHUNK_SIZE, final_state=True),
        "training_crossover": flops_crossover(shape, DEFAULT_CHUNK_SIZE, training=True),
        "decode_crossover": decode_crossover(shape, normaliser=mixer.normalised, itemsize=dtype.itemsize),
    }


def _first_gain(saved: Callable[[int], int]) -> int | None:
    """Return the smallest length with `saved(length) > 0`; `saved` never decreases. None where there is none."""
    if saved(_LONGEST) <= 0:
        return None
    low, high = 0, _LONGEST  # saved(low) <= 0 < saved(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saved(middle) > 0 else (middle, high)
    return high


def mixer_label(mixer: MixerConfig) -> str:
    """Return the name of the nearest preset, followed by the parts that differ from it."""
    parts = mixer.model_dump()

    def differences(name: str) -> dict[str, Any]:
        preset = PRESETS[name].model_dump()
        return {field: value for field, value in parts.items() if value != preset[field]}

    # a mixer with another score is another mixer, however many other parts agree
    nearest = min(PRESETS, key=lambda name: (PRESETS[name].score != mixer.score, len(differences(name))))
    changed = ", ".join(f"{field}={value}" for field, value in differences(nearest).items())
    return f"{nearest} ({changed})" if changed else nearest


def _assign_mixers(
    default: MixerConfig, layers: Mapping[str, MixerConfig], num_layers: int
) -> tuple[list[MixerConfig], list[str]]:
    """Return the mixer of every layer, and what is wrong with the ranges in `layers`."""
    chosen = [default] * num_layers
    named_by: dict[int, str] = {}
    problems = []
    for key, mixer in layers.items():
        try:
            indices = parse_layers(key, num_layers)
        except ConfigError as error:
            problems.append(str(error))
            continue
        for layer_idx in indices:
            if layer_idx in named_by:
                problems.append(f"layer {layer_idx} is named twice: by {named_by[layer_idx]!r} and by {key!r}")
            named_by[layer_idx] = key
            chosen[layer_idx] = mixer
    return chosen, problems


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Turn a layer range into layer indices.

    Args:
        text: Comma-separated indices and inclusive ranges: `"0-3"`, `"5,7"`; -1 is the last layer.
        num_layers: Layers of the model.

    Returns:
        The indices in the order given.

    Raises:
        ConfigError: The text is malformed, or names a layer the model does not have.
    """
    indices: list[int] = []
    for part in str(text).split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"layers: {text!r} is not a layer range; write it as '0-3', '5,7' or '-1'")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        inside = -num_layers <= first < num_layers and last < num_layers
        if not inside:
            raise ConfigError(f"layers: {text!r} is outside the model, whose layers are 0 to {num_layers - 1}")
        if last < first or (first < 0 and match["last"]):
            raise ConfigError(f"layers: {text!r} does not count upwards from 0; write it as 'first-last'")
        indices += [index % num_layers for index in range(first, last + 1)]
    return indices


def _mixer_problems(mixer: MixerConfig, family: Family, geometry: LayerGeometry, context_length: int) -> list[str]:
    """Return why this mixer cannot stand in these layers (empty when it can)."""
    if mixer.score == "softmax":
        return []
    problems = _family_problems(mixer, family)
    outside = [head for head in mixer.exact_kv_heads if head >= geometry.num_kv_heads]
    if outside:
        problems.append(f"exact_kv_heads {outside} must be between 0 and {geometry.num_kv_heads - 1}")
    elif len(mixer.exact_kv_heads) == geometry.num_kv_heads:
        problems.append("exact_kv_heads names every key/value head; use the mixer softmax for such a layer")
    if mixer.feature_dim is not None and mixer.feature_dim > geometry.head_dim:
        problems.append(f"feature_dim {mixer.feature_dim} is wider than the model's heads of {geometry.head_dim}")
    if mixer.kept_keys and mixer.window + mixer.kept_keys > context_length:
        problems.append(
            f"window {mixer.window} and kept_keys {mixer.kept_keys} are longer than the model's context of "
            f"{context_length} tokens, so nothing would ever leave them; keep fewer"
        )
    if mixer.window > context_length:
        problems.append(
            f"window {mixer.window} is longer than the model's context of {context_length} tokens, so the mixer would "
            "never see a token; use a smaller window, or the mixer softmax"
        )
    return problems


def _family_problems(mixer: MixerConfig, family: Family) -> list[str]:
    """Return why this mixer cannot stand in this family, whatever its sizes."""
    problems = []
    if mixer.causal and not family.causal:
        problems.append(
            f"causal: true in a {family.architecture}, an encoder, whose tokens see those after them too; set "
            "causal: false"
        )
    if family.causal and not mixer.causal:
        problems.append(
            f"causal: false in a {family.architecture}, which predicts the next token: a sum over all tokens would "
            "show it that token; set causal: true"
        )
    if mixer.rope != "keep" and not family.rotary:
        problems.append(f"rope: {mixer.rope} in a {family.architecture}, which has no rotary embedding; use rope: keep")
    return problems
