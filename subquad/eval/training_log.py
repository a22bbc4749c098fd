"""Read `log.jsonl`, the training log of a run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_FILE = "log.jsonl"
# A stage names the file of its plot.
_STAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class TrainingCurve:
    """Training loss of one stage.

    Attributes:
        stage: Name of the stage.
        tokens: Tokens trained on so far, ascending.
        losses: Mean loss since the point before.
    """

    stage: str
    tokens: list[int]
    losses: list[float]


def read_curves(run_dir: Path) -> tuple[list[TrainingCurve], list[str]]:
    """Read the training curves of a run.

    Where a number of tokens occurs twice in a stage (a resumed run) the later line counts. A line that cannot be read
    (a killed process can leave half a line), or whose stage is no plain name, is left out and counted in a note.

    Args:
        run_dir: The run's folder.

    Returns:
        One curve per stage in order of appearance, and notes on what could not be read.
    """
    path = run_dir / LOG_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], [f"The run has no {LOG_FILE}, so there are no training curves."]
    stages: dict[str, dict[int, float]] = {}
    num_unreadable = 0
    for line in filter(str.strip, lines):
        try:
            stage, tokens, loss = _point(json.loads(line))
        except (ValueError, TypeError, KeyError):
            num_unreadable += 1
            continue
        if math.isfinite(loss):
            stages.setdefault(stage, {})[tokens] = loss
    notes = [f"Unreadable lines of {LOG_FILE} that were left out: {num_unreadable}."] if num_unreadable else []
    if not stages:
        notes.append(f"{LOG_FILE} holds no training steps, so there are no training curves.")
    curves = []
    for stage, points in stages.items():
        tokens_done = sorted(points)
        curves.append(TrainingCurve(stage, tokens_done, [points[tokens] for tokens in tokens_done]))
    return curves, notes


def _point(record: dict[str, Any]) -> tuple[str, int, float]:
    stage = str(record["stage"])
    if not _STAGE.fullmatch(stage):
        raise ValueError(f"stage {stage!r} must be letters, digits and _ . - and begin with a letter or digit")
    return stage, int(record["tokens"]), float(record["loss"])
