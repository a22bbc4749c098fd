"""Building the window's and the far part's inputs from q, k, v: delay, sinks, padding, packed documents, cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import SinkTokens, WindowOutput, window_attention
from subquad.kernels.decay import reset_at
from subquad.layers.inputs import Buffers, HeadInputs
from subquad.layers.sequence import SequenceInfo


class FarStream(NamedTuple):
    """Keys, values, decays and write weights, in the order in which the far part reads them.

    Attributes:
        k: `[B, T, num_kv_heads, head_dim]`.
        v: `[B, T, num_kv_heads, head_dim]`.
        log_decay: `[B, T, num_kv_heads]` float32, or None.
        weight: `[B, T]` bool, False where nothing is written.
        write: `[B, T, num_kv_heads]` float32 from the write gate, or None.
    """

    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    weight: Tensor
    write: Tensor | None = None


def shift_through(new: Tensor, window: int, name: str, buffers: Buffers | None) -> Tensor:
    """Prepend the last `window` positions and remember the newest `window` ones.

    Args:
        new: `[B, T, ...]`.
        window: W, positions kept.
        name: the cached tensor's name.
        buffers: the layer's cached tensors, updated in place; None without a cache (the past is zeros).

    Returns:
        `[B, W + T, ...]`. Its first T positions are `new` delayed by W.
    """
    full = _with_past(new, window, name, buffers)
    if buffers is not None:
        # A copy: a view would keep the whole input alive.
        buffers[name] = full[:, full.shape[1] - window :].to(buffers[name].dtype, copy=True)
    return full


def _with_past(new: Tensor, window: int, name: str, buffers: Buffers | None) -> Tensor:
    past = new.new_zeros((new.shape[0], window, *new.shape[2:])) if buffers is None else buffers[name].to(new.dtype)
    return torch.cat([past, new], dim=1)


def gather_sinks(
    k: Tensor, v: Tensor, rank: Tensor, is_sink: Tensor, sinks: int, buffers: Buffers | None
) -> SinkTokens:
    """Collect the sink tokens of one document per row, from the cache and from the new tokens.

    Args:
        k: `[B, T, num_kv_heads, head_dim]` new keys.
        v: `[B, T, num_kv_heads, head_dim]` new values.
        rank: `[B, T]` number of real tokens up to each position.
        is_sink: `[B, T]` bool.
        sinks: S, sinks per document.
        buffers: the layer's cached tensors, updated in place; None without a cache.

    Returns:
        S slots; slot j is visible once j + 1 real tokens were seen.
    """
    slot = torch.where(is_sink, rank - 1, sinks)
    index = slot[..., None, None].expand_as(k)
    merged = []
    for name, new in (("sink_keys", k), ("sink_values", v)):
        old = new.new_zeros((new.shape[0], sinks, *new.shape[2:])) if buffers is None else buffers[name].to(new.dtype)
        # One slot more than needed takes everything that is not a sink.
        room = torch.cat([old, old[:, :1]], dim=1)
        merged.append(room.scatter(1, index, new)[:, :sinks])
        if buffers is not None:
            buffers[name] = merged[-1].to(buffers[name].dtype, copy=True)
    first_query = (rank[..., None] <= torch.arange(sinks, device=k.device)).sum(1)
    return SinkTokens(merged[0], merged[1], first_query)


def count_tokens(inputs: HeadInputs) -> Tensor:
    """Count the real tokens of the document up to each position, continuing and updating the cache's count.

    Args:
        inputs: the heads; `num_seen` of their cache is updated.

    Returns:
        `[B, T]` int64, 1 at a document's first real token.
    """
    buffers = inputs.buffers
    rank = inputs.sequence.token_rank(None if buffers is None else buffers["num_seen"], inputs.real())
    if buffers is not None:
        buffers["num_seen"] = rank[:, -1].clone()
    return rank


def visible_tokens(inputs: HeadInputs, causal: bool) -> Tensor:
    """Count the real tokens that each position sees.

    Args:
        inputs: the heads; `num_seen` of their cache is updated where a token sees the past only.
        causal: whether it does; else it sees all tokens of its row.

    Returns:
        `[B, T]` int64.
    """
    if causal:
        return count_tokens(inputs)
    real = inputs.real()
    return real.sum(1, keepdim=True).expand_as(real)


class WindowStream:
    """The exact part of one call: which tokens are sinks, which the window sees, which the far part may take.

    Attributes:
        rank: `[B, T]` real tokens of the document up to each position.
        takes: `[B, T]` bool, tokens that will leave the window for the far part (real and not sinks).
        valid: `[B, W + T]` bool, `takes` behind that of the W positions before.
        leaving: `[B, T]` bool, whether a token of the step's own document leaves the window at it for the far part.
    """

    def __init__(self, inputs: HeadInputs, rank: Tensor, window: int, sinks: int) -> None:
        """Find the sinks and what may leave the window.

        Args:
            inputs: the heads; their cache is updated.
            rank: `[B, T]` from `count_tokens`.
            window: W, at least 1.
            sinks: S, sinks per document.
        """
        self.window, self.sinks = window, sinks
        self.sequence, self.buffers = inputs.sequence, inputs.buffers
        self.rank = rank
        real = inputs.real()
        self.is_sink = real & (rank <= sinks)
        self.takes = real & ~self.is_sink
        self.valid = shift_through(self.takes, window, "window_valid", inputs.buffers)
        self.leaving = self.valid[:, : self.takes.shape[1]]
        documents = self.sequence.documents
        if documents is not None:
            delayed = shift_through(documents + 1, window, "documents", None)[:, : self.takes.shape[1]]
            self.leaving = self.leaving & (delayed == documents + 1)

    def peek(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return what leaves the window at each step, without moving the cached window on.

        Args:
            k: `[B, T, num_kv_heads, head_dim]` rotated keys of the new tokens.
            v: `[B, T, num_kv_heads, head_dim]` their values.

        Returns:
            Both delayed by the window.
        """
        keys = _with_past(k, self.window, "window_keys", self.buffers)
        values = _with_past(v, self.window, "window_values", self.buffers)
        return keys[:, : k.shape[1]], values[:, : v.shape[1]]

    def near(self, q: Tensor, k: Tensor, v: Tensor) -> WindowOutput:
        """Attend exactly to the window and the sinks.

        Args:
            q: `[B, T, num_heads, head_dim]` rotated queries.
            k: `[B, T, num_kv_heads, head_dim]` rotated keys.
            v: `[B, T, num_kv_heads, head_dim]`.

        Returns:
            Output and log normaliser of the exact part.
        """
        documents, real = self.sequence.documents, self.sequence.real
        if self.buffers is None and (real is None or documents is not None):
            # Nothing precedes a document's first token: its sinks are its first keys.
            return window_attention(q, k, v, window=self.window, valid=real, documents=documents, sinks=self.sinks)
        sinks: SinkTokens | int = 0
        if self.sinks:
            sinks = gather_sinks(k, v, self.rank, self.is_sink, self.sinks, self.buffers)
        valid = self.takes
        if self.buffers is not None:
            valid = self.valid
            k = shift_through(k, self.window, "window_keys", self.buffers)
            v = shift_through(v, self.window, "window_values", self.buffers)
        return window_attention(q, k, v, window=self.window, valid=valid, sinks=sinks)

    def delay(
        self,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        write: Tensor | None,
        shared: tuple[Tensor, Tensor] | None,
    ) -> FarStream:
        """Delay the far stream by the window.

        Args:
            k: `[B, T, num_kv_heads, head_dim]` far keys.
            v: `[B, T, num_kv_heads, head_dim]` far values.
            log_decay: `[B, T, num_kv_heads]` or None.
            write: `[B, T, num_kv_heads]` or None.
            shared: what leaves the window, from `peek`, where the far part reads the window's own keys and values.

        Returns:
            What each step writes: the token that leaves the window there.
        """
        num_new, buffers = k.shape[1], self.buffers
        if shared is not None:
            k, v = shared
        else:
            k = shift_through(k, self.window, "far_keys", buffers)[:, :num_new]
            v = shift_through(v, self.window, "far_values", buffers)[:, :num_new]
        if log_decay is not None:
            log_decay = shift_through(log_decay, self.window, "far_log_decay", buffers)[:, :num_new]
        if write is not None:
            write = shift_through(write, self.window, "far_write", buffers)[:, :num_new]
        log_decay = reset_at_documents(log_decay, self.sequence, k)
        return FarStream(k, v, log_decay, self.leaving, write)


def reset_at_documents(log_decay: Tensor | None, sequence: SequenceInfo, k: Tensor) -> Tensor | None:
    """Put -inf where a document starts, so that no state crosses; a mixer without decay gets zeros elsewhere."""
    starts = sequence.document_starts
    return log_decay if starts is None else reset_at(log_decay, starts, k)


def past_stream(buffers: Buffers) -> FarStream:
    """Return everything the far part has read so far, for scores without a fixed-size state."""
    return FarStream(
        buffers["past_keys"],
        buffers["past_values"],
        buffers.get("past_log_decay"),
        buffers["past_weight"],
        buffers.get("past_write"),
    )


def remember_stream(buffers: Buffers, written: FarStream) -> None:
    """Append what was written to the growing past, for scores without a fixed-size state."""
    append(buffers, "past_keys", written.k)
    append(buffers, "past_values", written.v)
    append(buffers, "past_weight", written.weight)
    if written.log_decay is not None:
        append(buffers, "past_log_decay", written.log_decay)
    if written.write is not None:
        append(buffers, "past_write", written.write)


def append(buffers: Buffers, name: str, new: Tensor) -> Tensor:
    """Append new positions `[B, T, ...]` to a growing cached tensor and return all of it in their dtype."""
    buffers[name] = torch.cat([buffers[name], new.to(buffers[name].dtype)], dim=1)
    return buffers[name].to(new.dtype)
