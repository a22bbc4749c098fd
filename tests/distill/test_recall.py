"""Recall rows: answers that were said before, weights on them alone, the same rows every time."""

import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from subquad.distill.recall import _OWNERS, RECALL_KINDS, SHORTEST_ROW, WEIGHTS_COLUMN, RecallConfig, add_recall
from subquad.errors import ConfigError

SEQ_LEN = 256
ANSWER = 7.0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_tokenizer()


def text_rows(count=24, seq_len=SEQ_LEN) -> Dataset:
    rng = np.random.default_rng(0)
    # letters alone, so that a code or a name in a row is one that was written into it
    low, high = TOKENIZER.convert_tokens_to_ids(["a", "z"])
    ids = rng.integers(low, high + 1, (count, seq_len)).astype(np.int32)
    positions = np.tile(np.arange(seq_len, dtype=np.int32) % 100, (count, 1))
    labels = np.where(positions == 0, -100, ids)
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return Dataset.from_dict({name: list(column) for name, column in columns.items()}).with_format("torch")


def recall(rows, seed=0, **changes):
    return add_recall(rows, TOKENIZER, RecallConfig(**{"share": 1.0, "answer_weight": ANSWER} | changes), seed)


def answers(row) -> list[tuple[int, int]]:
    """Spans of tokens that weigh more."""
    heavy = [0, *(row[WEIGHTS_COLUMN] == ANSWER).int().tolist(), 0]
    edges = np.flatnonzero(np.diff(heavy)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("kind", RECALL_KINDS)
def test_answers_were_said_before(kind):
    found = 0
    for row in recall(text_rows(), kinds=(kind,)):
        ids = row["input_ids"].tolist()
        assert len(ids) == SEQ_LEN
        for start, stop in answers(row):
            said = TOKENIZER.decode(ids[start:stop])
            assert said in TOKENIZER.decode(ids[:start])
            found += 1
        assert set(row[WEIGHTS_COLUMN].tolist()) <= {1.0, ANSWER}
    # nearly every row asks for something
    assert found >= 20


@pytest.mark.parametrize("kind", ["facts", "lookup"])
def test_the_value_asked_for_is_that_of_its_owner(kind):
    for row in recall(text_rows(), kinds=(kind,)):
        ids = row["input_ids"].tolist()
        for start, stop in answers(row):
            value, before = TOKENIZER.decode(ids[start:stop]), TOKENIZER.decode(ids[:start])
            # the text is of small letters: what begins with a capital and goes on small is a name or "Question"
            owner = [word for word in re.findall(r"[A-Z][a-z]{2,}", before[-90:]) if word in _OWNERS][-1]
            told = [match.start() for match in re.finditer(re.escape(value), before)]
            assert any(owner in before[max(0, at - 50) : at + 50] for at in told)


def test_rows_are_one_document_and_only_the_first_token_is_not_predicted():
    for row in recall(text_rows(4)):
        assert torch.equal(row["position_ids"], torch.arange(SEQ_LEN))
        assert row["labels"][0] == -100
        assert torch.equal(row["labels"][1:], row["input_ids"][1:])
        assert row[WEIGHTS_COLUMN].dtype == torch.float32


def test_other_rows_stay_as_they_are_and_the_share_is_kept():
    rows = text_rows(200, SHORTEST_ROW)
    written = recall(rows, share=0.3)
    changed = 0
    for before, after in zip(rows, written, strict=True):
        if torch.equal(before["input_ids"], after["input_ids"]):
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert (after[WEIGHTS_COLUMN] == 1).all()
        else:
            changed += 1
    # 60 expected; four standard deviations of a binomial
    assert abs(changed - 60) < 26


def test_seeds():
    rows = text_rows(6)
    first, again, other = recall(rows, seed=1), recall(rows, seed=1), recall(rows, seed=2)
    assert torch.equal(first["input_ids"][:], again["input_ids"][:])
    assert not torch.equal(first["input_ids"][:], other["input_ids"][:])


def test_a_stream_gives_the_same_rows():
    rows = text_rows(8)
    expected = recall(rows, share=0.5)
    stream = recall(rows.to_iterable_dataset(), share=0.5)
    for row, other in zip(stream, expected, strict=True):
        assert all(np.array_equal(np.asarray(row[name]), other[name].numpy()) for name in other)


def test_refusals():
    with pytest.raises(ConfigError, match=r"rows of 64 tokens are too short for recall, which needs 128"):
        recall(text_rows(2, 64))
    with pytest.raises(ConfigError, match=r"share must be above 0 and at most 1, got 1.5"):
        RecallConfig(share=1.5)
    with pytest.raises(ConfigError, match=r"kinds must be some of facts, lookup, repeat, got \['riddle'\]"):
        RecallConfig(share=0.5, kinds=("riddle",))
    with pytest.raises(ConfigError, match=r"answer_weight must be at least 0, got -1"):
        RecallConfig(share=0.5, answer_weight=-1)
