"""Exact softmax attention on a sliding window plus sink tokens, in linear time, with its log-sum-exp."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.errors import ConfigError


class SinkTokens(NamedTuple):
    """Tokens every later query of the same document keeps seeing.

    Attributes:
        keys: `[B, N, num_kv_heads, head_dim]`, or `[B, Tq, N, ...]` where each query has its own.
        values: `[B, N, num_kv_heads, value_head_dim]`, or `[B, Tq, N, ...]` like the keys.
        visible: `[B, Tq, N]` bool, whether query t sees sink n.
    """

    keys: Tensor
    values: Tensor
    visible: Tensor


class WindowOutput(NamedTuple):
    """Result of `window_attention`.

    Attributes:
        out: `[B, Tq, num_heads, value_head_dim]`, dtype of q; zero where a query sees nothing.
        log_normaliser: `[B, Tq, num_heads]` float32 (float64 for float64 inputs), log of the sum of exp scores; -inf
            where a query sees nothing.
    """

    out: Tensor
    log_normaliser: Tensor


class _Blocks(NamedTuple):
    """Queries in blocks of `size`; block i needs the `reach` keys from its first query's window to its last query."""

    window: int
    size: int
    num_blocks: int
    reach: int
    start: int
    tail: int

    def of_queries(self, x: Tensor) -> Tensor:
        """Return `[B, num_blocks, size, ...]` of x `[B, Tq, ...]`, zeros after the last query."""
        return _shift_pad(x, 0, self.tail).unflatten(1, (self.num_blocks, self.size))

    def of_keys(self, x: Tensor) -> Tensor:
        """Return overlapping blocks `[B, num_blocks, reach, ...]` of x `[B, T, ...]`, zeros before the first key."""
        return _shift_pad(x, self.start, self.tail).unfold(1, self.reach, self.size).movedim(-1, 2)


def _block_layout(num_queries: int, seq_len: int, window: int) -> _Blocks:
    window = min(window, seq_len)
    size = num_queries if window >= num_queries else window
    num_blocks = -(-num_queries // size)
    start = seq_len - num_queries - (window - 1)
    return _Blocks(window, size, num_blocks, size + window - 1, start, num_blocks * size - num_queries)


def _seen_in_window(blocks: _Blocks, valid: Tensor, documents: Tensor | None) -> Tensor:
    """Return `[B, num_blocks, 1, 1, size, reach]` bool: the key is valid, in the query's window and in its document."""
    steps = torch.arange(blocks.reach, device=valid.device)
    step = steps - steps[: blocks.size, None]
    seen = blocks.of_keys(valid)[:, :, None, :] & ((step >= 0) & (step < blocks.window))
    if documents is not None:
        theirs = blocks.of_keys(documents)
        seen = seen & (theirs[:, :, None, :] == theirs[:, :, blocks.window - 1 :, None])
    return seen[:, :, None, None]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    sinks: SinkTokens | None = None,
) -> WindowOutput:
    """Attend with softmax to the last `window` tokens (the query's own included) and to the sink tokens.

    Time and memory are O(T * window): queries are handled in blocks, each with the keys its window can reach.

    Args:
        q: `[B, Tq, num_heads, head_dim]`; the queries are the last Tq positions of k.
        k: `[B, T, num_kv_heads, head_dim]`, T >= Tq; heads h*G .. h*G+G-1 of q share key/value head h.
        v: `[B, T, num_kv_heads, value_head_dim]`.
        window: number of positions seen, >= 1.
        scale: factor on q.k; None is `head_dim ** -0.5`.
        valid: `[B, T]` bool, False hides a key (padding, an empty cache slot, a sink already in `sinks`); None shows
            all.
        documents: `[B, T]` integer ids; a query sees keys of its own document only. None is one document.
        sinks: tokens seen whatever their distance.

    Returns:
        Outputs and log normalisers, to be joined with other parts in log space.

    Raises:
        ConfigError: `window` below 1, or num_heads not a multiple of num_kv_heads.
    """
    batch_size, num_queries, num_heads, head_dim = q.shape
    seq_len, num_kv_heads = k.shape[1], k.shape[2]
    if window < 1:
        raise ConfigError(f"window must be at least 1 (the token itself), got {window}")
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    scale = head_dim**-0.5 if scale is None else scale
    blocks = _block_layout(num_queries, seq_len, window)
    if valid is None:
        valid = k.new_ones((batch_size, seq_len), dtype=torch.bool)
    keys, values = blocks.of_keys(k), blocks.of_keys(v)
    seen = _seen_in_window(blocks, valid, documents)
    queries = blocks.of_queries(q).unflatten(3, (num_kv_heads, -1))
    scores = torch.einsum("bnchgd,bnrhd->bnhgcr", queries, keys) * scale
    if sinks is not None:
        own = sinks.keys.dim() == 5
        sink_keys, sink_values = (blocks.of_queries(x) if own else x for x in (sinks.keys, sinks.values))
        where = "bncs" if own else "bs"
        sink_scores = torch.einsum(f"bnchgd,{where}hd->bnhgcs", queries, sink_keys) * scale
        scores = torch.cat([scores, sink_scores], dim=-1)
        seen = torch.cat([seen, blocks.of_queries(sinks.visible)[:, :, None, None]], dim=-1)
    probabilities, log_normaliser = _masked_softmax(scores, seen)
    probabilities = probabilities.to(v.dtype)
    out = torch.einsum("bnhgcr,bnrhe->bnchge", probabilities[..., : blocks.reach], values)
    if sinks is not None:
        out = out + torch.einsum(f"bnhgcs,{where}he->bnchge", probabilities[..., blocks.reach :], sink_values)
    out = out.flatten(1, 2)[:, :num_queries].flatten(2, 3)
    log_normaliser = log_normaliser.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :num_queries].flatten(2, 3)
    return WindowOutput(out, log_normaliser)


def _shift_pad(x: Tensor, start: int, tail: int) -> Tensor:
    """Return positions `start ..` of x along dim 1 (zeros before the first if `start` < 0), plus `tail` zeros."""
    x = x[:, max(start, 0) :]
    if start >= 0 and tail == 0:
        return x
    padding = (0, 0) * (x.dim() - 2) + (max(-start, 0), tail)
    return torch.nn.functional.pad(x, padding)


def _masked_softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp over the last dim where `seen`; rows that see nothing give zeros and -inf."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    log_normaliser = scores.logsumexp(-1, keepdim=True)
    probabilities = (scores - log_normaliser).exp() * seen
    return probabilities, log_normaliser.masked_fill(~some, float("-inf")).squeeze(-1)
