"""The optional package lm-eval: one clear error where it is missing, and what it warns about."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from packaging.version import Version

from subquad.errors import ConfigError

# Loads tasks with `TaskManager.load`; what ran before has another interface.
_OLDEST = "0.4.13"
# It says so of every number of examples that is asked for.
_EXPECTED_WARNINGS = ("Overwriting default num_fewshot",)
_MOST_WARNINGS = 5


def require_lm_eval() -> str:
    """Return the version of lm-eval.

    Returns:
        The version.

    Raises:
        ConfigError: It is not installed, or too old.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("GLUE and other lm-eval tasks need the package lm-eval: pip install 'subquad[eval]'")
    installed = version("lm_eval")
    if Version(installed) < Version(_OLDEST):
        raise ConfigError(f"lm-eval {installed} is too old, {_OLDEST} is needed: pip install -U 'lm-eval>={_OLDEST}'")
    return installed


class WarningNotes(logging.Handler):
    """Collects warnings; those that differ in numbers only count as one."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__(logging.WARNING)
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record."""
        message = " ".join(record.getMessage().split())
        if not message.startswith(_EXPECTED_WARNINGS):
            key = re.sub(r"\d+", "N", message)
            self._counts[key] += 1
            self._first.setdefault(key, message)

    def notes(self) -> list[str]:
        """Return a sentence per kind of warning."""
        kinds = self._counts.most_common()
        notes = [
            f"lm-eval warned{'' if count == 1 else f' {count} times'}: {self._first[key]}"
            for key, count in kinds[:_MOST_WARNINGS]
        ]
        if len(kinds) > _MOST_WARNINGS:
            notes.append(f"lm-eval gave {len(kinds) - _MOST_WARNINGS} more kinds of warning.")
        return notes


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keep lm-eval's log off the screen: it repeats itself for every task and model."""
    logger = logging.getLogger("lm_eval")
    propagate, logger.propagate = logger.propagate, False
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)


@contextmanager
def quiet_programs() -> Iterator[None]:
    """Keep what programs started inside the block write to standard error off the screen.

    Python's own standard error goes with it, so the block must be short.
    """
    try:
        screen = os.dup(2)
    except OSError:
        # There is no standard error.
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)


@contextmanager
def collected_warnings() -> Iterator[WarningNotes]:
    """Collect what lm-eval warns about inside the block, for the notes of a record."""
    handler = WarningNotes()
    logger = logging.getLogger("lm_eval")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
