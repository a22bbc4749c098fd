"""Rows: one JSON object per result, written so that a run that is killed keeps what it has finished."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from subquad.convert.atomic import atomic_file

Status = Literal["ok", "failed", "error", "skipped"]
# A failed check and an error make the run fail; a skipped row says why nothing was measured.
FAILURES: tuple[Status, ...] = ("failed", "error")


@dataclass(kw_only=True)
class Row:
    """One result.

    Attributes:
        what: What was measured or checked: `subquad`, `sdpa_flash`, `teacher`, ….
        status: `ok`; `failed`: a check did not hold; `error`: an exception, a dead or stopped worker; `skipped`.
        reason: Why it is not `ok`, else empty.
        config: Sizes and options, enough to repeat it.
        metrics: Numbers (and short words) by name.
        section: Filled in by whoever runs the case.
        case: As above.
        seconds: Wall clock of the whole case, as above.
    """

    what: str
    status: Status = "ok"
    reason: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    section: str = ""
    case: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the row makes the run fail."""
        return self.status in FAILURES

    def to_json(self, run: dict[str, Any]) -> str:
        """Return the row as one line of JSON that also says on what it was measured.

        Args:
            run: GPU, commit, versions; the same in every row, so that a row means something on its own.

        Returns:
            One line. NaN and infinities are words, which JSON has no numbers for.
        """
        names = ("section", "case", "what", "status", "reason", "config", "metrics", "seconds")
        return json.dumps(_plain({name: getattr(self, name) for name in names} | {"run": run}), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | None) else str(value)


class ResultsFile:
    """A JSON Lines file that is replaced, whole, at every row."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """Name the file `<gpu>-<commit>-<date>.jsonl`; nothing is written yet.

        Args:
            folder: Where; created at the first row.
            run: What every row repeats, with at least `gpu`, `commit` and `date`.
        """
        self.path = folder / f"{_slug(run['gpu'])}-{_slug(run['commit'])}-{_slug(run['date'])}.jsonl"
        self.run = run
        self._lines: list[str] = []

    def add(self, row: Row) -> None:
        """Write the file again with one more row.

        Args:
            row: The row.

        Raises:
            OutputError: The file cannot be written; what was there before is unchanged.
        """
        self._lines.append(row.to_json(self.run))
        atomic_file(self.path, ("\n".join(self._lines) + "\n").encode())


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"
