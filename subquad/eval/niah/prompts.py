"""Prompts of an exact length in tokens, each with its answer and the positions of the key in it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from subquad.errors import ConfigError, DataError
from subquad.eval.niah.haystack import Around, HaystackText, load_sentences
from subquad.eval.niah.settings import PAPER_LARGEST_KEY, NiahSettings
from subquad.eval.niah.texts import (
    INTRODUCTION,
    NAMES,
    VALUE,
    WORDS,
    answer_parts,
    needle_template,
    question_text,
)
from subquad.eval.records import hash_prompts
from subquad.pieces import PieceEncoder

# Prose may hold a drawn key by chance; a text that holds hundreds of them in a row holds nearly all.
_MOST_DRAWS = 500

Span = tuple[int, int]


@dataclass(frozen=True)
class NiahPrompt:
    """One prompt, ready for a model.

    Attributes:
        length: Tokens of the prompt, the cell's length.
        depth: Where the first needle stands, 0 to 1.
        sample: Its number within the cell.
        input_ids: The prompt's tokens.
        answer_ids: Tokens that follow it when all values are named in the order in which they appear.
        key_mask: For each answer token, whether it holds a part of a value.
        values: What is to be named, in order of appearance.
        key_spans: (first, one past the last) position in `input_ids` of every statement of a value asked for.
    """

    length: int
    depth: float
    sample: int
    input_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    key_mask: tuple[bool, ...]
    values: tuple[str, ...]
    key_spans: tuple[Span, ...]

    @property
    def distance(self) -> int:
        """Tokens between the last statement of a value and the first token of the answer."""
        return self.length - self.key_spans[-1][1]


class PromptSet(NamedTuple):
    """All prompts of a grid for one tokenizer.

    Attributes:
        prompts: By length, then depth, then sample.
        prompts_hash: SHA-256 of all prompts with their answers.
    """

    prompts: list[NiahPrompt]
    prompts_hash: str


class _Needle(NamedTuple):
    """A needle's tokens and where in them its value stands."""

    value: str
    ids: list[int]
    spans: list[Span]


class _Answer(NamedTuple):
    """The answer's tokens; the blank ones before its first value belong to the prompt."""

    blank: list[int]
    ids: list[int]
    key_mask: list[bool]


def build_prompts(tokenizer: PreTrainedTokenizerBase, settings: NiahSettings) -> PromptSet:
    """Build every prompt of the grid; equal settings and tokenizers give equal prompts.

    Args:
        tokenizer: The model's tokenizer.
        settings: With `lengths` (see `NiahSettings.resolved`).

    Returns:
        The prompts.

    Raises:
        ConfigError: A length too short for introduction, needles and question, or too few tokens for the answer.
        DataError: The haystack cannot be read or is too short, or the tokenizer cannot write the keys.
    """
    builder = _Builder(tokenizer, settings)
    prompts = [
        builder.prompt(length, depth, sample)
        for length in settings.lengths or ()
        for depth in settings.depths
        for sample in range(settings.samples)
    ]
    longest = max(len(prompt.answer_ids) for prompt in prompts)
    if longest > settings.answer_tokens:
        raise ConfigError(
            f"max_new_tokens is {settings.answer_tokens}, but an answer takes {longest} tokens; raise it or leave it "
            "out"
        )
    return PromptSet(prompts, hash_prompts([*prompt.input_ids, *prompt.answer_ids] for prompt in prompts))


class _Builder:
    """Builds the prompts of one grid."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: NiahSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.encoder = PieceEncoder(tokenizer)
        self.haystack = HaystackText(load_sentences(settings), self.encoder, repeats=settings.haystack == "filler")
        self.introduction = self.encoder.start(INTRODUCTION)

    def prompt(self, length: int, depth: float, sample: int) -> NiahPrompt:
        """Draw keys until none of them stands anywhere else in the prompt."""
        # Seeded by the cell, not by the order: a longer grid keeps the prompts of a shorter one.
        rng = Random(f"{self.settings.seed}/{length}/{depth}/{sample}")
        for _ in range(_MOST_DRAWS):
            prompt = self._draw(rng, length, depth, sample)
            if prompt is not None:
                return prompt
        raise DataError(
            f"no key could be found that the haystack does not hold already ({_MOST_DRAWS} tries at length {length}). "
            "Use longer keys (key_digits) or another text"
        )

    def _draw(self, rng: Random, length: int, depth: float, sample: int) -> NiahPrompt | None:
        num_values = self.settings.num_values
        names = rng.sample(NAMES, self.settings.num_keys) if self.settings.num_keys > 1 else [None]
        values = self._draw_values(rng, self.settings.num_keys + num_values - 1)
        asked = [self._needle(names[0], value) for value in values[:num_values]]
        others = [self._needle(name, value) for name, value in zip(names[1:], values[num_values:], strict=True)]
        question = question_text(self.settings.needle, names[0], num_values)
        answer = self._answer(question, values[:num_values])
        ending = self.encoder.after(".", question) + answer.blank
        room = self._room(length, [self.introduction, ending, *(needle.ids for needle in asked + others)])
        num_before = round(depth * room)
        pieces = _place(self.haystack.around(rng, num_before, room - num_before), asked, others, rng)
        ids, spans = list(self.introduction), []
        for piece in pieces:
            if isinstance(piece, _Needle) and piece in asked:
                spans += [(len(ids) + first, len(ids) + end) for first, end in piece.spans]
            ids += piece.ids if isinstance(piece, _Needle) else piece
        ids += ending
        if not self._unambiguous(ids, asked + others):
            return None
        texts = tuple(values[:num_values])
        return NiahPrompt(
            length, depth, sample, tuple(ids), tuple(answer.ids), tuple(answer.key_mask), texts, tuple(spans)
        )

    def _draw_values(self, rng: Random, num: int) -> list[str]:
        if self.settings.needle == "words":
            return rng.sample(WORDS, num)
        digits = self.settings.key_digits
        lowest, highest = (1, PAPER_LARGEST_KEY) if self.settings.paper else (10 ** (digits - 1), 10**digits - 1)
        return [str(number) for number in rng.sample(range(lowest, highest + 1), num)]

    def _needle(self, name: str | None, value: str) -> _Needle:
        template = needle_template(self.settings.needle, name, self.settings.num_values, self.settings.paper)
        before = "."
        ids: list[int] = []
        spans: list[Span] = []
        *stated, rest = template.split(VALUE)
        for part in stated:
            # A space belongs to the value behind it: tokenizers write the two as one token, or the space alone.
            words = part.rstrip()
            text = part[len(words) :] + value
            ids += self.encoder.after(before, words)
            found = self.encoder.after(before + words, text)
            self._check_writes(found, value)
            spans.append((len(ids) + self._num_blank(found), len(ids) + len(found)))
            ids += found
            before += words + text
        return _Needle(value, ids + self.encoder.after(before, rest), spans)

    def _answer(self, question: str, values: list[str]) -> _Answer:
        blank: list[int] = []
        ids: list[int] = []
        mask: list[bool] = []
        text = question
        for index, (before, value) in enumerate(answer_parts(values)):
            joint, found = self.encoder.after(text, before), self.encoder.after(text + before, value)
            num_blank = self._num_blank(found)
            if index == 0:
                blank, found, num_blank = found[:num_blank], found[num_blank:], 0
            ids += joint + found
            mask += [False] * (len(joint) + num_blank) + [True] * (len(found) - num_blank)
            text += before + value
        return _Answer(blank, ids, mask)

    def _room(self, length: int, fixed: list[list[int]]) -> int:
        """Return how many tokens of haystack fit in."""
        taken = sum(map(len, fixed))
        least = len(self.settings.depths) - 1
        if length - taken < least:
            raise ConfigError(
                f"length {length} is too short: introduction, needles and question take {taken} tokens, and "
                f"{least + 1} depths need {least} more. The shortest length is {taken + least}"
            )
        return length - taken

    def _num_blank(self, ids: list[int]) -> int:
        """Count the tokens at the beginning that are white space alone: they hold no part of a value."""
        return next((index for index, token in enumerate(ids) if not self.encoder.is_blank(token)), len(ids))

    def _check_writes(self, ids: list[int], value: str) -> None:
        written = self.tokenizer.decode(ids).strip()
        if written != value:
            raise DataError(
                f"the tokenizer writes the key {value!r} as {written!r}, so it cannot be told from others. "
                "Use another kind of needle (needle: words or digits)"
            )

    def _unambiguous(self, input_ids: list[int], needles: list[_Needle]) -> bool:
        text = self.tokenizer.decode(input_ids).lower()
        return all(text.count(needle.value) == len(needle.spans) for needle in needles)


def _place(around: Around, asked: list[_Needle], others: list[_Needle], rng: Random) -> list[list[int] | _Needle]:
    """Put one needle between the two halves and the others between random sentences.

    The needles asked for stand in the order of `asked`, whichever of them comes to stand between the halves.
    """
    pieces: list[list[int] | _Needle] = [*around.before, asked[0], *around.after]
    for needle in (*asked[1:], *others):
        # Never behind the last piece: it is a cut sentence, or the needle that stands at depth 1.
        pieces.insert(rng.randrange(len(pieces)), needle)
    in_order = iter(asked)
    return [next(in_order) if isinstance(piece, _Needle) and piece in asked else piece for piece in pieces]
