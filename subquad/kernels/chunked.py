"""The chunked form: quadratic inside a chunk, the state across chunks; linear time and memory in T. Backward by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from subquad.kernels.decay import ChunkDecay, chunk_decay
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.products import products, products_backward
from subquad.kernels.reference import polynomial
from subquad.kernels.state import PolyState, join_state, multiplicity, row_slices, split_state

# Backward keeps the states of this many chunks at a time, plus one state per segment of as many chunks.
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


class _Chunk(NamedTuple):
    """One chunk: `n` keys, and the queries `[first, stop)` of the whole sequence (`m` of them, the last of the keys)."""

    q: Tensor  # [B, Hkv, G * m, d]
    k: Tensor  # [B, Hkv, n, d]
    v: Tensor  # [B, Hkv, n, e + 1]
    decay: ChunkDecay
    queries: slice
    keys: slice


def _chunk_bounds(num_keys: int, chunk_size: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk_size, num_keys)) for start in range(0, num_keys, chunk_size)]


def _load(inputs: _Sequence, start: int, stop: int) -> _Chunk:
    ahead = inputs.k.shape[-2] - inputs.q.shape[-2]
    queries = slice(max(start - ahead, 0), max(stop - ahead, 0))
    keys = slice(start, stop)
    num_queries = queries.stop - queries.start
    decay = chunk_decay(inputs.log_decay[..., keys], inputs.resets[..., keys], num_queries)
    q = inputs.q[..., queries, :].flatten(2, 3)
    return _Chunk(q, inputs.k[..., keys, :], inputs.v[..., keys, :], decay, queries, keys)


def _advance(state: Tensor | None, chunk: _Chunk, orders: tuple[int, ...]) -> Tensor:
    """Return the state after the chunk."""
    v = chunk.v * chunk.decay.to_end.unsqueeze(-1)
    parts = []
    for order in orders:
        if order == 0:
            parts.append(v.sum(-2, keepdim=True))
        else:
            features = chunk.k.mT if order == 1 else products(chunk.k.mT)
            parts.append(features @ v)
    added = torch.cat(parts, dim=-2)
    return added if state is None else added.addcmul_(state, chunk.decay.total[..., None, None])


def _by_head(rows: Tensor, num_groups: int) -> Tensor:
    return rows.unflatten(2, (num_groups, -1))


def _from_state(chunk: _Chunk, state: Tensor, coefs: Tensor, orders: tuple[int, ...]) -> Tensor:
    """Return what the chunk's queries read from the state before it, `[B, Hkv, G, m, e + 1]`."""
    head_dim, groups = chunk.q.shape[-1], coefs.shape[-1]
    out = None
    for coef, (order, rows) in zip(coefs, row_slices(head_dim, orders).items(), strict=True):
        part = state[..., rows, :]
        if order == 1:
            part = chunk.q @ part
        elif order == 2:
            part = products(chunk.q.mT).mT @ (part * multiplicity(head_dim, part)[:, None])
        part = (_by_head(part, groups) if order else part.unsqueeze(2)) * coef[:, :, None, None]
        out = part if out is None else out + part
    return out * chunk.decay.from_start[:, :, None, :, None]


def _forward(inputs: _Sequence, chunk_size: int, need_final: bool) -> tuple[Tensor, Tensor | None]:
    groups = inputs.q.shape[2]
    out = inputs.v.new_empty(*inputs.q.shape[:-1], inputs.v.shape[-1])
    state = inputs.state
    for start, stop in _chunk_bounds(inputs.k.shape[-2], chunk_size):
        chunk = _load(inputs, start, stop)
        if chunk.q.shape[-2]:
            score = polynomial(_by_head(chunk.q @ chunk.k.mT, groups), inputs.coefs, inputs.orders)
            weight = (score * chunk.decay.pair.unsqueeze(2)).flatten(2, 3)
            part = _by_head(weight @ chunk.v, groups)
            if state is not None:
                part = part + _from_state(chunk, state, inputs.coefs, inputs.orders)
            out[..., chunk.queries, :] = part
        if need_final or stop < inputs.k.shape[-2]:
            state = _advance(state, chunk, inputs.orders)
    return out, state if need_final else None


def _chunks_backwards(inputs: _Sequence, chunk_size: int) -> Iterator[tuple[_Chunk, Tensor | None]]:
    """Yield every chunk with the state before it, last chunk first, recomputing the states segment by segment."""
    bounds = _chunk_bounds(inputs.k.shape[-2], chunk_size)
    segments = [bounds[i : i + _CHUNKS_PER_SEGMENT] for i in range(0, len(bounds), _CHUNKS_PER_SEGMENT)]
    first_states = [inputs.state]
    for segment in segments[:-1]:
        state = first_states[-1]
        for start, stop in segment:
            state = _advance(state, _load(inputs, start, stop), inputs.orders)
        first_states.append(state)
    while segments:
        state, pairs = first_states.pop(), []
        segment = segments.pop()
        for start, stop in segment:
            chunk = _load(inputs, start, stop)
            pairs.append((chunk, state))
            if stop != segment[-1][1]:
                state = _advance(state, chunk, inputs.orders)
        while pairs:
            yield pairs.pop()


class _Gradients:
    """Accumulates the gradients of one backward pass; one method per path by which inputs reach the output.

    With `d_out = [d_num, d_den]` and `v` carrying its column of ones, the gradient of a pair's weight is
    `d_w_ts = d_out_t . v_s`. The gradient of the log decay of token r is the sum of `w_ts d_w_ts` over all pairs
    `s < r <= t`; it is summed inside the chunk, never as a difference of long sums, so nothing cancels.
    """

    def __init__(self, inputs: _Sequence) -> None:
        self.inputs = inputs
        self.q, self.k, self.v = (torch.zeros_like(x) for x in (inputs.q, inputs.k, inputs.v))
        self.log_decay = torch.zeros_like(inputs.log_decay)
        self.coefs = torch.zeros_like(inputs.coefs)

    def inside_chunk(self, chunk: _Chunk, d_out: Tensor) -> None:
        """Add the gradients of the pairs inside the chunk; `d_out` is `[B, Hkv, G * m, e + 1]`."""
        coefs, orders, groups = self.inputs.coefs, self.inputs.orders, self.inputs.q.shape[2]
        pair = chunk.decay.pair.unsqueeze(2)
        x = _by_head(chunk.q @ chunk.k.mT, groups)
        d_score = _by_head(d_out @ chunk.v.mT, groups) * pair
        score = polynomial(x, coefs, orders)
        self.v[..., chunk.keys, :] += (score * pair).flatten(2, 3).mT @ d_out
        self._log_decay_of_pairs(chunk, (score * d_score).sum(2))
        for i, order in enumerate(orders):
            self.coefs[i] += (d_score * x**order).sum((0, 3, 4))
        d_x = (d_score * _derivative(x, coefs, orders)).flatten(2, 3)
        self.q[..., chunk.queries, :] += _by_head(d_x @ chunk.k, groups)
        self.k[..., chunk.keys, :] += d_x.mT @ chunk.q

    def _log_decay_of_pairs(self, chunk: _Chunk, weighted: Tensor) -> None:
        # weighted[t, s] = w_ts d_w_ts. Token r decays the pairs with s < r <= t.
        num_queries, num_keys = weighted.shape[-2:]
        before = weighted.cumsum(-1)[..., :-1]
        rows = torch.arange(num_keys - num_queries, num_keys, device=weighted.device)
        decayed = rows[:, None] >= torch.arange(1, num_keys, device=weighted.device)
        self.log_decay[..., chunk.keys][..., 1:] += (before * decayed).sum(-2)

    def read_state(self, chunk: _Chunk, state: Tensor, d_out: Tensor) -> Tensor:
        """Add the gradients of the queries that read the state; return the gradient of that state."""
        coefs, orders, groups = self.inputs.coefs, self.inputs.orders, self.inputs.q.shape[2]
        head_dim = chunk.q.shape[-1]
        d_read = (_by_head(d_out, groups) * chunk.decay.from_start[:, :, None, :, None]).flatten(2, 3)
        parts, d_log_decay = [], 0.0
        for i, (order, rows) in enumerate(row_slices(head_dim, orders).items()):
            part = state[..., rows, :]
            coef = coefs[i][:, :, None, None]
            d_scaled = (_by_head(d_read, groups) * coef).flatten(2, 3)
            if order == 0:
                read = (d_read @ part.mT).squeeze(-1)
                parts.append(d_scaled.sum(-2, keepdim=True))
            else:
                if order == 1:
                    d_q = d_read @ part.mT
                    parts.append(chunk.q.mT @ d_scaled)
                else:
                    many = multiplicity(head_dim, part)[:, None]
                    q_t = chunk.q.mT.contiguous()
                    d_q = products_backward(q_t, (part * many) @ d_read.mT).mT
                    parts.append(products(q_t) @ d_scaled * many)
                # A form of degree n: q . d(form)/dq = n * form.
                read = (chunk.q * d_q).sum(-1) / order
                self.q[..., chunk.queries, :] += _by_head(d_q, groups) * coef
            read = _by_head(read, groups)
            self.coefs[i] += read.sum((0, 3))
            d_log_decay = d_log_decay + (read * coef.squeeze(-1)).sum(2)
        # Token r decays what every query t >= r of the chunk reads.
        suffix = d_log_decay.flip(-1).cumsum(-1).flip(-1)
        ahead = chunk.k.shape[-2] - suffix.shape[-1]
        self.log_decay[..., chunk.keys][..., ahead:] += suffix
        self.log_decay[..., chunk.keys][..., :ahead] += suffix[..., :1]
        return torch.cat(parts, dim=-2)

    def write_state(self, chunk: _Chunk, d_state: Tensor) -> None:
        """Add the gradients of the keys and values that were written to the state after the chunk."""
        v = chunk.v * chunk.decay.to_end.unsqueeze(-1)
        d_v, d_k = torch.zeros_like(v), torch.zeros_like(chunk.k)
        for order, rows in row_slices(chunk.k.shape[-1], self.inputs.orders).items():
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
        d_v *= chunk.decay.to_end.unsqueeze(-1)
        # Token r decays what every token s < r of the chunk wrote.
        prefix = (chunk.v * d_v).sum(-1).cumsum(-1)
        self.log_decay[..., chunk.keys][..., 1:] += prefix[..., :-1]
        self.v[..., chunk.keys, :] += d_v
        self.k[..., chunk.keys, :] += d_k

    def pass_state(self, chunk: _Chunk, state: Tensor, d_state: Tensor) -> Tensor:
        """Add the gradient of the decay on the state across the whole chunk; return the gradient of the state before."""
        d_before = d_state * chunk.decay.total[..., None, None]
        self.log_decay[..., chunk.keys] += (state * d_before).sum((-2, -1)).unsqueeze(-1)
        return d_before


def _derivative(x: Tensor, coefs: Tensor, orders: tuple[int, ...]) -> Tensor:
    lower = tuple(order - 1 for order in orders if order)
    if not lower:
        return torch.zeros_like(x)
    factors = torch.tensor([order for order in orders if order], dtype=coefs.dtype, device=coefs.device)
    return polynomial(x, coefs[len(orders) - len(lower) :] * factors[:, None, None], lower)


def _backward(
    inputs: _Sequence, chunk_size: int, d_out: Tensor | None, d_state: Tensor | None
) -> tuple[_Gradients, Tensor | None]:
    grads = _Gradients(inputs)
    for chunk, state in _chunks_backwards(inputs, chunk_size):
        d_before = None
        if d_state is not None:
            grads.write_state(chunk, d_state)
            if state is not None:
                d_before = grads.pass_state(chunk, state, d_state)
        if d_out is not None and chunk.q.shape[-2]:
            d_rows = d_out[..., chunk.queries, :].flatten(2, 3)
            grads.inside_chunk(chunk, d_rows)
            if state is not None:
                read = grads.read_state(chunk, state, d_rows)
                d_before = read if d_before is None else d_before + read
        d_state = d_before
    return grads, d_state


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        resets: Tensor,
        coefs: Tensor,
        state: Tensor | None,
        orders: tuple[int, ...],
        chunk_size: int,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q, k, v, log_decay, resets, coefs, state)
        ctx.orders, ctx.chunk_size = orders, chunk_size
        ctx.set_materialize_grads(False)
        return _forward(_Sequence(q, k, v, log_decay, resets, coefs, state, orders), chunk_size, output_final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, resets, coefs, state = ctx.saved_tensors
        inputs = _Sequence(q, k, v, log_decay, resets, coefs, state, ctx.orders)
        # Backward may run inside a caller's autocast region, which would take the products down to bf16.
        with torch.autocast(q.device.type, enabled=False):
            grads, d_initial = _backward(inputs, ctx.chunk_size, d_out, d_state)
        return grads.q, grads.k, grads.v, grads.log_decay, None, grads.coefs, d_initial, None, None, None


def chunked_attention(inputs: PolyInputs, chunk_size: int, output_final_state: bool) -> tuple[Tensor, PolyState | None]:
    """Compute the op in chunks (differentiable once, with a backward that recomputes scores and states).

    Saves only its inputs: O(T (d + e)) memory, plus one state per 16 chunks while backward runs.

    Args:
        inputs: The op's inputs; powers at most 2; `Tq <= T`, the queries being the last positions.
        chunk_size: Tokens per chunk, at least 1.
        output_final_state: Whether to return the state after the last key.

    Returns:
        Numerator and, as last column, normaliser `[B, Hkv, G, Tq, e + 1]`; the final state or None.
    """
    state = None if inputs.state is None else join_state(inputs.state)
    sequence = _Sequence(
        inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.resets, inputs.coefs, state, inputs.orders
    )
    out, final_state = _ChunkedAttention.apply(*sequence, chunk_size, output_final_state)
    return out, None if final_state is None else split_state(final_state)
