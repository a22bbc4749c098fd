"""Tiny students of every kind of mixer, with random mixers whose far part counts and forgets."""

import pytest
import torch

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.layers import converted_layers
from subquad.layers import resolve_mixer as mixer

MIXERS = {
    "2mamba": {"preset": "2mamba", "window": 8, "sinks": 2},
    "2mamba-pure": {"preset": "2mamba", "window": 0},
    "2mamba-no-rope": {"preset": "2mamba", "window": 8, "sinks": 2, "rope": "drop"},
    "2mamba-fast-rope": {"preset": "2mamba", "window": 8, "sinks": 2, "conv_width": 1, "rope": "fast"},
    "2mamba-slow-rope": {"preset": "2mamba", "window": 8, "sinks": 2, "kept_keys": 4, "conv_width": 1, "rope": "slow"},
    "2mamba-exact-head": {"preset": "2mamba", "window": 8, "sinks": 2, "exact_kv_heads": [1]},
    "2mamba-absolute": {"preset": "2mamba", "window": 8, "sinks": 2, "mix_reference": "absolute"},
    "2mamba-mix": {"preset": "2mamba", "window": 8, "sinks": 2, "mix_by_mass": True, "mix_by_input": True},
    "2mamba-value-step": {"preset": "2mamba", "window": 8, "sinks": 2, "value_step": "softplus"},
    "2mamba-write": {"preset": "2mamba", "window": 8, "sinks": 2, "write_gate": True},
    "2mamba-write-pure": {"preset": "2mamba-pure", "write_gate": True},
    "taylor-3-write": {"preset": "taylor", "order": 3, "window": 4, "sinks": 1, "write_gate": True},
    "taylor-3-write-pure": {"preset": "taylor-pure", "order": 3, "write_gate": True},
    "taylor-1-mix": {"preset": "taylor", "order": 1, "window": 8, "mix_by_mass": True, "mix_reference": "absolute"},
    "2mamba-kept": {"preset": "2mamba", "window": 8, "sinks": 2, "kept_keys": 3},
    "2mamba-kept-recent": {"preset": "2mamba", "window": 6, "sinks": 2, "kept_keys": 4, "kept_recency": 300.0},
    "2mamba-kept-head": {"preset": "2mamba", "window": 4, "kept_keys": 1, "exact_kv_heads": [1], "mix_by_mass": True},
    "2mamba-kept-write": {"preset": "2mamba", "window": 5, "sinks": 1, "kept_keys": 7, "write_gate": True},
    "taylor-kept": {"preset": "taylor", "window": 3, "kept_keys": 4, "sinks": 2},
    "taylor-3-kept": {"preset": "taylor", "order": 3, "window": 4, "sinks": 1, "kept_keys": 5},
    "linear-relu-kept": {"preset": "linear-relu", "window": 3, "kept_keys": 4},
    "mamba2s-mix": {"preset": "mamba2s", "window": 8, "sinks": 2, "mix_by_input": True},
    "mamba2s": {"preset": "mamba2s", "window": 8, "sinks": 2},
    "mamba2s-pure": {"preset": "mamba2s", "window": 0},
    "taylor": {"preset": "taylor", "window": 8, "sinks": 2},
    "taylor-pure": {"preset": "taylor", "window": 0},
    "taylor-4": {"preset": "taylor", "order": 4, "window": 8, "sinks": 0},
    "taylor-3-pure": {"preset": "taylor", "order": 3, "window": 0},
    "linear-identity": {"preset": "linear-identity"},
    "linear-relu": {"preset": "linear-relu"},
    "linear-relu-window": {"preset": "linear-relu", "window": 8, "sinks": 2, "temperature": True},
    "linear-elu": {"preset": "linear-elu"},
    "cottention": {"preset": "cottention"},
    "cottention-window": {"preset": "cottention", "window": 8, "sinks": 2},
    "taylor-relu": {"preset": "taylor-relu"},
    "taylor-elu-3": {"preset": "taylor-elu", "order": 3, "temperature": True, "qk_maps": True},
    "taylor-cosine": {"preset": "taylor-cosine"},
    "mamba2": {"preset": "mamba2"},
    "mamba2-norm-only": {"preset": "mamba2", "skip": False, "conv_activation": "none", "window": 8},
    "based": {"preset": "based", "feature_dim": 5},
    "based-window": {"preset": "based", "feature_dim": 4, "window": 8, "sinks": 2, "output_gate": "sigmoid"},
    "softmax-l2": {"preset": "softmax-l2"},
    "softmax-layer": {"preset": "softmax-layer", "exact_kv_heads": [0]},
    "softmax-gate": {"preset": "softmax-gate", "score_clamp": 1.0},
    "2mamba-e": {"preset": "2mamba-e"},
    "fox": {"preset": "fox"},
    "fox-pro": {"preset": "fox-pro"},
    "exp-everything": {
        "score": "exp",
        "feature_map": "learned",
        "feature_dim": 6,
        "decay": "mamba2",
        "value_step": "softplus",
        "conv_width": 3,
        "conv_activation": "silu",
        "skip": True,
        "temperature": True,
        "score_clamp": 4.0,
        "normaliser": "head_rms",
        "output_gate": "silu",
        "qk_norm": True,
        "kv_shift": True,
    },
    "window-1": {"preset": "taylor", "window": 1, "sinks": 1},
}
all_mixers = pytest.mark.parametrize("name", MIXERS)


def convert(teacher, name_or_mixer, randomise=True, layers=None):
    config = MIXERS[name_or_mixer] if isinstance(name_or_mixer, str) and name_or_mixer in MIXERS else name_or_mixer
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer(config), layers=layers))
    if randomise:
        torch.manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if ".mixer." not in key:
                    continue
                parameter.add_(0.2 * torch.randn_like(parameter))
                # A far part that really counts.
                if key.endswith("log_mix"):
                    parameter.fill_(-1.0)
        for layer in converted_layers(model):
            if layer.mixer is not None and layer.mixer.decay is not None:
                # A decay that really forgets.
                layer.mixer.decay.set_timescale(torch.linspace(5.0, 20.0, layer.mixer.geometry.num_kv_heads))
    return model
