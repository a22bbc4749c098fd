"""Recall in the training text: rows in which something said far back has to be repeated.

Prose hardly asks for it: of a thousand tokens a handful depend on one that stands far back, so a far part that was
trained on prose learns an average. A part of the rows therefore gets facts and questions about them, or a repeated
span, written over its own text; their answers count more in the loss. The wording differs from that of the needle
evaluation (`subquad/eval/niah/texts.py`), which so stays a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from transformers import PreTrainedTokenizerBase

from subquad.distill.data import rows_dataset
from subquad.distill.packing import IGNORED_LABEL
from subquad.errors import ConfigError
from subquad.pieces import PieceEncoder

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

RecallKind = Literal["facts", "lookup", "repeat"]
RECALL_KINDS: tuple[RecallKind, ...] = get_args(RecallKind)
WEIGHTS_COLUMN = "loss_weights"
# a row has to hold a fact, its question and some text between them
SHORTEST_ROW = 128

_THINGS = (
    "access code",
    "account number",
    "bicycle lock",
    "cabin number",
    "door code",
    "flight number",
    "invoice number",
    "locker number",
    "order number",
    "phone extension",
    "room number",
    "safe combination",
    "serial number",
    "tracking code",
)
_NAMES = """
Ada Ben Cleo Dora Elias Fay Gus Hana Ivan Judy Kurt Lena Milo Nora Otto Pia Ralf Sara Tom Uma Vito Wanda Yara Zeno
"""
_OWNERS = tuple(_NAMES.split())
_FACTS = (
    " Note: the {thing} of {owner} is {value}.",
    " {owner}'s {thing} is {value}.",
    " Please write this down: {value} is the {thing} of {owner}.",
)
_QUESTIONS = (
    " Question: what is the {thing} of {owner}? Answer: it is {value}",
    " As said before, {owner}'s {thing} is {value}",
    " {owner} asked again for the {thing}. It is still {value}",
)
_VALUE = "{value}"
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_MOST_FACTS = 4
_SPAN = (16, 64)
# the first tokens of a repeated span only say that it is one
_SPAN_HEAD = 3


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """How much recall is in the training rows.

    Attributes:
        share: Share of the rows that get it, in (0, 1].
        kinds: `facts` (a few sentences that state a code, each asked for later), `lookup` (a list of names with values,
            some asked for later), `repeat` (a span of the row that comes again).
        answer_weight: How many tokens of text a token of an answer counts for in the loss of stage 2.
    """

    share: float
    kinds: tuple[RecallKind, ...] = RECALL_KINDS
    answer_weight: float = 10.0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: A share outside (0, 1], an unknown kind or none, or a weight below 0.
        """
        problems = []
        if not 0 < self.share <= 1:
            problems.append(f"share must be above 0 and at most 1, got {self.share}")
        unknown = [kind for kind in self.kinds if kind not in RECALL_KINDS]
        if unknown or not self.kinds:
            problems.append(f"kinds must be some of {', '.join(RECALL_KINDS)}, got {list(self.kinds)}")
        if not self.answer_weight >= 0:
            problems.append(f"answer_weight must be at least 0, got {self.answer_weight}")
        if problems:
            raise ConfigError("recall is not valid: " + "; ".join(problems))


class _Piece(NamedTuple):
    """Tokens laid over the text: where they begin, counted in tokens of text before them, and which are answers."""

    place: int
    ids: list[int]
    answer: list[bool]


def add_recall(
    rows: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, config: RecallConfig, seed: int = 0
) -> Dataset | IterableDataset:
    """Write recall over a part of the rows; the same arguments always give the same rows.

    Args:
        rows: Rows of `build_token_dataset`.
        tokenizer: The checkpoint's tokenizer.
        config: How much and what.
        seed: Seed of the choice of rows and of what is written.

    Returns:
        Rows with one column more, `loss_weights` `[seq_len]` float32, aligned as the labels: 1 for text,
        `answer_weight` for answers.

    Raises:
        ConfigError: Rows of fewer than 128 tokens.
        DataError: A tokenizer that pieces of text cannot be joined with.
    """
    write = _row_writer(PieceEncoder(tokenizer), config, seed)
    from datasets import IterableDataset

    if isinstance(rows, IterableDataset):
        return rows.map(write, with_indices=True)
    columns = {name: np.asarray(rows.with_format("numpy")[name]) for name in ("input_ids", "position_ids", "labels")}
    _require_length(columns["input_ids"].shape[1])
    written = [
        write({name: column[index] for name, column in columns.items()}, index)
        for index in range(len(columns["input_ids"]))
    ]
    return rows_dataset({name: np.stack([row[name] for row in written]) for name in written[0]})


def _row_writer(
    encoder: PieceEncoder, config: RecallConfig, seed: int
) -> Callable[[dict[str, Any], int], dict[str, np.ndarray]]:
    def write(row: dict[str, Any], index: int) -> dict[str, np.ndarray]:
        ids = np.asarray(row["input_ids"])
        _require_length(len(ids))
        rng = np.random.default_rng((seed, index))
        if rng.random() >= config.share:
            columns = {name: np.asarray(row[name]) for name in ("input_ids", "position_ids", "labels")}
            return {**columns, WEIGHTS_COLUMN: np.ones(len(ids), dtype=np.float32)}
        kind = config.kinds[rng.integers(len(config.kinds))]
        return _recall_row(ids, list(_PIECES[kind](encoder, ids, rng)), config.answer_weight)

    return write


def _recall_row(text: np.ndarray, pieces: list[_Piece], answer_weight: float) -> dict[str, np.ndarray]:
    """Lay pieces over a row of text: one document, as long as before; the end of the text is cut off."""
    ids: list[int] = []
    answer: list[bool] = []
    used = 0
    for piece in sorted(pieces, key=lambda piece: piece.place):
        ids += [*text[used : piece.place].tolist(), *piece.ids]
        answer += [False] * (piece.place - used) + piece.answer
        used = piece.place
    rest = text[used : used + len(text) - len(ids)]
    tokens = np.concatenate([np.asarray(ids, dtype=text.dtype), rest])[: len(text)]
    is_answer = np.array(answer + [False] * len(rest))[: len(text)]
    labels = tokens.copy()
    labels[0] = IGNORED_LABEL
    return {
        "input_ids": tokens,
        "position_ids": np.arange(len(tokens), dtype=text.dtype),
        "labels": labels,
        WEIGHTS_COLUMN: np.where(is_answer, answer_weight, 1.0).astype(np.float32),
    }


def _facts(encoder: PieceEncoder, text: np.ndarray, rng: np.random.Generator) -> Iterator[_Piece]:
    """A few facts at random places, each asked for at a random place after it."""
    count = int(rng.integers(1, _MOST_FACTS + 1))
    things, owners = rng.choice(_THINGS, count), rng.choice(_OWNERS, count, replace=False)
    for thing, owner in zip(things, owners, strict=True):
        value = _draw_value(rng)
        said = {"thing": str(thing), "owner": str(owner)}
        fact = _templated(encoder, str(rng.choice(_FACTS)), said, value)
        question = _templated(encoder, str(rng.choice(_QUESTIONS)), said, value)
        first, second = np.sort(rng.integers(0, _room(text, count), 2))
        yield _Piece(int(first), fact[0], [False] * len(fact[0]))
        yield _Piece(int(second), *question)


def _lookup(encoder: PieceEncoder, text: np.ndarray, rng: np.random.Generator) -> Iterator[_Piece]:
    """A list of names with values; up to four of them are asked for at random places after it."""
    count = int(rng.integers(_MOST_FACTS, min(len(_OWNERS), len(text) // 48) + 1)) if len(text) >= 256 else 2
    owners = rng.choice(_OWNERS, count, replace=False)
    values = [_draw_value(rng) for _ in owners]
    room = _room(text, count)
    start = int(rng.integers(0, room // 2))
    for owner, value in zip(owners, values, strict=True):
        ids, _ = _templated(encoder, "\n{owner}: {value}", {"owner": str(owner)}, value)
        yield _Piece(start, ids, [False] * len(ids))
    for index in rng.choice(count, min(count, _MOST_FACTS), replace=False):
        place = int(rng.integers(start + 1, room))
        yield _Piece(place, *_templated(encoder, "\n{owner}: {value}", {"owner": str(owners[index])}, values[index]))


def _repeat(encoder: PieceEncoder, text: np.ndarray, rng: np.random.Generator) -> Iterator[_Piece]:
    """A span of the text that comes again behind at least its own length of other text."""
    length = int(rng.integers(_SPAN[0], min(_SPAN[1], len(text) // 4) + 1))
    start = int(rng.integers(0, len(text) - 3 * length))
    place = int(rng.integers(start + 2 * length, len(text) - length + 1))
    yield _Piece(place, text[start : start + length].tolist(), [False] * _SPAN_HEAD + [True] * (length - _SPAN_HEAD))


_PIECES: dict[str, Callable[[PieceEncoder, np.ndarray, np.random.Generator], Iterator[_Piece]]] = {
    "facts": _facts,
    "lookup": _lookup,
    "repeat": _repeat,
}


def _room(text: np.ndarray, count: int) -> int:
    """Return how many tokens of text there are places in, so that pieces about `count` values fit behind them."""
    return max(1, len(text) - 40 * min(count, _MOST_FACTS) - 12 * count)


def _draw_value(rng: np.random.Generator) -> str:
    digits = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(3, 7))))
    if rng.random() < 0.5:
        return digits
    return "".join(rng.choice(list(_LETTERS), 2)) + "-" + digits


def _templated(encoder: PieceEncoder, template: str, said: dict[str, str], value: str) -> tuple[list[int], list[bool]]:
    """Return a sentence's tokens and which of them hold the value."""
    before, after = template.format(**said, value=_VALUE).split(_VALUE)
    context = "text."
    head, blank = encoder.after(context, before.rstrip(" ")), " " if before.endswith(" ") else ""
    middle = encoder.after(context + before.rstrip(" "), blank + value)
    tail = encoder.after(context + before + value, after) if after else []
    holds_value = [not encoder.is_blank(token) for token in middle]
    return head + middle + tail, [False] * len(head) + holds_value + [False] * len(tail)


def _require_length(seq_len: int) -> None:
    if seq_len < SHORTEST_ROW:
        raise ConfigError(
            f"rows of {seq_len} tokens are too short for recall, which needs {SHORTEST_ROW}; raise seq_len or leave "
            "recall out"
        )
