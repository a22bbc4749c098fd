"""The row of a run, written again after every part of it, so that a run that is cut off leaves what it had."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.environment import ROOT, checkout_commit
from subquad.convert.atomic import atomic_file
from subquad.eval.storage import collect_versions, device_name

RESULT = "gpu_distill.json"


class RunRecord:
    """What is known of a run so far.

    Attributes:
        path: The JSON file.
        row: Its content.
        started: When the run began, on the monotonic clock.
        seconds: How long it may take.
    """

    def __init__(self, output: Path, seconds: float, commit: str | None, command: str) -> None:
        """Start the clock and write the first state.

        Args:
            output: Folder of the file.
            seconds: How long the run may take.
            commit: The commit, where the checkout cannot tell; None asks git.
            command: Command that repeats the run.
        """
        self.path, self.seconds, self.started = output / RESULT, seconds, time.monotonic()
        self.row: dict[str, Any] = {
            "status": "running",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "versions": {**collect_versions(), "triton": _triton(), "cuda": torch.version.cuda},
            "commit": commit or checkout_commit(ROOT),
            "command": command,
            "seconds_limit": seconds,
            "phases": {},
            "notes": [],
        }
        self.write()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds until it has to end; negative once it should have."""
        return self.seconds - self.elapsed

    def note(self, text: str) -> None:
        """Take a sentence that a reader must know, and print it."""
        self.row["notes"].append(text)
        print(f"note: {text}", flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the run, note its peak of GPU memory, and write the row once it has ended.

        Args:
            name: Its key under `phases`.

        Yields:
            Nothing.
        """
        print(f"[{self.elapsed:6.1f} s] {name}", flush=True)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        yield
        if on_gpu:
            torch.cuda.synchronize()
        self.row["phases"][name] = {
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }
        self.write()

    def end(self, status: str, reason: str = "") -> None:
        """Write the last state: `done`, or `failed` with its reason."""
        self.row |= {"status": status, "reason": reason}
        self.write()

    def write(self) -> None:
        """Replace the file."""
        self.row["seconds"] = round(self.elapsed, 3)
        atomic_file(self.path, (json.dumps(self.row, indent=1) + "\n").encode())


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"
