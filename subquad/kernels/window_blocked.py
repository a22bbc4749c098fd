"""The exact window in PyTorch: queries in blocks, each with the keys its window can reach."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.window_inputs import WindowInputs, WindowOutput, document_starts


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


class _Sinks(NamedTuple):
    """Sinks `[B, N, heads, width]`, or `[B, Tq, N, heads, width]` where each query has those of its document."""

    keys: Tensor
    values: Tensor
    visible: Tensor


def blocked_window_attention(inputs: WindowInputs) -> WindowOutput:
    """Compute `window_attention` in PyTorch operations.

    Args:
        inputs: checked inputs.

    Returns:
        Outputs and log normalisers.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    num_queries = q.shape[1]
    blocks = _block_layout(num_queries, k.shape[1], inputs.window)
    valid, sinks = _split_sinks(inputs)
    keys, values = blocks.of_keys(k), blocks.of_keys(v)
    seen = _seen_in_window(blocks, valid, inputs.documents)
    queries = blocks.of_queries(q).unflatten(3, (k.shape[2], -1))
    scores = torch.einsum("bnchgd,bnrhd->bnhgcr", queries, keys) * inputs.scale
    if sinks is not None:
        own = sinks.keys.dim() == 5
        sink_keys, sink_values = (blocks.of_queries(x) if own else x for x in (sinks.keys, sinks.values))
        where = "bncs" if own else "bs"
        sink_scores = torch.einsum(f"bnchgd,{where}hd->bnhgcs", queries, sink_keys) * inputs.scale
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


def _block_layout(num_queries: int, seq_len: int, window: int) -> _Blocks:
    window = min(window, seq_len)
    size = num_queries if window >= num_queries else window
    num_blocks = -(-num_queries // size)
    start = seq_len - num_queries - (window - 1)
    return _Blocks(window, size, num_blocks, size + window - 1, start, num_blocks * size - num_queries)


def _split_sinks(inputs: WindowInputs) -> tuple[Tensor, _Sinks | None]:
    """Return `[B, T]` bool, the keys seen in the window only, and the sinks."""
    k, v, documents = inputs.k, inputs.v, inputs.documents
    num_queries = inputs.q.shape[1]
    valid = k.new_ones(k.shape[:2], dtype=torch.bool) if inputs.valid is None else inputs.valid
    steps = torch.arange(k.shape[1], device=k.device)
    if not isinstance(inputs.sinks, int):
        keys, values, first_query = inputs.sinks
        queries = torch.arange(num_queries, device=k.device)
        return valid, _Sinks(keys, values, first_query[:, None] <= queries[:, None])
    count = min(inputs.sinks, k.shape[1])
    if count == 0:
        return valid, None
    slots, positions = steps[:count], steps[inputs.first_position :]
    if documents is None:
        visible = valid[:, None, :count] & (slots <= positions[:, None])
        return valid & (steps >= count), _Sinks(k[:, :count], v[:, :count], visible)
    starts = document_starts(documents)
    places = starts[:, inputs.first_position :, None] + slots
    visible = places <= positions[:, None]
    places = places.clamp(max=k.shape[1] - 1)
    sinks = _Sinks(_at(k, places), _at(v, places), visible & _at(valid, places))
    return valid & (steps - starts >= count), sinks


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Return `[B, Tq, N, ...]`, x `[B, T, ...]` at `places` `[B, Tq, N]`.

    Not by indexing: its gradient adds up in whatever order several threads of a CPU come to it.
    """
    index = places.flatten(1).reshape(places.shape[0], -1, *(1 for _ in x.shape[2:]))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:])).unflatten(1, places.shape[1:])


def _seen_in_window(blocks: _Blocks, valid: Tensor, documents: Tensor | None) -> Tensor:
    """Return `[B, num_blocks, 1, 1, size, reach]` bool: the key is valid, in the query's window and in its document."""
    steps = torch.arange(blocks.reach, device=valid.device)
    step = steps - steps[: blocks.size, None]
    seen = blocks.of_keys(valid)[:, :, None, :] & ((step >= 0) & (step < blocks.window))
    if documents is not None:
        theirs = blocks.of_keys(documents)
        seen = seen & (theirs[:, :, None, :] == theirs[:, :, blocks.window - 1 :, None])
    return seen[:, :, None, None]


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
