"""`HeadInputs`: what the heads of one layer work on in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subquad.layers.geometry import HeadSplit
from subquad.layers.sequence import SequenceInfo

Buffers = dict[str, Tensor]


class HeadInputs(NamedTuple):
    """Projected but not yet rotated heads, with what is known about their positions.

    Attributes:
        hidden_states: `[B, T, hidden_size]`, the layer's input.
        q: `[B, T, num_heads, head_dim]`.
        k: `[B, T, num_kv_heads, head_dim]`.
        v: `[B, T, num_kv_heads, head_dim]`.
        rope: (cos, sin), each `[B or 1, T, head_dim]`; None where positions are in the embeddings.
        sequence: padding and packed documents.
        buffers: the layer's cached tensors, updated in place; None without a cache.
    """

    hidden_states: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    rope: tuple[Tensor, Tensor] | None
    sequence: SequenceInfo
    buffers: Buffers | None = None

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k `[B, T, heads, head_dim]` with the rotary embedding of these positions, if there is one."""
        if self.rope is None:
            return q, k
        return apply_rotary_pos_emb(q, k, *self.rope, unsqueeze_dim=2)

    def select(self, split: HeadSplit, kv_heads: tuple[int, ...]) -> HeadInputs:
        """Keep some key/value heads and the query heads that read them.

        Args:
            split: the layer's heads.
            kv_heads: key/value heads to keep, in order.

        Returns:
            The inputs of these heads.
        """
        queries, heads = split.query_heads(kv_heads), list(kv_heads)
        return self._replace(q=self.q[:, :, queries], k=self.k[:, :, heads], v=self.v[:, :, heads])

    def real(self) -> Tensor:
        """Return `[B, T]` bool, False for padding."""
        if self.sequence.real is not None:
            return self.sequence.real
        return torch.ones(self.q.shape[:2], dtype=torch.bool, device=self.q.device)
