"""The chunked form: pairs inside a chunk, the state across chunks. Time and memory are linear in the length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from subquad.kernels.decay import edge_decay
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.products import products, products_backward
from subquad.kernels.state import PolyState, join_state, multiplicity, row_slices, split_state
from subquad.kernels.tiles import (
    TILE_SIZE,
    Chunk,
    ChunkGradients,
    Score,
    add_prefix_sums,
    add_suffix_sums,
    attend_inside,
    attend_inside_backward,
    by_head,
)

# Backward keeps the states of this many chunks at a time, plus one state per so many chunks.
_CHUNKS_PER_SEGMENT = 16


class _Sequence(NamedTuple):
    """`PolyInputs` as the autograd function sees them: the state joined, `[B, Hkv, rows, e + 1]` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    resets: Tensor
    coefs: Tensor
    state: Tensor | None
    orders: tuple[int, ...]
    chunk_size: int
    tile_size: int

    @property
    def score(self) -> Score:
        return Score(self.coefs, self.orders)

    def bounds(self) -> list[tuple[int, int]]:
        """Return where each chunk starts and stops."""
        num_keys = self.k.shape[-2]
        return [(start, min(start + self.chunk_size, num_keys)) for start in range(0, num_keys, self.chunk_size)]

    def chunk(self, start: int, stop: int) -> Chunk:
        """Cut out the keys from `start` to `stop` and the queries at their positions."""
        ahead = self.k.shape[-2] - self.q.shape[-2]
        queries, keys = slice(max(start - ahead, 0), max(stop - ahead, 0)), slice(start, stop)
        log_decay, resets = self.log_decay[..., keys], self.resets[..., keys]
        return Chunk(
            q=self.q[..., queries, :],
            k=self.k[..., keys, :],
            v=self.v[..., keys, :],
            log_decay=log_decay,
            resets=resets,
            edge=edge_decay(log_decay, resets),
            queries=queries,
            keys=keys,
        )


def _advance(state: Tensor | None, chunk: Chunk, orders: tuple[int, ...]) -> Tensor:
    """Return the state after the chunk."""
    v = chunk.v * chunk.edge.to_end.unsqueeze(-1)
    parts = []
    for order in orders:
        if order == 0:
            parts.append(v.sum(-2, keepdim=True))
        else:
            parts.append((chunk.k.mT if order == 1 else products(chunk.k.mT)) @ v)
    added = torch.cat(parts, dim=-2)
    return added if state is None else added.addcmul_(state, chunk.edge.total[..., None, None])


def _query_decay(chunk: Chunk) -> Tensor:
    """Return the decay from the state to each query, `[B, Hkv, 1, m, 1]`."""
    first = chunk.k.shape[-2] - chunk.q.shape[-2]
    return chunk.edge.from_start[:, :, None, first:, None]


def _read(chunk: Chunk, state: Tensor, score: Score) -> Tensor:
    """Return what the chunk's queries read from the state before it, `[B, Hkv, G, m, e + 1]`."""
    groups, num_queries, head_dim = chunk.q.shape[2:]
    q = chunk.q.flatten(2, 3)
    out = q.new_zeros(())
    for coef, (order, rows) in zip(score.coefs, row_slices(head_dim, score.orders).items(), strict=True):
        part = state[..., rows, :]
        if order == 0:
            part = part.expand(-1, -1, groups * num_queries, -1)
        elif order == 1:
            part = q @ part
        else:
            part = products(q.mT).mT @ (part * multiplicity(head_dim, part)[:, None])
        out = out + by_head(part, groups) * coef[:, :, None, None]
    return out * _query_decay(chunk)


def _forward(seq: _Sequence, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    out = seq.v.new_empty(*seq.q.shape[:-1], seq.v.shape[-1])
    state, num_keys = seq.state, seq.k.shape[-2]
    for start, stop in seq.bounds():
        chunk = seq.chunk(start, stop)
        if chunk.q.shape[-2]:
            part = attend_inside(chunk, seq.score, seq.tile_size)
            out[..., chunk.queries, :] = part if state is None else part.add_(_read(chunk, state, seq.score))
        if output_final_state or stop < num_keys:
            state = _advance(state, chunk, seq.orders)
    return out, state if output_final_state else None


def _chunks_backwards(seq: _Sequence) -> Iterator[tuple[Chunk, Tensor | None]]:
    """Yield every chunk with the state before it, last chunk first, recomputing the states segment by segment."""
    bounds = seq.bounds()
    segments = [bounds[i : i + _CHUNKS_PER_SEGMENT] for i in range(0, len(bounds), _CHUNKS_PER_SEGMENT)]
    first_states = [seq.state]
    for segment in segments[:-1]:
        state = first_states[-1]
        for start, stop in segment:
            state = _advance(state, seq.chunk(start, stop), seq.orders)
        first_states.append(state)
    while segments:
        state = first_states.pop()
        pairs: list[tuple[Chunk, Tensor | None]] = []
        for start, stop in segments.pop():
            if pairs:
                state = _advance(state, pairs[-1][0], seq.orders)
            pairs.append((seq.chunk(start, stop), state))
        while pairs:
            yield pairs.pop()


class _Gradients:
    """Accumulates the gradients of one backward pass; one method per way in which inputs reach the output."""

    def __init__(self, seq: _Sequence, needs_coefs: bool) -> None:
        self.seq = seq
        self.q, self.k, self.v, self.log_decay = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (seq.q, seq.k, seq.v, seq.log_decay)
        )
        self.coefs = torch.zeros_like(seq.coefs) if needs_coefs else None

    def inside_chunk(self, chunk: Chunk, d_out: Tensor) -> None:
        """Add the gradients of the pairs inside the chunk; `d_out` is `[B, Hkv, G, m, e + 1]`."""
        keys = chunk.keys
        grads = ChunkGradients(
            self.q[..., chunk.queries, :],
            self.k[..., keys, :],
            self.v[..., keys, :],
            self.log_decay[..., keys],
            self.coefs,
        )
        attend_inside_backward(chunk, self.seq.score, self.seq.tile_size, d_out, grads)

    def read_state(self, chunk: Chunk, state: Tensor, d_out: Tensor) -> Tensor:
        """Add the gradients of the queries that read the state; return the gradient of that state."""
        groups, num_queries, head_dim = chunk.q.shape[2:]
        d_read = d_out * _query_decay(chunk)
        d_rows = d_read.flatten(2, 3)
        q = chunk.q.flatten(2, 3)
        q_t = q.mT.contiguous()
        d_state, per_query = torch.empty_like(state), d_out.new_zeros(())
        for i, (order, rows) in enumerate(row_slices(head_dim, self.seq.orders).items()):
            part, coef = state[..., rows, :], self.seq.coefs[i][:, :, None, None]
            d_scaled = (d_read * coef).flatten(2, 3)
            if order == 0:
                read = (d_rows @ part.mT).squeeze(-1)
                d_state[..., rows, :] = d_scaled.sum(-2, keepdim=True)
            else:
                if order == 1:
                    d_q = d_rows @ part.mT
                    d_state[..., rows, :] = q_t @ d_scaled
                else:
                    many = multiplicity(head_dim, part)[:, None]
                    d_q = products_backward(q_t, (part * many) @ d_rows.mT).mT
                    d_state[..., rows, :] = products(q_t) @ d_scaled * many
                # For a form f of degree n, q . df/dq = n f.
                read = (q * d_q).sum(-1) / order
                self.q[..., chunk.queries, :] += by_head(d_q, groups) * coef
            read = by_head(read, groups)
            if self.coefs is not None:
                self.coefs[i] += read.sum((0, 3))
            per_query = per_query + (read * coef.squeeze(-1)).sum(2)
        ahead = chunk.k.shape[-2] - num_queries
        per_query = torch.nn.functional.pad(per_query, (ahead, 0))
        add_suffix_sums(self.log_decay[..., chunk.keys], per_query)
        return d_state

    def write_state(self, chunk: Chunk, d_state: Tensor) -> None:
        """Add the gradients of the keys and values that were written to the state after the chunk."""
        to_end = chunk.edge.to_end.unsqueeze(-1)
        v = chunk.v * to_end
        d_v, d_k = torch.zeros_like(v), torch.zeros_like(chunk.k)
        for order, rows in row_slices(chunk.k.shape[-1], self.seq.orders).items():
            part = d_state[..., rows, :]
            if order == 0:
                d_v += part
            elif order == 1:
                d_v += chunk.k @ part
                d_k += v @ part.mT
            else:
                k_t = chunk.k.mT.contiguous()
                d_v += products(k_t).mT @ part
                d_k += products_backward(k_t, part @ v.mT).mT
        d_v *= to_end
        add_prefix_sums(self.log_decay[..., chunk.keys], (chunk.v * d_v).sum(-1))
        self.v[..., chunk.keys, :] += d_v
        self.k[..., chunk.keys, :] += d_k

    def pass_state(self, chunk: Chunk, state: Tensor, d_state: Tensor) -> Tensor:
        """Add the gradient of the decay of the state across the chunk; return the gradient of the state before it."""
        d_before = d_state * chunk.edge.total[..., None, None]
        self.log_decay[..., chunk.keys] += (state * d_before).sum((-2, -1)).unsqueeze(-1)
        return d_before


def _backward(
    seq: _Sequence, d_out: Tensor | None, d_state: Tensor | None, needs_coefs: bool
) -> tuple[_Gradients, Tensor | None]:
    """Return the gradients of the inputs and of the initial state."""
    grads = _Gradients(seq, needs_coefs)
    for chunk, state in _chunks_backwards(seq):
        d_before = None
        if d_state is not None:
            grads.write_state(chunk, d_state)
            if state is not None:
                d_before = grads.pass_state(chunk, state, d_state)
        if d_out is not None and chunk.q.shape[-2]:
            d_chunk = d_out[..., chunk.queries, :]
            grads.inside_chunk(chunk, d_chunk)
            if state is not None:
                read = grads.read_state(chunk, state, d_chunk)
                d_before = read if d_before is None else d_before.add_(read)
        d_state = d_before
    return grads, d_state


class _ChunkedAttention(torch.autograd.Function):
    """Saves only its inputs; backward recomputes scores and states."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        resets: Tensor,
        coefs: Tensor,
        state: Tensor | None,
        orders: tuple[int, ...],
        sizes: tuple[int, int],
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q, k, v, log_decay, resets, coefs, state)
        ctx.static = (orders, *sizes)
        ctx.set_materialize_grads(False)
        return _forward(_Sequence(q, k, v, log_decay, resets, coefs, state, orders, *sizes), output_final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        seq = _Sequence(*ctx.saved_tensors, *ctx.static)
        # Backward may run inside a caller's autocast region, which would take the matrix products down to bf16.
        with torch.autocast(seq.q.device.type, enabled=False):
            grads, d_initial = _backward(seq, d_out, d_state, ctx.needs_input_grad[5])
        return grads.q, grads.k, grads.v, grads.log_decay, None, grads.coefs, d_initial, None, None, None


def chunked_attention(
    inputs: PolyInputs, chunk_size: int, output_final_state: bool, tile_size: int = TILE_SIZE
) -> tuple[Tensor, PolyState | None]:
    """Compute the op in chunks (differentiable once).

    Saves only its inputs, `O(T (d + e))` numbers; backward holds at most 16 states plus one per 16 chunks.

    Args:
        inputs: The op's inputs; powers at most 2; `Tq <= T`, the queries being the last positions.
        chunk_size: Tokens per chunk, at least 1. The result does not depend on it.
        output_final_state: Whether to return the state after the last key.
        tile_size: Queries per tile inside a chunk, at least 1. The result does not depend on it.

    Returns:
        Numerator and, as last column, normaliser `[B, Hkv, G, Tq, e + 1]`; the final state or None.
    """
    state = None if inputs.state is None else join_state(inputs.state)
    out, final_state = _ChunkedAttention.apply(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.log_decay,
        inputs.resets,
        inputs.coefs,
        state,
        inputs.orders,
        (chunk_size, tile_size),
        output_final_state,
    )
    return out, None if final_state is None else split_state(final_state)
