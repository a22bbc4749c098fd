"""`HeadInputs`: what the heads of one layer work on in one call."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subquad.layers.geometry import HeadSplit
from subquad.layers.sequence import SequenceInfo

Buffers = dict[str, Tensor]
RopePart = Literal["keep", "drop", "fast", "slow"]


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

    def rotate(self, q: Tensor, k: Tensor, part: RopePart = "keep") -> tuple[Tensor, Tensor]:
        """Apply the rotary embedding of these positions, if there is one.

        Args:
            q: `[B, T, heads, head_dim]`.
            k: the same.
            part: which channel pairs are rotated: all (`keep`), none (`drop`), or the half with the higher (`fast`) or
                lower (`slow`) frequencies.

        Returns:
            q and k.
        """
        if self.rope is None or part == "drop":
            return q, k
        cos, sin = self.rope
        if part != "keep":
            # channels i and i + head_dim / 2 are a pair; its frequency falls with i
            pairs = torch.arange(cos.shape[-1], device=cos.device) % (cos.shape[-1] // 2)
            still = (pairs < cos.shape[-1] // 4) == (part == "slow")
            cos, sin = cos.masked_fill(still, 1.0), sin.masked_fill(still, 0.0)
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

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
