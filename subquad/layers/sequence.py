"""What a layer must know about the positions of a batch: padding and packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceInfo:
    """Padding and documents of the tokens of one forward call, shared by all layers.

    Attributes:
        real: `[B, T]` bool, False for padding; None when every token is real.
        documents: `[B, T]` integer ids of packed documents, non-decreasing; None for one document per row.
    """

    real: Tensor | None = None
    documents: Tensor | None = None

    @staticmethod
    def from_masks(
        attention_mask: Tensor | None, position_ids: Tensor | None, num_new: int, cached: bool
    ) -> SequenceInfo:
        """Read the Hugging Face conventions.

        Args:
            attention_mask: `[B, past + T]`, nonzero for real tokens, or None.
            position_ids: `[B, T]`; where they do not go up by one a new document starts, but only without an attention
                mask and without a cache, as in transformers.
            num_new: T, the number of new tokens.
            cached: whether a cache is in use.

        Returns:
            The padding and documents of the new tokens.
        """
        if attention_mask is not None:
            real = attention_mask[:, -num_new:].bool()
            return SequenceInfo(real=None if bool(real.all()) else real)
        if position_ids is None or cached:
            return SequenceInfo()
        documents = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return SequenceInfo(documents=documents if bool(documents[:, -1].any()) else None)

    @cached_property
    def document_starts(self) -> Tensor | None:
        """`[B, T]` bool, True at the first token of every document after the row's first; None for one document."""
        if self.documents is None:
            return None
        return torch.diff(self.documents, prepend=self.documents[:, :1], dim=-1) != 0

    def token_rank(self, num_seen: Tensor | None, like: Tensor) -> Tensor:
        """Count the real tokens of the document up to and including each position.

        Args:
            num_seen: `[B]` real tokens before this call; None is zero.
            like: any tensor `[B, T, ...]` giving shape and device.

        Returns:
            `[B, T]` int64, 1 at a document's first real token.
        """
        real = self.real if self.real is not None else like.new_ones(like.shape[:2], dtype=torch.bool)
        rank = real.long().cumsum(1)
        if num_seen is not None:
            rank = rank + num_seen[:, None]
        starts = self.document_starts
        if starts is not None:
            before = torch.where(starts, rank - real.long(), 0)
            rank = rank - before.cummax(1).values
        return rank
