"""The rows of synthetic recall and their score."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from subquad.pretrain.recall import ASK, evaluate_recall, recall_rows
from subquad.pretrain.schema import RecallSection

SECTION = RecallSection(
    num_pairs=4, num_queries=3, num_keys=9, num_values=7, num_fillers=5, eval_lengths=(17, 33), eval_rows=12
)
FIRST_VALUE = 1 + SECTION.num_keys
FIRST_FILLER = FIRST_VALUE + SECTION.num_values


def is_key(token: int) -> bool:
    return 1 <= token < FIRST_VALUE


@pytest.mark.parametrize("seq_len", [17, 18, 50])
def test_rows_hold_pairs_and_ask_for_them(seq_len):
    rows = recall_rows(SECTION, 40, seq_len, seed=3)
    assert len(rows) == 40
    for row in rows:
        tokens = row["input_ids"].tolist()
        body, questions = tokens[: seq_len - 9], tokens[seq_len - 9 :]
        pairs = {token: body[index + 1] for index, token in enumerate(body) if is_key(token)}
        assert len(pairs) == SECTION.num_pairs
        assert all(FIRST_VALUE <= value < FIRST_FILLER for value in pairs.values())
        assert sum(token >= FIRST_FILLER for token in body) == len(body) - 2 * SECTION.num_pairs
        asked = questions[1::3]
        assert questions[::3] == [ASK] * 3
        assert len(set(asked)) == 3
        assert [pairs[key] for key in asked] == questions[2::3]
        labels = row["labels"].tolist()
        assert [index for index, label in enumerate(labels) if label != -100] == [seq_len - 7, seq_len - 4, seq_len - 1]
        assert labels[-1] == tokens[-1]


def test_rows_are_the_same_for_one_seed_and_others_for_another():
    def drawn(**changes) -> torch.Tensor:
        return recall_rows(SECTION, 5, 30, **{"seed": 0, **changes})["input_ids"][:]

    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), drawn(seed=1))
    assert not torch.equal(drawn(), drawn(stream=1))


def test_pairs_reach_every_place():
    rows = recall_rows(SECTION, 400, 30, seed=0)
    places = {index for row in rows for index, token in enumerate(row["input_ids"].tolist()[:21]) if is_key(token)}
    assert places == set(range(20))


class Reader(nn.Module):
    """Looks the key up in the row; `wrong` makes it answer with the value after."""

    def __init__(self, wrong: int = 0) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.wrong = wrong

    def get_decoder(self):
        return self.read

    def get_output_embeddings(self):
        return nn.Identity()

    def read(self, input_ids, use_cache):
        logits = functional.one_hot(input_ids, SECTION.vocab_size).float()
        for row, tokens in enumerate(input_ids.tolist()):
            for index, token in enumerate(tokens):
                if is_key(token):
                    value = tokens[tokens.index(token) + 1] + self.wrong
                    logits[row, index] = functional.one_hot(torch.tensor(value), SECTION.vocab_size).float()
        return SimpleNamespace(last_hidden_state=logits)


def test_one_who_looks_up_scores_one_and_one_who_is_wrong_scores_zero():
    found = evaluate_recall(Reader(), SECTION)
    assert {length: metric.value for length, metric in found.items()} == {17: 1.0, 33: 1.0}
    assert all(metric.num == 12 * 3 for metric in found.values())
    assert all(metric.value == 0.0 for metric in evaluate_recall(Reader(wrong=1), SECTION).values())
