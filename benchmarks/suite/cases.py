"""A case: a name and a function; whatever goes wrong in it becomes a row."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.suite.hardware import Hardware
from benchmarks.suite.rows import Row, Status
from benchmarks.suite.settings import Settings

_TRACEBACK_CHARACTERS = 1500


@dataclass(frozen=True)
class Session:
    """What a case works with."""

    settings: Settings
    hardware: Hardware


@dataclass(frozen=True)
class Case:
    """One thing to check or to measure.

    Attributes:
        section: The section it belongs to.
        name: Unique in its section.
        run: Returns the case's rows; `section`, `case` and `seconds` are filled in by `run_case`.
        limit_s: Wall-clock seconds after which its worker is stopped.
        alone: Whether it needs the device to itself, as everything that is timed does. The others run several at a
            time: most of their time is the compilation of kernels, which the disk then holds for those that are timed.
    """

    section: str
    name: str
    run: Callable[[Session], list[Row]]
    limit_s: float = 60.0
    alone: bool = False

    def row(self, status: Status, reason: str, seconds: float = 0.0) -> Row:
        """Return a row that says why the case has no result."""
        return Row(what="case", status=status, reason=reason, section=self.section, case=self.name, seconds=seconds)


def run_case(case: Case, session: Session) -> list[Row]:
    """Run a case.

    Args:
        case: The case.
        session: What it works with.

    Returns:
        Its rows; after an exception, one row of status `error` with the end of the traceback.
    """
    began = time.perf_counter()
    try:
        rows = case.run(session)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        rows = [case.row("error", f"{type(error).__name__}: {error}")]
        rows[0].metrics["traceback"] = trace
    for row in rows:
        row.section, row.case, row.seconds = case.section, case.name, time.perf_counter() - began
    return rows
