"""The inside of a chunk: every pair of tokens, tile by tile, so that scores stay in the processor's cache.

A tile of queries meets its own keys with the full matrix of decays. All keys of the chunk before the tile are met with
one factor per key (to the start of the tile) and one per query (from there): half the work of a full square, and no
exponential per pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.decay import EdgeDecay, edge_decay, pair_decay
from subquad.kernels.reference import polynomial

TILE_SIZE = 128


class Score(NamedTuple):
    """The polynomial: coefficients `[len(orders), Hkv, G]` of the powers `orders`, lowest first."""

    coefs: Tensor
    orders: tuple[int, ...]


class Chunk(NamedTuple):
    """A stretch of n tokens of a sequence, the last m of which are queries.

    Attributes:
        q: `[B, Hkv, G, m, d]`.
        k: `[B, Hkv, n, d]`.
        v: `[B, Hkv, n, e + 1]`.
        log_decay: `[B, Hkv, n]`.
        resets: `[B, Hkv, n]`.
        edge: Decay to and from the ends of the chunk.
        queries: Where `q` stands among the sequence's queries.
        keys: Where the keys stand in the sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    resets: Tensor
    edge: EdgeDecay
    queries: slice
    keys: slice


class ChunkGradients(NamedTuple):
    """Gradients of one chunk's inputs, in the inputs' shapes; `coefs` is `[len(orders), Hkv, G]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    coefs: Tensor


class _Tile(NamedTuple):
    """A tile's queries and keys (both `own`), and the keys of its chunk that came before (`past`)."""

    q: Tensor  # [B, Hkv, G * m, d]
    rows: slice  # of the chunk's queries
    own: slice  # of the chunk's keys
    past: slice
    pair: Tensor  # [B, Hkv, m, m]
    from_start: Tensor  # [B, Hkv, m]
    to_start: Tensor | None  # [B, Hkv, past]


def by_head(rows: Tensor, num_groups: int) -> Tensor:
    """Split `[B, Hkv, G * m, x]` into `[B, Hkv, G, m, x]`."""
    return rows.unflatten(2, (num_groups, -1))


def _tiles(chunk: Chunk, tile_size: int) -> Iterator[_Tile]:
    num_keys, first = chunk.k.shape[-2], chunk.k.shape[-2] - chunk.q.shape[-2]
    for start in range(first, num_keys, tile_size):
        own, past = slice(start, min(start + tile_size, num_keys)), slice(0, start)
        log_decay, resets = chunk.log_decay[..., own], chunk.resets[..., own]
        rows = slice(start - first, own.stop - first)
        yield _Tile(
            q=chunk.q[..., rows, :].flatten(2, 3),
            rows=rows,
            own=own,
            past=past,
            pair=pair_decay(log_decay, resets, own.stop - start),
            from_start=edge_decay(log_decay, resets).from_start,
            to_start=edge_decay(chunk.log_decay[..., past], chunk.resets[..., past]).to_end if start else None,
        )


def attend_inside(chunk: Chunk, score: Score, tile_size: int) -> Tensor:
    """Return what the chunk's queries read from the chunk's keys, `[B, Hkv, G, m, e + 1]`."""
    groups = chunk.q.shape[2]
    parts = []
    for tile in _tiles(chunk, tile_size):
        x = by_head(tile.q @ chunk.k[..., tile.own, :].mT, groups)
        weight = polynomial(x, *score) * tile.pair.unsqueeze(2)
        part = by_head(weight.flatten(2, 3) @ chunk.v[..., tile.own, :], groups)
        if tile.to_start is not None:
            x = by_head(tile.q @ chunk.k[..., tile.past, :].mT, groups)
            v = chunk.v[..., tile.past, :] * tile.to_start.unsqueeze(-1)
            read = by_head(polynomial(x, *score).flatten(2, 3) @ v, groups)
            part.addcmul_(read, tile.from_start[:, :, None, :, None])
        parts.append(part)
    return torch.cat(parts, dim=-2)


def attend_inside_backward(chunk: Chunk, score: Score, tile_size: int, d_out: Tensor) -> ChunkGradients:
    """Differentiate `attend_inside`.

    The gradient of a pair's weight is `d_w_ts = d_out_t . v_s` (`v` carries the normaliser's column). The gradient of
    the log decay of token r is the sum of `w_ts d_w_ts` over the pairs with `s < r <= t`.

    Args:
        chunk: The chunk.
        score: The polynomial.
        tile_size: Queries per tile.
        d_out: `[B, Hkv, G, m, e + 1]`.

    Returns:
        The gradients.
    """
    grads = ChunkGradients(
        torch.empty_like(chunk.q, memory_format=torch.contiguous_format),
        *(torch.zeros_like(x) for x in (chunk.k, chunk.v, chunk.log_decay, score.coefs)),
    )
    for tile in _tiles(chunk, tile_size):
        d_rows = d_out[..., tile.rows, :]
        d_q, d_k, d_v, weighted = _pairs_backward(
            tile.q, chunk.k[..., tile.own, :], chunk.v[..., tile.own, :], d_rows.flatten(2, 3), score, tile.pair, grads
        )
        grads.k[..., tile.own, :] += d_k
        grads.v[..., tile.own, :] += d_v
        _add_pair_decay(grads.log_decay[..., tile.own], weighted)
        if tile.to_start is not None:
            factor = tile.to_start.unsqueeze(-1)
            d_read = (d_rows * tile.from_start[:, :, None, :, None]).flatten(2, 3)
            d_q_past, d_k, d_v, weighted = _pairs_backward(
                tile.q, chunk.k[..., tile.past, :], chunk.v[..., tile.past, :] * factor, d_read, score, None, grads
            )
            d_q = d_q + d_q_past
            grads.k[..., tile.past, :] += d_k
            grads.v[..., tile.past, :] += d_v * factor
            add_suffix_sums(grads.log_decay[..., tile.own], weighted.sum(-1))
            add_prefix_sums(grads.log_decay[..., tile.past], weighted.sum(-2))
        grads.q[..., tile.rows, :] = by_head(d_q, chunk.q.shape[2])
    return grads


def _pairs_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, score: Score, pair: Tensor | None, grads: ChunkGradients
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and `w_ts d_w_ts` summed over the group; add the coefficients' to `grads`."""
    groups = score.coefs.shape[-1]
    x = by_head(q @ k.mT, groups)
    d_score = by_head(d_out @ v.mT, groups)
    value = polynomial(x, *score)
    weight = value
    if pair is not None:
        d_score *= pair.unsqueeze(2)
        weight = value * pair.unsqueeze(2)
    d_v = weight.flatten(2, 3).mT @ d_out
    weighted = (value * d_score).sum(2)
    slope = _slope(x, score)
    power = d_score
    for order in range(score.orders[-1] + 1):
        if order in score.orders:
            grads.coefs[score.orders.index(order)] += power.sum((0, 3, 4))
        power = power * x
    d_x = (d_score * slope).flatten(2, 3)
    return d_x @ k, d_x.mT @ q, d_v, weighted


def _slope(x: Tensor, score: Score) -> Tensor:
    powers = [(coef * order, order - 1) for coef, order in zip(score.coefs, score.orders, strict=True) if order]
    if not powers:
        return torch.zeros_like(x)
    return polynomial(x, torch.stack([coef for coef, _ in powers]), tuple(order for _, order in powers))


def _add_pair_decay(d_log_decay: Tensor, weighted: Tensor) -> None:
    # Sum weighted[t, s] over s < r by a cumulative sum, then over t >= r.
    before = weighted.cumsum(-1)[..., :-1]
    d_log_decay[..., 1:] += before.tril(-1).sum(-2) if before.shape[-1] else 0.0


def add_suffix_sums(d_log_decay: Tensor, per_query: Tensor) -> None:
    """Add to token r what all queries t >= r read from before the stretch; in place."""
    d_log_decay += per_query.flip(-1).cumsum(-1).flip(-1)


def add_prefix_sums(d_log_decay: Tensor, per_key: Tensor) -> None:
    """Add to token r what all keys s < r contribute to what comes after the stretch; in place."""
    d_log_decay[..., 1:] += per_key.cumsum(-1)[..., :-1]
