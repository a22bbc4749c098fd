"""`poly_attention`: the polynomial-score op with decay, in whichever form is cheapest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.backend import Backend, Precision, choose_backend, under_autocast
from subquad.kernels.bidirectional import TOKENS_PER_BLOCK, bidirectional_attention
from subquad.kernels.checks import (
    check_bidirectional,
    check_coefs,
    check_cu_seqlens,
    check_form,
    check_precision,
    check_shapes,
    check_state,
)
from subquad.kernels.chunked import chunked_attention
from subquad.kernels.cost import DEFAULT_CHUNK_SIZE, cheapest_chunk_size
from subquad.kernels.decay import LOWEST_LOG_DECAY, reset_at, split_resets
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.normalise import guarded_division, normaliser_bound
from subquad.kernels.recurrent import recurrent_step
from subquad.kernels.reference import quadratic_attention
from subquad.kernels.state import MAX_STATE_ORDER, Coefs, PolyState, active_orders

Form = Literal["auto", "quadratic", "chunked", "recurrent"]


class PolyAttentionOutput(NamedTuple):
    """What `poly_attention` returns.

    Attributes:
        out: `[B, Tq, H, e]`, q's dtype if normalised, else float32 (float64 for float64 inputs).
        normaliser: `[B, Tq, H]`, the sum of weights before any guard; float32 (float64 for float64 inputs).
        final_state: the state after the last key, or None if not asked for.
    """

    out: Tensor
    normaliser: Tensor
    final_state: PolyState | None


def poly_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    coefs: Coefs,
    scale: float | None = None,
    key_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    normalize: bool = True,
    initial_state: PolyState | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    precision: Precision = "default",
) -> PolyAttentionOutput:
    """Attend with a polynomial of the score as weight, causally or over all keys.

    `w_ts = sum_n coefs[n] (scale q_t . k_s)**n key_weight_s exp(L_ts)`, `L_ts` the sum of `log_decay` after s up to t;
    `out_t = sum_s w_ts v_s / sum_s w_ts`. Powers 1 and 2 with decay: Mongaras & Larson, 2Mamba2Furious (arXiv
    2602.17363); the truncated Taylor series: the same, On the Expressiveness of Softmax Attention (arXiv 2507.23632).
    All forms compute the same values and gradients. In PyTorch that is in float32 whatever the inputs' dtype and
    whatever autocast says (in float64 for float64 inputs); the Triton kernels multiply in the inputs' precision (under
    autocast, in its dtype) and accumulate in float32.

    Args:
        q: `[B, Tq, H, d]`. With `Tq < T` the queries are the last positions: query i is at key position `T - Tq + i`.
        k: `[B, T, Hkv, d]`; query head h uses key/value head `h // (H // Hkv)`.
        v: `[B, T, Hkv, e]`.
        log_decay: `[B, T, Hkv]`, natural log of each token's decay, <= 0 and not cumulated (values above 0 count as 0);
            -inf is a reset: the token and those after it see nothing from before it. None is no decay.
        coefs: One entry per power 0, 1, 2, … (up to 10): a float, or a tensor `[H]` per query head. An exact float 0.0
            means that the power has no state rows.
        scale: Factor on `q . k`; None is `d ** -0.5`.
        key_weight: `[B, T, Hkv]`, >= 0; 0 means that the token is not written. None is 1.
        cu_seqlens: `[N + 1]` whole numbers, where the N sequences packed into one row (`B = 1`) begin, then `T`; the
            same as a reset at each begin. Not with a state, of which there would be N.
        causal: Whether a query sees the keys up to its own position only. If not, it sees all keys of its sequence:
            `s` runs over all tokens (`bidirectional.py`), without decay and state, in PyTorch.
        normalize: Whether to divide by the sum of weights. A sum nearer to 0 than 1e-6 of its bound is moved there
            (powers up to 2; see `normalise.py`); a row that sees no key gives 0.
        initial_state: State before the first key; powers up to 2 only.
        output_final_state: Whether to return the state after the last key; powers up to 2 only.
        chunk_size: Tokens per chunk; None is 256 in PyTorch (128 with `causal=False`) and 256 to 1,024 on the kernels,
            which round it up to whole tiles. The result does not depend on it.
        form: `quadratic` is the definition: any power, `O(Tq T)` time and memory, for checks. `chunked`: `O(T)` time
            and memory, powers up to 2. `recurrent`: one token, `Tq = T = 1`. `auto`: recurrent for one token with an
            initial state, else chunked with either `chunk_size` or one chunk over all tokens, whichever needs fewer
            operations (`cost.py`); powers above 2 take one chunk: quadratic time, linear memory. With `causal=False`,
            `chunked` is one state of all keys, and `auto` that or pairs, whichever needs fewer operations.
        backend: `auto` takes the Triton kernels on an NVIDIA GPU and PyTorch elsewhere (`backend.py` says where and
            why); `torch` and `triton` insist. `form="quadratic"` is always PyTorch.
        precision: What the kernels multiply. `default`: bfloat16 for bfloat16 inputs, tf32 for float16, three tf32
            products for float32. `high`: three tf32 products for all, where queries are orthogonal to what their keys
            have in common and bfloat16 products would cancel. PyTorch computes in float32 either way.

    Returns:
        `out` in q's dtype, or with `normalize=False` the numerator in float32 (float64 for float64 inputs), since half
        precision could overflow; the normaliser; the final state.

    Raises:
        ConfigError: Shapes, coefficients, state or form that do not fit together; a backend that cannot run here.
    """
    check_shapes(q, k, v, log_decay, key_weight)
    check_coefs(coefs, q.shape[2])
    orders = active_orders(coefs)
    needs_state = initial_state is not None or output_final_state
    if not causal:
        check_bidirectional(form, log_decay is not None, needs_state, cu_seqlens is not None, q.shape[1] == k.shape[1])
    check_form(form, orders, q.shape[1], k.shape[1], needs_state, chunk_size)
    check_precision(precision)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, k, needs_state)
        if not causal:
            attend = functools.partial(
                poly_attention,
                coefs=coefs,
                scale=scale,
                causal=False,
                normalize=normalize,
                chunk_size=chunk_size,
                form=form,
                backend=backend,
                precision=precision,
            )
            return _by_sequence(attend, q, k, v, key_weight, cu_seqlens)
        starts = torch.zeros((1, k.shape[1] + 1), dtype=torch.bool, device=k.device)
        log_decay = reset_at(log_decay, starts.index_fill(1, cu_seqlens.long(), True)[:, :-1], k)
    if initial_state is not None:
        check_state(initial_state, k, v, orders)
    on_triton = form != "quadratic" and choose_backend(backend, q, k, v, orders, causal).backend == "triton"
    if on_triton:
        q, k, v = under_autocast(q, k, v)
    # Nothing inside is for autocast to change.
    with torch.autocast(q.device.type, enabled=False):
        inputs = (q, k, v, log_decay, key_weight, coefs, scale, initial_state)
        if on_triton:
            return _on_triton(*inputs, normalize, output_final_state, chunk_size, form, precision)
        return _in_torch(_prepare(*inputs), normalize, output_final_state, chunk_size, form, q.dtype, causal)


def _by_sequence(
    attend: Callable[..., PolyAttentionOutput],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_weight: Tensor | None,
    cu_seqlens: Tensor,
) -> PolyAttentionOutput:
    """Attend to all keys of each packed sequence, one sequence after another."""
    parts = [
        attend(
            q[:, start:stop],
            k[:, start:stop],
            v[:, start:stop],
            key_weight=None if key_weight is None else key_weight[:, start:stop],
        )
        for start, stop in itertools.pairwise(cu_seqlens.tolist())
        if stop > start
    ]
    out, normaliser = torch.cat([part.out for part in parts], 1), torch.cat([part.normaliser for part in parts], 1)
    return PolyAttentionOutput(out, normaliser, None)


def _in_torch(
    inputs: PolyInputs,
    normalize: bool,
    output_final_state: bool,
    chunk_size: int | None,
    form: Form,
    dtype: torch.dtype,
    causal: bool,
) -> PolyAttentionOutput:
    num_keys = inputs.k.shape[-2]
    if not causal:
        chunk_size, final_state = chunk_size or TOKENS_PER_BLOCK, None
        joined = bidirectional_attention(inputs, form, chunk_size)
    elif form == "quadratic":
        joined, final_state = quadratic_attention(inputs, output_final_state)
    elif form == "recurrent" or (form == "auto" and num_keys == 1 and inputs.state is not None):
        joined, final_state = recurrent_step(inputs, output_final_state)
    else:
        chunk_size = chunk_size or DEFAULT_CHUNK_SIZE
        if form == "auto":
            chunk_size = cheapest_chunk_size(inputs, chunk_size, output_final_state)
        joined, final_state = chunked_attention(inputs, chunk_size, output_final_state)
    out, normaliser = joined[..., :-1], joined[..., -1]
    if normalize:
        bound = normaliser_bound(inputs, causal) if inputs.orders[-1] <= MAX_STATE_ORDER else None
        out = guarded_division(out, normaliser, bound).to(dtype)
    out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return PolyAttentionOutput(out, normaliser.permute(0, 3, 1, 2).flatten(2, 3), final_state)


def _on_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_weight: Tensor | None,
    coefs: Coefs,
    scale: float | None,
    initial_state: PolyState | None,
    normalize: bool,
    output_final_state: bool,
    chunk_size: int | None,
    form: Form,
    precision: Precision,
) -> PolyAttentionOutput:
    from subquad.kernels.triton.autograd import triton_attention

    orders = active_orders(coefs)
    if key_weight is None:
        weight = k.new_ones(k.shape[:3], dtype=torch.float32)
    else:
        weight = key_weight.float()
        v = (v * weight.unsqueeze(-1)).to(v.dtype)
    if log_decay is not None:
        finite, resets = split_resets(log_decay.float())
        log_decay = finite.masked_fill(resets, LOWEST_LOG_DECAY)
    by_power = (*coefs, *[0.0] * (MAX_STATE_ORDER + 1))[: MAX_STATE_ORDER + 1]
    dense = [torch.as_tensor(coef, dtype=torch.float32, device=q.device).expand(q.shape[2]) for coef in by_power]
    out, normaliser, final_state = triton_attention(
        q,
        k,
        v,
        weight,
        log_decay,
        torch.stack(dense),
        orders,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        normalize=normalize,
        state=initial_state,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
        one_chunk=form == "auto",
        precision=precision,
    )
    return PolyAttentionOutput(out, normaliser, final_state)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_weight: Tensor | None,
    coefs: Coefs,
    scale: float | None,
    initial_state: PolyState | None,
) -> PolyInputs:
    orders = active_orders(coefs)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    num_kv_heads = k.shape[2]
    grouped = (num_kv_heads, q.shape[2] // num_kv_heads)
    weight = k.new_ones(k.shape[:3], dtype=dtype) if key_weight is None else key_weight.to(dtype)
    weight = weight.transpose(1, 2).unsqueeze(-1)
    values = torch.cat([v.to(dtype).transpose(1, 2) * weight, weight], dim=-1)
    if log_decay is None:
        finite, resets = weight.new_zeros(weight.shape[:3]), weight.new_zeros(weight.shape[:3], dtype=torch.bool)
    else:
        finite, resets = split_resets(log_decay.to(dtype).transpose(1, 2))
    heads = [torch.as_tensor(coefs[order], dtype=dtype, device=q.device).expand(q.shape[2]) for order in orders]
    if initial_state is not None:
        initial_state = PolyState(*(part.to(dtype) for part in initial_state))
    return PolyInputs(
        q=(q.to(dtype) * scale).unflatten(2, grouped).permute(0, 2, 3, 1, 4),
        k=k.to(dtype).transpose(1, 2),
        v=values,
        log_decay=finite,
        resets=resets,
        coefs=torch.stack(heads).unflatten(1, grouped),
        orders=orders,
        state=initial_state,
    )
