"""The op without an order in time: every query meets every key, those after it too (encoders).

    num_t = sum_s w_ts v_s        den_t = sum_s w_ts        w_ts = sum_n coefs[n] (scale q_t . k_s)**n key_weight_s

over all s. The linear form writes one state of all keys, which every query reads: nothing is cumulative, so there are
no chunks and no scan. `autograd` differentiates both forms; blocks of tokens are recomputed in the backward pass, so
that neither the pairs nor the products of order 2 are kept for more than one block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.kernels.counts import HeadShape, pair_flops, state_flops
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.reference import polynomial
from subquad.kernels.state import MAX_STATE_ORDER, key_features, query_features

# Products of order 2 of one block are d**2 numbers per token and head; with more tokens the products of the matrices
# get no faster.
TOKENS_PER_BLOCK = 128


def bidirectional_attention(inputs: PolyInputs, form: str, tokens_per_block: int = TOKENS_PER_BLOCK) -> Tensor:
    """Sum over all keys.

    Args:
        inputs: The op's inputs; no decays, resets or state.
        form: `quadratic` is the definition, all pairs at once. `chunked` is one state for all queries (powers up to 2),
            `auto` that or pairs in blocks of queries, whichever needs fewer operations.
        tokens_per_block: Queries or keys at a time, at least 1. The result does not depend on it.

    Returns:
        Numerator and, as last column, normaliser `[B, Hkv, G, Tq, e + 1]`.
    """
    q, k, v, coefs, orders = inputs.q, inputs.k, inputs.v, inputs.coefs, inputs.orders
    if form == "quadratic":
        return _pairs(q, k, v, coefs, orders)
    queries = q.split(tokens_per_block, dim=-2)
    if orders[-1] > MAX_STATE_ORDER or (form == "auto" and pairs_are_cheaper(inputs)):
        return torch.cat([_recomputed(_pairs, block, k, v, coefs, orders) for block in queries], dim=-2)
    blocks = zip(k.split(tokens_per_block, dim=-2), v.split(tokens_per_block, dim=-2), strict=True)
    state = torch.stack([_recomputed(_written, *block, orders) for block in blocks]).sum(0)
    return torch.cat([_recomputed(_read, block, state, coefs, orders) for block in queries], dim=-2)


def pairs_are_cheaper(inputs: PolyInputs) -> bool:
    """Return whether scoring every pair needs no more FLOPs than one state of all keys.

    At d = e = 64 with one query head per key/value head that is up to 64 tokens for power 1 and 2,080 for power 2.

    Args:
        inputs: The op's inputs; powers at most 2.

    Returns:
        True for short sequences.
    """
    groups, num_queries, head_dim = inputs.q.shape[2:]
    num_keys, width = inputs.v.shape[-2:]
    shape = HeadShape(head_dim, width, groups, inputs.orders)
    # `pair_flops` is of queries that meet half of a stretch.
    pairs = pair_flops(shape, groups * num_queries, 2 * num_keys, training=False)
    return pairs <= state_flops(shape, groups * num_queries, num_keys)


def _recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function that keeps only its arguments for the backward pass."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _pairs(q: Tensor, k: Tensor, v: Tensor, coefs: Tensor, orders: tuple[int, ...]) -> Tensor:
    return polynomial(q @ k.mT.unsqueeze(2), coefs, orders) @ v.unsqueeze(2)


def _written(k: Tensor, v: Tensor, orders: tuple[int, ...]) -> Tensor:
    return key_features(k, orders).mT @ v


def _read(q: Tensor, state: Tensor, coefs: Tensor, orders: tuple[int, ...]) -> Tensor:
    return query_features(q, coefs.unsqueeze(-1), orders) @ state.unsqueeze(2)
