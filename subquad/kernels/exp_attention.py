"""Softmax attention with a per-token decay, a bound on the score, or an undivided numerator: the exp scores.

    w_ts = exp(min(scale q_t.k_s, clamp) + L_ts)        L_ts = sum_{r=s+1..t} log_decay_r <= 0
    out_t = sum_s w_ts v_s / sum_s w_ts                 or the numerator alone

e^x is the sum of all powers of x, so there is no state of fixed size: time is quadratic and decoding needs the keys,
values and decays of all tokens. The kernels are PyTorch's own: `scaled_dot_product_attention` with L as a bias, and on
NVIDIA GPUs FlexAttention (`exp_flex.py`). Forgetting Transformer (Lin et al., arXiv 2503.02130); 2Mamba-E (Mongaras &
Larson, arXiv 2602.17363); a clamped score and a numerator without its denominator (the same, arXiv 2507.23632).
"""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from subquad.errors import ConfigError
from subquad.kernels.backend import backend_from_environment, say_once, under_autocast
from subquad.kernels.checks import check_shapes
from subquad.kernels.decay import pair_log_decay
from subquad.kernels.window_flex import MIN_QUERIES, flex_problem

ExpBackend = Literal["auto", "torch", "flex"]
EXP_BACKENDS = ("auto", "torch", "flex")


class ExpInputs(NamedTuple):
    """Checked arguments of `exp_attention`, under their names there, `scale` filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    scale: float
    clamp: float | None
    valid: Tensor | None
    documents: Tensor | None
    normalize: bool
    causal: bool = True


def exp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    clamp: float | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    causal: bool = True,
    normalize: bool = True,
    form: str = "auto",
    backend: ExpBackend = "auto",
) -> Tensor:
    """Attend with `exp(min(x, clamp) + L)` as weight, `x = scale q.k`. Quadratic time; has gradients.

    Args:
        q: `[B, Tq, H, d]`; the queries are the last Tq positions of k.
        k: `[B, T, Hkv, d]`; query head h uses key/value head `h // (H // Hkv)`.
        v: `[B, T, Hkv, e]`.
        log_decay: `[B, T, Hkv]`, natural log of each token's decay, <= 0 and not cumulated; None is no decay.
        scale: factor on `q . k`; None is `d ** -0.5`.
        clamp: upper bound of `scale q.k`, before the decay; None is no bound.
        valid: `[B, T]` bool, False hides a key (padding); it still decays what came before it. None shows all.
        documents: `[B, T]` integer ids, equal for the tokens of one document, which stand together; a query sees keys
            of its own document only. None is one document.
        causal: whether a query sees the keys up to its own position only; else all of them, without decay and on
            PyTorch's own attention (an encoder's sequences are short).
        normalize: whether to divide by the sum of weights; False needs a clamp, or e^x may overflow.
        form: `quadratic` or `auto`, which is the same: other forms do not exist.
        backend: `flex` is one fused FlexAttention kernel, on NVIDIA GPUs. `torch` is PyTorch's attention with a bias,
            `[B, H, Tq, T]` in memory where there is a decay. `auto` takes `flex` on a GPU that runs it for more than
            128 queries, unless the environment says `SUBQUAD_BACKEND=torch`.

    Returns:
        `[B, Tq, H, e]`, q's dtype if normalised, else the numerator in float32 (float64 for float64 inputs). A query
        that sees no key gives 0.

    Raises:
        ConfigError: shapes that do not fit together, a form that does not exist, no clamp for a numerator, a decay
            where not causal, or a backend that is unknown or cannot run.
    """
    check_shapes(q, k, v, log_decay, None)
    if form not in ("auto", "quadratic"):
        raise ConfigError(
            f"exp_attention: form {form!r} does not exist: e^x has every power, so no state of fixed size holds the "
            "past; use 'quadratic', or a power or Taylor score up to order 2"
        )
    if not normalize and clamp is None:
        raise ConfigError("exp_attention: normalize=False without a clamp: e^x overflows; give one (5.0 in the paper)")
    if not causal and log_decay is not None:
        raise ConfigError(
            "exp_attention: log_decay with causal=False: a query sees the tokens after it too, and a decay has no "
            "meaning for those; leave it out"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if q.device.type == "cuda":
        q, k, v = under_autocast(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        inputs = ExpInputs(q, k, v, log_decay, scale, clamp, valid, documents, normalize, causal)
        if _fuses(backend, q, k, v, causal):
            from subquad.kernels.exp_flex import flex_exp_attention

            return flex_exp_attention(inputs)
        return _in_torch(inputs)


def _fuses(backend: ExpBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether FlexAttention runs."""
    if backend not in EXP_BACKENDS:
        raise ConfigError(
            f"exp_attention: backend {backend!r} is unknown; it must be one of {', '.join(EXP_BACKENDS)}."
        )
    if backend == "torch" or (backend == "auto" and not causal):
        return False
    if backend == "auto" and (
        q.device.type != "cuda" or q.shape[1] < MIN_QUERIES or backend_from_environment() == "torch"
    ):
        return False
    problem = flex_problem(q, k, v) if causal else "its mask is causal, and this call is not"
    if problem is None:
        return True
    if backend == "flex":
        raise ConfigError(f"exp_attention: backend 'flex' cannot run: {problem}. Use backend='auto' or 'torch'.")
    say_once(logging.WARNING, "exp_attention runs in PyTorch on this GPU, which is slower: %s", problem)
    return False


def _in_torch(inputs: ExpInputs) -> Tensor:
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype, group_size = q.dtype, q.shape[2] // k.shape[2]
    plain = inputs.clamp is None and inputs.normalize
    if inputs.log_decay is not None or not plain:
        wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    k, v = (x.repeat_interleave(group_size, dim=2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    masked = inputs.log_decay is not None or inputs.valid is not None or inputs.documents is not None
    if plain and not masked and q.shape[2] in (1, k.shape[2]):
        is_causal = inputs.causal and q.shape[2] > 1
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=inputs.scale)
        return out.transpose(1, 2)
    seen = visible_keys(inputs)
    sees_none = ~seen.any(-1, keepdim=True)
    # No row of a softmax may be empty: such a query looks at everything, and its result is dropped.
    bias = mask = seen | sees_none
    if inputs.log_decay is not None:
        decay = pair_log_decay(inputs.log_decay.movedim(-1, 1).to(q.dtype), q.shape[2])
        bias = decay.repeat_interleave(group_size, dim=1).masked_fill(~mask, -torch.inf)
    if plain:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=inputs.scale)
    else:
        out = _by_weights(q, k, v, bias, inputs)
    out = out.masked_fill(sees_none, 0.0).transpose(1, 2)
    return out.to(dtype) if inputs.normalize else out


def _by_weights(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, inputs: ExpInputs) -> Tensor:
    """Compute every weight: `[B, H, Tq, T]` in memory."""
    score = (inputs.scale * q) @ k.mT
    if inputs.clamp is not None:
        score = score.clamp(max=inputs.clamp)
    score = score.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else score + bias
    return (score.softmax(-1) if inputs.normalize else score.exp()) @ v


def visible_keys(inputs: ExpInputs) -> Tensor:
    """Return `[B or 1, 1, Tq, T]` bool: which keys each query sees."""
    num_queries, num_keys = inputs.q.shape[1], inputs.k.shape[1]
    steps = torch.arange(num_keys, device=inputs.q.device)
    seen = (steps <= steps[num_keys - num_queries :, None])[None] | (not inputs.causal)
    if inputs.valid is not None:
        seen = seen & inputs.valid[:, None]
    if inputs.documents is not None:
        seen = seen & (inputs.documents[:, num_keys - num_queries :, None] == inputs.documents[:, None])
    return seen[:, None]
