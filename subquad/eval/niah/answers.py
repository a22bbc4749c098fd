"""Reading an answer: which values a model's text names."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RUN = re.compile(r"[^\W_]+")


def read_values(text: str, kind: str) -> list[str]:
    """Return the different values at the beginning of a text, in order.

    White space, punctuation and "and" may stand before and between them; the first other thing ends the answer. So
    `48213. Remember it` names 48213, and `not 48213` names nothing.

    Args:
        text: What a model wrote.
        kind: `digits` or `words`.

    Returns:
        The values, in lower case.
    """
    values: dict[str, None] = {}
    for run in _RUN.findall(text.lower()):
        if run == "and":
            continue
        if not (run.isdigit() if kind == "digits" else run.isalpha()):
            break
        values[run] = None
    return list(values)


def share_named(text: str, kind: str, values: Sequence[str]) -> float:
    """Return the share of the values that a text names among its first `len(values)`; 1 is an exact match.

    Args:
        text: What a model wrote.
        kind: `digits` or `words`.
        values: What it should name, in any order.

    Returns:
        0 to 1.
    """
    named = read_values(text, kind)[: len(values)]
    return len(set(named) & set(values)) / len(values)
