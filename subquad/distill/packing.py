"""Packing of tokenised documents into rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IGNORED_LABEL = -100


def pack_documents(documents: Sequence[np.ndarray], seq_len: int) -> dict[str, np.ndarray]:
    """Lay documents end to end and cut them into rows of `seq_len` tokens.

    A row may hold the end of one document, several whole ones and the start of another; a document longer than a row
    goes on in the next one. No row is padded: the tokens left over after the last full row are dropped.

    Args:
        documents: Token ids of each document, in order, 1-D integer arrays; empty ones are skipped.
        seq_len: Tokens per row, at least 1.

    Returns:
        Three int32 arrays `[rows, seq_len]` (rows may be 0): `input_ids`; `position_ids`, which count from 0 at each
        document's start and at each row's start (a row has no memory of the one before); `labels`, which are the
        input ids with -100 wherever the position is 0, so that no token is predicted from another document. As
        everywhere in Hugging Face code the labels are not shifted: position t is predicted from position t - 1.
    """
    lengths = [len(document) for document in documents if len(document)]
    num_rows = sum(lengths) // seq_len
    num_tokens = num_rows * seq_len
    if not num_rows:
        empty = np.empty((0, seq_len), dtype=np.int32)
        return {"input_ids": empty, "position_ids": empty.copy(), "labels": empty.copy()}
    tokens = np.concatenate([document for document in documents if len(document)])[:num_tokens].astype(np.int32)
    starts = np.cumsum([0, *lengths[:-1]])
    is_start = np.zeros(num_tokens, dtype=bool)
    is_start[starts[starts < num_tokens]] = True
    is_start[::seq_len] = True
    position_ids = document_positions(is_start).astype(np.int32)
    labels = np.where(is_start, IGNORED_LABEL, tokens).astype(np.int32)
    return {
        "input_ids": tokens.reshape(num_rows, seq_len),
        "position_ids": position_ids.reshape(num_rows, seq_len),
        "labels": labels.reshape(num_rows, seq_len),
    }


def document_positions(is_start: np.ndarray) -> np.ndarray:
    """Return every token's position in its document.

    Args:
        is_start: Whether a document starts at a token, `[num_tokens]` bool; the first does.

    Returns:
        `[num_tokens]` int64, counted from 0 at each start.
    """
    index = np.arange(len(is_start))
    return index - np.maximum.accumulate(np.where(is_start, index, 0))
