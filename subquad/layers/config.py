"""`MixerConfig`: the parts a token mixer is built from. A preset (see `presets.py`) is a filled-in `MixerConfig`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from subquad.errors import ConfigError
from subquad.layers.inputs import RopePart

MAX_TAYLOR_ORDER = 10
LINEAR_MAX_ORDER = 2
# float32 ends at e^88.7; thousands of weights of e^80 can still be added
MAX_SCORE_CLAMP = 80.0

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class MixerConfig(BaseModel):
    """The parts of one token mixer (`docs/mixers.md` lists every known system as such a config).

    With `x_ts = scale * q_t . k_s` and `L_ts` the sum of the log decays after `s` up to `t`, the weight of token `s` is
    `w_ts = score(x_ts) * exp(L_ts)`. With `window = W > 0` the last W tokens and the first `sinks` tokens are scored
    exactly as the teacher does (softmax) and share one normaliser with the rest, the *far part*, which is the mixer
    run on the stream of keys, values and decays delayed by W tokens. Where the mixer has no sum of weights to share
    (normaliser other than `sum`), its output is added to the window's with a learned per-head weight.

    Attributes:
        score: `power` is `x**order`, `taylor` is `sum_{i<=order} x**i / i!`, `exp` is `e**x`, `softmax` keeps the
            teacher's own attention untouched.
        order: degree of `power` and `taylor`; linear time up to 2, quadratic above (at most 10).
        feature_map: applied to q and k after RoPE, before the score: `feature_maps.py`.
        feature_dim: width of a learned feature map (`feature_map="learned"` only).
        scale: factor on q.k before the score; None is `head_dim ** -0.5` (`feature_dim ** -0.5` with a learned map).
        score_clamp: upper bound of x in the score of `exp`, at most 80 (float32 holds no e^89); None for no bound.
        decay: form of the per-token, per-key/value-head decay: `decay.py`.
        decay_timescale: (shortest, longest) start of the decay's time constant in tokens, log-spaced over the heads;
            None is (64, context length), and sixteen context lengths for an `exp` score, which starts as its teacher.
            The start weight is zero, so the start does not depend on the token.
        conv_width: width of the depthwise causal convolution on q, k, v before RoPE; 1 is none. Identity at start.
            With a window it acts on the far part only, so that the window stays exact.
        conv_activation: activation after the convolution; SiLU has no identity start.
        value_step: factor on v: `softplus(W x + b)` per key/value head (with `decay: mamba2` the decay's own dt), or
            Cottention's `s ** -sigmoid(m)`, s the tokens that the value's own token sees.
        write_gate: learned factor in (0, 1) on a token's weight, per key/value head, from the layer's input.
        normaliser: `sum` divides by the sum of weights, `rms` is an RMS norm over the concatenated heads (`gated_rms`
            of the gated output), the `head_*` ones normalise the numerator per head, `count` divides by the number of
            visible tokens.
        output_gate: gate on the mixer's output, from the layer's input.
        skip: learned per-head skip connection from v, 0 at the start.
        qk_norm: RMS norm on q and k before RoPE; it has no identity start.
        kv_shift: data-dependent token shift on k and v before the convolution (Forgetting Transformer Pro).
        rope: whether the mixer's q and k carry the teacher's rotary embedding (a window always does); `fast` and `slow`
            rotate only the half of the channel pairs with the higher or the lower frequencies (`fast` is the p-RoPE of
            Barbero et al. 2024, arXiv 2410.06205, at p = 0.5).
        offset: learned per-head constant c added to the score before a power: `(x + c) ** order`.
        temperature: learned per-head factor on the score.
        center_keys: subtract from the far part's keys, after RoPE, their mean per key/value head, which calibration
            sets (0 before it) and training leaves. Softmax does not see it; a power does.
        qk_maps: learned head_dim x head_dim maps per head on the far part's q and k (identity at start, mergeable).
        window: number of last tokens scored exactly; 0 is the pure mixer of the papers.
        sinks: number of first tokens of a document scored exactly and never decayed.
        kept_keys: tokens per key/value head that stay exact when they leave the window, those with the keys of highest
            score (`kept_keys.py`); what they push out goes to the far part.
        kept_recency: how much higher a token's score is for every 1,000 tokens that it stands later in its document, so
            that old tokens make room in long texts; 0 keeps the best whatever their age.
        mix_reference: unit of the far part's weight. `near`: far weights are multiples of the window's own mass
            (robust where logits are large); `absolute`: the score as it is.
        mix_by_mass: the far part's weight also follows, by learned per-head exponents, the window's mass, the far
            part's own and the number of tokens in it: `far_weight.py`.
        mix_by_input: it also follows the layer's input, by a learned map that is 0 at the start.
        precision: of the far part's matrix products on a GPU, see `subquad.kernels.poly_attention`; `high` where
            queries are nearly orthogonal to what their keys have in common.
        state_dtype: in which the cache keeps the far part's state between calls; sums are computed in float32.
        exact_kv_heads: key/value heads of this layer that stay exact softmax over all tokens.
        causal: whether a token sees only itself and the past. `false` is for encoders: sums over all tokens, without
            the parts that need an order in time (decay, convolution, token shift, window). What counts tokens
            (`value_step: position`, `normaliser: count`) counts all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: Literal["power", "taylor", "exp", "softmax"]
    order: Annotated[int, Field(ge=0, le=MAX_TAYLOR_ORDER)] = 2
    feature_map: Literal["identity", "relu", "elu", "cosine", "learned"] = "identity"
    feature_dim: Annotated[int, Field(ge=1)] | None = None
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    score_clamp: _Finite | None = None
    decay: Literal["none", "softplus", "logsigmoid", "mamba2"] = "none"
    decay_timescale: tuple[_Finite, _Finite] | None = None
    conv_width: Annotated[int, Field(ge=1, le=8)] = 1
    conv_activation: Literal["none", "silu"] = "none"
    value_step: Literal["none", "softplus", "position"] = "none"
    write_gate: bool = False
    normaliser: Literal["sum", "none", "rms", "gated_rms", "head_l2", "head_rms", "head_layer", "count"] = "sum"
    output_gate: Literal["none", "sigmoid", "silu"] = "none"
    skip: bool = False
    qk_norm: bool = False
    kv_shift: bool = False
    rope: RopePart = "keep"
    offset: bool = False
    temperature: bool = False
    center_keys: bool = False
    qk_maps: bool = False
    window: Annotated[int, Field(ge=0)] = 0
    sinks: Annotated[int, Field(ge=0)] = 0
    kept_keys: Annotated[int, Field(ge=0)] = 0
    kept_recency: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    mix_reference: Literal["near", "absolute"] = "near"
    mix_by_mass: bool = False
    mix_by_input: bool = False
    precision: Literal["default", "high"] = "default"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    exact_kv_heads: tuple[Annotated[int, Field(ge=0)], ...] = ()
    causal: bool = True

    @model_validator(mode="after")
    def _check_combination(self) -> MixerConfig:
        problems = self.impossible()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def impossible(self) -> list[str]:
        """Return the reasons why these parts cannot go together (empty when they can)."""
        problems = []
        if self.offset and not (self.score == "power" and self.order == 2):
            problems.append(f"offset: true needs score: power with order: 2 (got {self.score}, order {self.order})")
        if self.score_clamp is not None and self.score != "exp":
            problems.append(f"score_clamp is for score: exp (got score: {self.score})")
        if (self.feature_dim is not None) != (self.feature_map == "learned"):
            problems.append("feature_dim goes with feature_map: learned, and only with it")
        if self.decay_timescale is not None:
            short, long = self.decay_timescale
            if self.decay == "none":
                problems.append("decay_timescale is set but decay is none")
            if not 0 < short <= long:
                problems.append(
                    f"decay_timescale must be (shortest, longest) with 0 < shortest <= longest, got {short, long}"
                )
        if self.center_keys and self.order == 0 and self.score in ("power", "taylor"):
            problems.append("center_keys: true with order: 0, whose weights do not depend on the keys")
        if self.sinks and not self.window:
            problems.append(f"sinks: {self.sinks} needs window > 0: sinks share the window's softmax")
        if self.kept_keys and not self.window and self.score != "softmax":
            problems.append(f"kept_keys: {self.kept_keys} needs window > 0: kept keys share the window's softmax")
        if self.kept_recency and not self.kept_keys and self.score != "softmax":
            problems.append(f"kept_recency: {self.kept_recency:g} orders kept keys, and kept_keys is 0")
        if self.feature_map == "learned" and self.qk_maps:
            problems.append("qk_maps: true beside feature_map: learned, which has maps of its own")
        if self.conv_activation != "none" and self.conv_width == 1:
            problems.append(
                f"conv_activation: {self.conv_activation} follows the convolution, which conv_width: 1 leaves out"
            )
        if self.normaliser == "gated_rms" and self.output_gate == "none":
            problems.append("normaliser: gated_rms is an RMS norm of the gated output; it needs an output_gate")
        problems += self._impossible_with_window() if self.window else self._impossible_without_window()
        if self.score == "exp":
            problems += self._impossible_with_exp()
        if self.score == "softmax":
            problems += self._impossible_with_softmax()
        elif not self.causal:
            problems += self._impossible_without_order()
        if self.state_dtype != "float32" and not (self.linear and self.causal):
            problems.append(
                f"state_dtype: {self.state_dtype} is for a cached state, which score: {self.score} with order: "
                f"{self.order}, causal: {str(self.causal).lower()} does not have"
            )
        if len(set(self.exact_kv_heads)) != len(self.exact_kv_heads):
            problems.append(f"exact_kv_heads has duplicates: {list(self.exact_kv_heads)}")
        return problems

    def _impossible_with_window(self) -> list[str]:
        problems = []
        if self.normaliser == "count":
            problems.append("normaliser: count counts every visible token; it needs window: 0")
        if self.skip:
            problems.append("skip: true adds the token itself, which a window has already; it needs window: 0")
        if self.mix_by_mass and not self.normalised:
            problems.append(
                f"mix_by_mass: true follows the far part's sum of weights, which normaliser: {self.normaliser} does "
                "not keep; use normaliser: sum, or mix_by_input"
            )
        return problems

    def _impossible_without_window(self) -> list[str]:
        named = [name for name in ("mix_by_mass", "mix_by_input") if getattr(self, name)]
        return [f"{name}: true weighs the far part against a window; it needs window > 0" for name in named]

    def _impossible_with_exp(self) -> list[str]:
        problems = []
        if self.window:
            problems.append(f"window: {self.window} with score: exp: an exp score is exact already; use window: 0")
        if self.order != LINEAR_MAX_ORDER:
            problems.append(f"order: {self.order} is for score: power and taylor (got score: exp)")
        if self.write_gate:
            problems.append("write_gate: true is for score: power and taylor (got score: exp); use a decay")
        if self.normaliser in ("none", "rms", "gated_rms"):
            problems.append(
                f"normaliser: {self.normaliser} with score: exp would mix heads whose sums of e^x differ by orders of "
                "magnitude; use sum, head_l2, head_rms, head_layer or count"
            )
        if self.score_clamp is not None and self.score_clamp > MAX_SCORE_CLAMP:
            problems.append(
                f"score_clamp must be at most {MAX_SCORE_CLAMP:g}, got {self.score_clamp:g}: e^x overflows in float32 "
                "from x = 88.7 on, and sums of many weights before that"
            )
        if self.normaliser == "count" and self.score_clamp is None:
            problems.append("normaliser: count with score: exp needs score_clamp (5.0 in the paper): e^x overflows")
        if self.center_keys:
            problems.append(
                "center_keys: true with score: exp: e^x only scales by a vector subtracted from all keys, which its "
                "normaliser takes out again; it is for score: power and taylor"
            )
        if self.precision != "default":
            problems.append(f"precision: {self.precision} is for score: power and taylor (got score: exp)")
        return problems

    def _impossible_with_softmax(self) -> list[str]:
        default = type(self).model_fields
        changed = [name for name in default if name != "score" and getattr(self, name) != default[name].default]
        if not changed:
            return []
        return [f"score: softmax leaves the layer as it is, so these have no effect: {', '.join(changed)}"]

    def _impossible_without_order(self) -> list[str]:
        problems = []
        if self.decay != "none":
            problems.append(
                f"decay: {self.decay} with causal: false: a decay says how much of the past is left at a token, and "
                "here it sees the tokens after it too; use decay: none"
            )
        if self.conv_width > 1:
            problems.append(
                f"conv_width: {self.conv_width} with causal: false: the convolution reads the tokens before, while an "
                "encoder has no direction; use conv_width: 1"
            )
        if self.kv_shift:
            problems.append("kv_shift: true with causal: false: it mixes in the token before; use kv_shift: false")
        if self.window:
            problems.append(
                f"window: {self.window} with causal: false: a window is of the last tokens, and what leaves it enters "
                "a state that later tokens read; use window: 0"
            )
        if self.center_keys:
            problems.append(
                "center_keys: true with causal: false: calibration sets the mean key, and it is for decoders"
            )
        if self.precision != "default":
            problems.append(
                f"precision: {self.precision} is for the causal kernels; sums over all tokens are computed in float32"
            )
        return problems

    @property
    def linear(self) -> bool:
        """Whether the far part has a fixed-size state (score of degree at most 2)."""
        return self.score in ("power", "taylor") and self.order <= LINEAR_MAX_ORDER

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's position in its document matters, so that a cache counts the tokens seen."""
        return self.window > 0 or self.value_step == "position" or self.normaliser == "count"

    @property
    def normalised(self) -> bool:
        """Whether the output is divided by the sum of weights."""
        return self.normaliser == "sum"

    def score_orders(self) -> tuple[int, ...]:
        """Return the powers of x whose state rows are kept, lowest first."""
        if self.score == "power":
            return tuple(range(self.order + 1)) if self.offset else (self.order,)
        return tuple(range(self.order + 1))


def parse_mixer(value: dict[str, object]) -> MixerConfig:
    """Build a `MixerConfig` from a plain mapping.

    Args:
        value: Field names to values, as found in a recipe or a checkpoint's config.

    Returns:
        The validated config.

    Raises:
        ConfigError: Unknown keys, values out of range or an impossible combination, all in one message.
    """
    try:
        return MixerConfig.model_validate(value)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            # a rule about parts together names their values itself
            lines.append(f"{where}: {message} (got {item['input']!r})" if where else message)
        raise ConfigError("mixer is not valid:\n  " + "\n  ".join(lines)) from error
