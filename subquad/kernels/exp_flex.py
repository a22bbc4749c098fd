"""The exp scores as one fused kernel: FlexAttention (Dong et al., arXiv 2412.05496), compiled once per model shape.

The mask is the exact window's, as long as the sequence (`window_flex.py`). The decay enters each score as the
difference of two running sums. Those reach thousands, where float32 is too coarse: they are summed in float64 and
handed over as two float32 numbers, whose differences are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from subquad.kernels.decay import LOWEST_LOG_DECAY, wide_dtype
from subquad.kernels.exp_attention import ExpInputs
from subquad.kernels.window_flex import MAX_GRAPHS, SMALL_TILES, Blocks, block_mask_of, layout
from subquad.kernels.window_inputs import WindowInputs


class _Sums(NamedTuple):
    """Running sums of the log decays, coarse + fine, float32: of the queries `[B, Hkv, Tq]` and keys `[B, Hkv, T]`."""

    query: Tensor
    query_rest: Tensor
    key: Tensor
    key_rest: Tensor


def flex_exp_attention(inputs: ExpInputs) -> Tensor:
    """Compute `exp_attention` with FlexAttention.

    A `scale` other than `head_dim ** -0.5` is multiplied into q, in q's dtype.

    Args:
        inputs: checked inputs.

    Returns:
        Outputs, or numerators in float32.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    factor = inputs.scale * q.shape[3] ** 0.5
    if abs(factor - 1) > 1e-12:
        q = q * factor
    whole = WindowInputs(q, k, v, k.shape[1], inputs.scale, inputs.valid, inputs.documents, 0)
    visible, blocks = layout(whole)
    since, until = (x.repeat(k.shape[0] // x.shape[0], 1) for x in visible)
    if inputs.valid is not None:
        until = torch.where(inputs.valid, until, -1)
    # A number that a graph holds would make a graph per number.
    bound = torch.full((q.shape[2],), torch.inf if inputs.clamp is None else inputs.clamp, device=q.device)
    out, log_normaliser = _fused(q, k, v, since, until, *blocks, bound, *_running_sums(inputs))
    if inputs.normalize:
        return out
    return out.float() * log_normaliser.exp()[..., None]


def _running_sums(inputs: ExpInputs) -> _Sums:
    k, num_queries = inputs.k, inputs.q.shape[1]
    if inputs.log_decay is None:
        coarse = torch.zeros((k.shape[0], k.shape[2], k.shape[1]), device=k.device)
        rest = torch.zeros_like(coarse)
    else:
        per_token = inputs.log_decay.movedim(-1, 1).clamp(LOWEST_LOG_DECAY, 0.0)
        total = per_token.to(wide_dtype(k.device)).cumsum(-1)
        coarse = total.float()
        # The gradient goes through the first number alone.
        rest = (total - coarse).detach().float()
    query, query_rest = (x[..., -num_queries:].contiguous() for x in (coarse, rest))
    return _Sums(query, query_rest, coarse, rest)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor,
    until: Tensor,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    q_num_blocks: Tensor,
    q_indices: Tensor,
    bound: Tensor,
    query_sum: Tensor,
    query_rest: Tensor,
    key_sum: Tensor,
    key_rest: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend. All arguments are tensors, so that no length is a constant of the compiled graph."""
    group_size = q.shape[2] // k.shape[2]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (since[batch, key] <= query) & (query <= until[batch, key])

    def decayed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kv_head = head // group_size
        decay = query_sum[batch, kv_head, query] - key_sum[batch, kv_head, key]
        rest = query_rest[batch, kv_head, query] - key_rest[batch, kv_head, key]
        return torch.minimum(score, bound[head]) + (decay + rest)

    out, auxiliary = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=decayed,
        block_mask=block_mask_of(q, k, Blocks(kv_num_blocks, kv_indices, q_num_blocks, q_indices), sees),
        enable_gqa=True,
        kernel_options=SMALL_TILES if q.dtype == torch.float32 else None,
        return_aux=AuxRequest(lse=True),
    )
    assert auxiliary.lse is not None, "it was asked for"
    return out.transpose(1, 2), auxiliary.lse.transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _fused(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Call `_attend` compiled; inside a model that is being compiled, as part of its graph."""
    if torch.compiler.is_compiling():
        return _attend(*tensors)
    for x in tensors[:3]:
        # Else a length that happens to equal a number of heads would be taken for it, and be a constant, too.
        torch._dynamo.mark_static(x, [2, 3])
    bound, *sums = tensors[-5:]
    torch._dynamo.mark_static(bound, 0)
    for x in sums:
        torch._dynamo.mark_static(x, 1)
    with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
        return _compiled()(*tensors)
