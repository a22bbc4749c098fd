"""What the forms of the exact window share: their inputs, their result and where documents begin and end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SinkTokens(NamedTuple):
    """Tokens kept beside the keys, which every query sees from one query on.

    Attributes:
        keys: `[B, N, num_kv_heads, head_dim]`.
        values: `[B, N, num_kv_heads, value_head_dim]`.
        first_query: `[B, N]` integers, the first query that sees the token; 0 or below: all do, Tq or above: none.
    """

    keys: Tensor
    values: Tensor
    first_query: Tensor


class WindowOutput(NamedTuple):
    """Result of `window_attention`.

    Attributes:
        out: `[B, Tq, num_heads, value_head_dim]`, dtype of q; zero where a query sees nothing.
        log_normaliser: `[B, Tq, num_heads]` float32 (float64 for float64 inputs), log of the sum of exp scores; -inf
            where a query sees nothing.
    """

    out: Tensor
    log_normaliser: Tensor


class WindowInputs(NamedTuple):
    """Checked arguments of `window_attention`, under their names there, `scale` filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int
    scale: float
    valid: Tensor | None
    documents: Tensor | None
    sinks: SinkTokens | int

    @property
    def first_position(self) -> int:
        """Position in k of the first query."""
        return self.k.shape[1] - self.q.shape[1]


def document_starts(documents: Tensor) -> Tensor:
    """Return `[B, T]` int64, the position of the first token of each token's document, of ids `[B, T]`."""
    steps = torch.arange(documents.shape[1], device=documents.device)
    is_first = torch.diff(documents, prepend=documents[:, :1] - 1) != 0
    return torch.where(is_first, steps, 0).cummax(1).values


def document_ends(documents: Tensor) -> Tensor:
    """Return `[B, T]` int64, the position of the last token of each token's document, of ids `[B, T]`."""
    return documents.shape[1] - 1 - document_starts(documents.flip(1)).flip(1)
