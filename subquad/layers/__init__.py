"""Token mixers: configuration, presets, the attention module built from parts, its cache and its modes."""

from subquad.layers.attention import SubquadAttention, count_parameters, layer_geometry
from subquad.layers.bert_attention import SubquadBertAttention
from subquad.layers.cache import SubquadCacheLayer, cache_bytes, cache_layout
from subquad.layers.config import MixerConfig, parse_mixer
from subquad.layers.geometry import LayerGeometry
from subquad.layers.modes import AttentionMode, attention_mode, collect_local_losses, converted_layers, require_window
from subquad.layers.presets import PRESETS, resolve_mixer

__all__ = [
    "PRESETS",
    "AttentionMode",
    "LayerGeometry",
    "MixerConfig",
    "SubquadAttention",
    "SubquadBertAttention",
    "SubquadCacheLayer",
    "attention_mode",
    "cache_bytes",
    "cache_layout",
    "collect_local_losses",
    "converted_layers",
    "count_parameters",
    "layer_geometry",
    "parse_mixer",
    "require_window",
    "resolve_mixer",
]
