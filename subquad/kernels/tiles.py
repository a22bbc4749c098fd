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

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate it at `[B, Hkv, G, queries, keys]`."""
        return polynomial(x, self.coefs, self.orders)

    def slope(self, x: Tensor) -> Tensor:
        """Evaluate its derivative."""
        powers = [(coef * order, order - 1) for coef, order in zip(self.coefs, self.orders, strict=True) if order]
        if not powers:
            return torch.zeros_like(x)
        return polynomial(x, torch.stack([coef for coef, _ in powers]), tuple(order for _, order in powers))


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
    """Where the gradients of one chunk's inputs are added up, in the inputs' shapes.

    `coefs` is `[len(orders), Hkv, G]`, or None where nobody asks for it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    coefs: Tensor | None


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
            pair=pair_decay(log_decay, resets),
            from_start=edge_decay(log_decay, resets).from_start,
            to_start=edge_decay(chunk.log_decay[..., past], chunk.resets[..., past]).to_end if start else None,
        )


def attend_inside(chunk: Chunk, score: Score, tile_size: int) -> Tensor:
    """Return what the chunk's queries read from the chunk's keys, `[B, Hkv, G, m, e + 1]`."""
    groups = chunk.q.shape[2]
    parts = []
    for tile in _tiles(chunk, tile_size):
        x = by_head(tile.q @ chunk.k[..., tile.own, :].mT, groups)
        weight = score(x) * tile.pair.unsqueeze(2)
        part = by_head(weight.flatten(2, 3) @ chunk.v[..., tile.own, :], groups)
        if tile.to_start is not None:
            x = by_head(tile.q @ chunk.k[..., tile.past, :].mT, groups)
            v = chunk.v[..., tile.past, :] * tile.to_start.unsqueeze(-1)
            read = by_head(score(x).flatten(2, 3) @ v, groups)
            part.addcmul_(read, tile.from_start[:, :, None, :, None])
        parts.append(part)
    return torch.cat(parts, dim=-2)


def attend_inside_backward(chunk: Chunk, score: Score, tile_size: int, d_out: Tensor, grads: ChunkGradients) -> None:
    """Add the gradients of `attend_inside` to `grads`.

    The gradient of a pair's weight is `d_w_ts = d_out_t . v_s` (`v` carries the normaliser's column). The gradient of
    the log decay of token r is the sum of `w_ts d_w_ts` over the pairs with `s < r <= t`; it is summed inside the
    stretch, never as a difference of two long sums, so nothing cancels.

    Args:
        chunk: The chunk.
        score: The polynomial.
        tile_size: Queries per tile.
        d_out: `[B, Hkv, G, m, e + 1]`.
        grads: Changed in place.
    """
    for tile in _tiles(chunk, tile_size):
        d_rows = d_out[..., tile.rows, :]
        pairs = _Pairs(tile.q, chunk.k[..., tile.own, :], chunk.v[..., tile.own, :], tile.pair)
        d_q, d_v, weighted = _pairs_backward(pairs, d_rows.flatten(2, 3), score, grads.k[..., tile.own, :], grads.coefs)
        grads.v[..., tile.own, :] += d_v
        _add_pair_decay(grads.log_decay[..., tile.own], weighted)
        if tile.to_start is not None:
            to_start = tile.to_start.unsqueeze(-1)
            d_read = (d_rows * tile.from_start[:, :, None, :, None]).flatten(2, 3)
            pairs = _Pairs(tile.q, chunk.k[..., tile.past, :], chunk.v[..., tile.past, :] * to_start, None)
            d_q_past, d_v, weighted = _pairs_backward(pairs, d_read, score, grads.k[..., tile.past, :], grads.coefs)
            d_q = d_q + d_q_past
            grads.v[..., tile.past, :] += d_v * to_start
            add_suffix_sums(grads.log_decay[..., tile.own], weighted.sum(-1))
            add_prefix_sums(grads.log_decay[..., tile.past], weighted.sum(-2))
        grads.q[..., tile.rows, :] += by_head(d_q, chunk.q.shape[2])


class _Pairs(NamedTuple):
    """All pairs of some queries and keys, with one decay per pair or None (the decays are in `v` and `d_out`)."""

    q: Tensor  # [B, Hkv, G * m, d]
    k: Tensor  # [B, Hkv, n, d]
    v: Tensor  # [B, Hkv, n, e + 1]
    decay: Tensor | None  # [B, Hkv, m, n]


def _pairs_backward(
    pairs: _Pairs, d_out: Tensor, score: Score, d_k: Tensor, d_coefs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add to the gradients of k and of the coefficients; return those of q and v, and `w_ts d_w_ts` per kv head."""
    groups = score.coefs.shape[-1]
    x = by_head(pairs.q @ pairs.k.mT, groups)
    value = weight = score(x)
    d_score = by_head(d_out @ pairs.v.mT, groups)
    if pairs.decay is not None:
        weight = value * pairs.decay.unsqueeze(2)
        d_score *= pairs.decay.unsqueeze(2)
    if d_coefs is not None:
        d_power = d_score
        for order in range(score.orders[-1] + 1):
            if order in score.orders:
                d_coefs[score.orders.index(order)] += d_power.sum((0, 3, 4))
            d_power = d_power * x
    d_x = (d_score * score.slope(x)).flatten(2, 3)
    d_k += d_x.mT @ pairs.q
    return d_x @ pairs.k, weight.flatten(2, 3).mT @ d_out, (value * d_score).sum(2)


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
