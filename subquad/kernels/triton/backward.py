"""The backward pass of a segment: dq, dk and dv, each with its share of the gradient of the decay.

Every kernel redoes the scores of its chunk and reads the state (dq) or the state's gradient (dk, dv). The heads of a
group are summed inside a program, so nothing is added up by atomics and two runs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from subquad.kernels.triton.dk import dk_kernel
from subquad.kernels.triton.dq import dq_kernel
from subquad.kernels.triton.dv import dv_kernel
from subquad.kernels.triton.launch import Launch, run
from subquad.kernels.triton.prepare import QueryGradients
from subquad.kernels.triton.problem import Problem, Segment, States


class KeyGradients(NamedTuple):
    """Where the gradients of all inputs are written; a segment fills its own positions.

    Attributes:
        q: `[B, Tq, H, d]`.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, e]`.
        weight: `[B, T, Hkv]` float32.
        log_decay: `[B, T, Hkv]` float32, or None without decay.
        coefs: `[3, H]` float32, or None where nobody asks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    log_decay: Tensor | None
    coefs: Tensor | None

    @property
    def reads(self) -> bool:
        """Whether the sums are needed from which the decay's and the coefficients' gradients are made."""
        return self.log_decay is not None or self.coefs is not None


def backward_segment(
    segment: Segment,
    queries: QueryGradients,
    states: States | None,
    state_gradients: States | None,
    inner: Tensor | None,
    grads: KeyGradients,
) -> None:
    """Compute the gradients of a segment's tokens.

    Args:
        segment: The tokens.
        queries: Its queries and the gradients of what they read.
        states: The states before its chunks, or None.
        state_gradients: The gradients of the states after its chunks, or None.
        inner: `[B * Hkv, chunks]`, `<gradient, state before>` over each chunk, or None like the gradients.
        grads: Written at the segment's positions; `coefs` is added to.
    """
    problem = segment.problem
    length = segment.padded_len
    heads, states_shape = problem.num_states * problem.num_groups, (problem.num_states, length)
    zeros = problem.weight.new_zeros
    inside, read = zeros(3, heads, length), zeros(3, heads, length)
    key_inside, written = zeros(states_shape), zeros(states_shape)
    _launch_dq(segment, queries, states, grads, inside, read)
    for kernel, tile, own in (
        (dk_kernel, problem.tiles.dk, {"p_dk": grads.k, "p_inside": key_inside}),
        (dv_kernel, problem.tiles.dv, {"p_dv": grads.v, "p_d_weight": grads.weight, "p_written": written}),
    ):
        num_tiles = triton.cdiv(segment.stop - segment.start, tile.rows)
        arguments = {
            **segment.pair_arguments(tile),
            **segment.state_arguments(state_gradients, tile),
            **_gradient_arguments(queries, grads),
            **own,
            "num_tiles": num_tiles,
        }
        run(Launch(kernel, (num_tiles * problem.num_states,), arguments, tile.num_warps, tile.num_stages))
    if grads.coefs is not None:
        total = (inside + read).sum(-1).unflatten(1, (-1, problem.q.shape[2])).sum(1)
        grads.coefs.add_(total)
    if grads.log_decay is not None:
        gate = _gate_gradient(problem, inside, read, key_inside, written, inner)
        kept = gate[:, : segment.stop - segment.start].unflatten(0, (-1, problem.k.shape[2]))
        grads.log_decay[:, segment.start : segment.stop] = kept.transpose(1, 2)


def _launch_dq(
    segment: Segment, queries: QueryGradients, states: States | None, grads: KeyGradients, inside: Tensor, read: Tensor
) -> None:
    tile = segment.problem.tiles.dq
    num_tiles = segment.num_query_tiles(tile.rows)
    if num_tiles == 0:
        return
    arguments = {
        **segment.pair_arguments(tile),
        **segment.state_arguments(states, tile),
        **_gradient_arguments(queries, grads),
        "p_dq": grads.q,
        "p_inside": inside,
        "p_read": read,
        "num_tiles": num_tiles,
    }
    programs = num_tiles * segment.problem.num_states * segment.problem.num_groups
    run(Launch(dq_kernel, (programs,), arguments, tile.num_warps, tile.num_stages))


def _gradient_arguments(queries: QueryGradients, grads: KeyGradients) -> dict[str, object]:
    return {
        "p_gradient": queries.gradient,
        "p_normaliser_gradient": queries.normaliser_gradient,
        "READS": grads.reads,
    }


def _gate_gradient(
    problem: Problem, inside: Tensor, read: Tensor, key_inside: Tensor, written: Tensor, inner: Tensor | None
) -> Tensor:
    """Return the gradient of the log decay, `[B * Hkv, padded]`.

    Token r decays every pair s < r <= t: inside a chunk, the pairs with t >= r less those with s >= r; what queries
    t >= r read from the state; what keys s < r write to it; and the state itself. All sums stay within a chunk.
    """
    heads, groups = problem.q.shape[2], problem.num_groups

    def per_query(reads: Tensor) -> Tensor:
        by_head = reads.double().unflatten(1, (-1, heads)) * problem.coefs[:, None, :, None]
        return by_head.sum(0).unflatten(1, (-1, groups)).sum(2).flatten(0, 1)

    def by_chunk(x: Tensor) -> Tensor:
        return x.double().unflatten(-1, (-1, problem.chunk_size))

    later = by_chunk(per_query(inside) - key_inside + per_query(read))
    earlier = by_chunk(written)
    gate = later.flip(-1).cumsum(-1).flip(-1) + earlier.cumsum(-1) - earlier
    if inner is not None:
        gate = gate + inner.double().unsqueeze(-1)
    return gate.flatten(1)
