"""The named mixers: every system of the theory with its formula and source, as a filled-in `MixerConfig`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from subquad.errors import ConfigError
from subquad.layers.config import MixerConfig, parse_mixer

SOURCES = {
    "A": "Mongaras & Larson, On the Expressiveness of Softmax Attention (arXiv 2507.23632)",
    "B": "Mongaras, Dohm & Larson, Cottention (arXiv 2409.18747)",
    "C": "Mongaras & Larson, 2Mamba2Furious (arXiv 2602.17363)",
    "D": "Dao & Gu, Mamba-2 / SSD (arXiv 2405.21060)",
    "E": "Lin et al., Forgetting Transformer (arXiv 2503.02130)",
    "F": "Arora et al., Based (arXiv 2402.18668)",
    "K": "Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236)",
    "V": "Vaswani et al., Attention Is All You Need (arXiv 1706.03762)",
}

_WINDOWED = {"window": 64, "sinks": 4, "temperature": True, "qk_maps": True}


@dataclass(frozen=True)
class System:
    """One system of the theory.

    Attributes:
        title: its name in words.
        mixer: its parts; the preset of the same name.
        formula: what it computes, with `x_ts = scale q_t.k_s` and `L_ts` the sum of the log decays after s up to t.
        source: key of `SOURCES`, with a section where that helps.
    """

    title: str
    mixer: MixerConfig
    formula: str
    source: str


SYSTEMS: dict[str, System] = {
    "softmax": System(
        "softmax, the layer untouched", MixerConfig(score="softmax"), "y_t = sum_s e^x v_s / sum_s e^x", "V"
    ),
    "linear-identity": System(
        "linear attention, identity",
        MixerConfig(score="power", order=1, normaliser="rms"),
        "y_t = RMS(sum_s x v_s), over the concatenated heads",
        "A",
    ),
    "linear-relu": System(
        "linear attention, ReLU",
        MixerConfig(score="power", order=1, feature_map="relu"),
        "y_t = sum_s w v_s / sum_s w, w = relu(q_t).relu(k_s)",
        "K",
    ),
    "linear-elu": System(
        "linear attention, elu + 1",
        MixerConfig(score="power", order=1, feature_map="elu"),
        "y_t = sum_s w v_s / sum_s w, w = phi(q_t).phi(k_s), phi = elu + 1",
        "K",
    ),
    "cottention": System(
        "Cottention",
        MixerConfig(score="power", order=1, feature_map="cosine", scale=1.0, value_step="position", normaliser="none"),
        "y_t = sum_s cos(q_t, k_s) v_s / s^sigmoid(m), s the position of v_s",
        "B",
    ),
    # Up to order 2 there is a state; 3 ... 10 are quadratic.
    "taylor": System(
        "truncated Taylor series",
        MixerConfig(score="taylor", order=2, **_WINDOWED),
        "y_t = sum_s w v_s / sum_s w, w = sum_{i<=n} x^i / i!, n = 2",
        "A",
    ),
    "taylor-pure": System(
        "truncated Taylor series, the paper's layer",
        MixerConfig(score="taylor", order=2),
        "as taylor, of all tokens",
        "A",
    ),
    "taylor-relu": System(
        "orders of ReLU features",
        MixerConfig(score="taylor", order=2, feature_map="relu"),
        "as taylor, with x = scale relu(q_t).relu(k_s)",
        "A",
    ),
    "taylor-elu": System(
        "orders of elu + 1 features",
        MixerConfig(score="taylor", order=2, feature_map="elu"),
        "as taylor, with x = scale phi(q_t).phi(k_s), phi = elu + 1",
        "A",
    ),
    "taylor-cosine": System(
        "orders of cosine features",
        MixerConfig(score="taylor", order=2, feature_map="cosine", scale=1.0),
        "as taylor, with x = cos(q_t, k_s)",
        "A",
    ),
    "softmax-l2": System(
        "softmax, L2 norm for the denominator",
        MixerConfig(score="exp", normaliser="head_l2"),
        "y_t = L2(sum_s e^x v_s), per head",
        "A",
    ),
    "softmax-rms": System(
        "softmax, RMS norm for the denominator",
        MixerConfig(score="exp", normaliser="head_rms"),
        "y_t = RMS(sum_s e^x v_s), per head",
        "A",
    ),
    "softmax-layer": System(
        "softmax, layer norm for the denominator",
        MixerConfig(score="exp", normaliser="head_layer"),
        "y_t = LayerNorm(sum_s e^x v_s), per head",
        "A",
    ),
    "softmax-gate": System(
        "softmax, gate for the denominator",
        MixerConfig(score="exp", score_clamp=5.0, normaliser="count", output_gate="sigmoid"),
        "y_t = sigmoid(W x_t + b) (1/t) sum_s e^min(x, 5) v_s",
        "A",
    ),
    "mamba2": System(
        "Mamba-2",
        MixerConfig(
            score="power",
            order=1,
            decay="mamba2",
            conv_width=4,
            conv_activation="silu",
            value_step="softplus",
            skip=True,
            output_gate="silu",
            normaliser="gated_rms",
        ),
        "y_t = RMS((sum_s x e^L dt_s v_s + D v_t) silu(z_t)), log a = -e^A dt, dt = softplus(W x + b); "
        "q, k, v by SiLU(conv4)",
        "D",
    ),
    # All heads share one RMS norm; the window is joined with the normed output.
    "mamba2s": System(
        "Mamba-2S",
        MixerConfig(
            score="power", order=1, decay="softplus", conv_width=2, value_step="softplus", normaliser="rms", **_WINDOWED
        ),
        "y_t = RMS(sum_s x e^L softplus(W_dt x_s) v_s), log a = -softplus(u); q, k, v by conv2",
        "C",
    ),
    "mamba2s-pure": System(
        "Mamba-2S, the paper's layer",
        MixerConfig(score="power", order=1, decay="softplus", conv_width=2, value_step="softplus", normaliser="rms"),
        "as mamba2s, of all tokens",
        "C",
    ),
    # The offset answers "the square is even"; `offset: false`, `value_step: softplus` are the paper's variants.
    "2mamba": System(
        "2Mamba",
        MixerConfig(score="power", order=2, decay="softplus", conv_width=2, offset=True, **_WINDOWED),
        "y_t = sum_s w v_s / sum_s w, w = (x + c)^2 e^L, log a = -softplus(u); q, k, v by conv2",
        "C",
    ),
    "2mamba-pure": System(
        "2Mamba, the paper's layer",
        MixerConfig(score="power", order=2, decay="softplus", conv_width=2),
        "as 2mamba with c = 0, of all tokens",
        "C",
    ),
    "2mamba-e": System(
        "2Mamba-E",
        MixerConfig(score="exp", decay="softplus", conv_width=2),
        "y_t = sum_s w v_s / sum_s w, w = e^(x + L), log a = -softplus(u); q, k, v by conv2",
        "C",
    ),
    "fox": System(
        "Forgetting Transformer",
        MixerConfig(score="exp", decay="logsigmoid"),
        "y_t = sum_s w v_s / sum_s w, w = e^(x + L), log a = logsigmoid(W x + b)",
        "E",
    ),
    # The paper's output norm is an RMS norm per head: what `head_rms` makes of a weighted mean.
    "fox-pro": System(
        "Forgetting Transformer (Pro)",
        MixerConfig(
            score="exp", decay="logsigmoid", kv_shift=True, qk_norm=True, output_gate="sigmoid", normaliser="head_rms"
        ),
        "y_t = sigmoid(W_g x_t + b) RMS(sum_s w v_s / sum_s w), w as fox, of normed q, k and shifted k, v",
        "E",
    ),
    "based": System(
        "Based",
        MixerConfig(score="taylor", order=2, feature_map="learned", feature_dim=16),
        "y_t = sum_s w v_s / sum_s w, w = 1 + x + x^2/2 of learned q, k of width 16",
        "F",
    ),
}

PRESETS: dict[str, MixerConfig] = {name: system.mixer for name, system in SYSTEMS.items()}


def resolve_mixer(value: str | dict[str, object]) -> MixerConfig:
    """Turn a preset name, or a mapping with an optional `preset` key and overrides, into a `MixerConfig`.

    Args:
        value: `"2mamba"`, or `{"preset": "taylor", "order": 3, "window": 0}`, or all parts spelled out. `causal: False`
            takes a preset's window away, which an encoder cannot have.

    Returns:
        The validated config.

    Raises:
        ConfigError: An unknown preset (the nearest name is suggested), one that is no text, or parts that break a rule.
    """
    if isinstance(value, str):
        value = {"preset": value}
    parts = dict(value)
    name = parts.pop("preset", None)
    if name is None:
        return parse_mixer(parts)
    if not isinstance(name, str):
        raise ConfigError(f"preset must be the name of a mixer, got {name!r}. Known: {', '.join(sorted(PRESETS))}.")
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"mixer {name!r} is unknown{hint} Known: {', '.join(sorted(PRESETS))}.")
    base = PRESETS[name].model_dump()
    if parts.get("causal") is False:
        # a preset's window is an addition for conversions of decoders, not a part of its system
        base.update({key: 0 for key in ("window", "sinks", "kept_keys") if key not in parts})
    for conflict, keys in {"window": ("sinks", "kept_keys"), "decay": ("decay_timescale",)}.items():
        if parts.get(conflict) in (0, "none"):
            base.update({key: MixerConfig.model_fields[key].default for key in keys if key not in parts})
    return parse_mixer({**base, **parts})
