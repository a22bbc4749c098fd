"""Packing against a token-by-token definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.distill.packing import IGNORED_LABEL, pack_documents


def pack_slowly(documents: list[list[int]], seq_len: int) -> list[list[tuple[int, int, int]]]:
    stream = [(token, index) for document in documents for index, token in enumerate(document)]
    rows = [stream[start : start + seq_len] for start in range(0, len(stream) - seq_len + 1, seq_len)]
    packed = []
    for row in rows:
        position, out = 0, []
        for token, index_in_document in row:
            position = 0 if index_in_document == 0 or not out else position + 1
            out.append((token, position, IGNORED_LABEL if position == 0 else token))
        packed.append(out)
    return packed


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 17), max_size=12),
    seq_len=st.integers(1, 12),
)
def test_matches_the_definition(lengths, seq_len):
    token = iter(range(10_000))
    documents = [[next(token) for _ in range(length)] for length in lengths]
    packed = pack_documents([np.array(document, dtype=np.int64) for document in documents], seq_len)
    names = ("input_ids", "position_ids", "labels")
    assert {packed[name].dtype for name in names} == {np.dtype(np.int32)}
    assert {packed[name].shape[1] for name in names} == {seq_len}
    rows = [
        list(zip(*(packed[name][row].tolist() for name in names), strict=True)) for row in range(len(packed["labels"]))
    ]
    assert rows == pack_slowly(documents, seq_len)


def test_long_document_fills_consecutive_rows_and_the_next_one_starts_in_the_middle():
    packed = pack_documents([np.arange(100, 107), np.arange(200, 206)], 5)
    assert packed["input_ids"].tolist() == [[100, 101, 102, 103, 104], [105, 106, 200, 201, 202]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert packed["labels"].tolist() == [[-100, 101, 102, 103, 104], [-100, 106, -100, 201, 202]]


@pytest.mark.parametrize("documents", [[], [np.array([], dtype=np.int32)], [np.arange(3)]])
def test_too_few_tokens_give_no_row(documents):
    assert pack_documents(documents, 4)["input_ids"].shape == (0, 4)
