"""Read `log.jsonl`, the training log of a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class TrainingCurve:
    """Training loss of one stage.

    Attributes:
        stage: Name of the stage.
        steps: Optimiser steps, ascending.
        losses: Loss at each step.
    """

    stage: str
    steps: list[int]
    losses: list[float]


def read_curves(run_dir: Path) -> tuple[list[TrainingCurve], list[str]]:
    """Read the training curves of a run.

    A resumed run writes the steps after its checkpoint again; the later record of a step counts. A line that cannot be
    read (a killed process can leave half a line) is left out and counted in a note.

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
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            point = _point(record)
        except (ValueError, TypeError, KeyError, AttributeError):
            num_unreadable += 1
            continue
        if point is not None:
            stage, step, loss = point
            stages.setdefault(stage, {})[step] = loss
    notes = [f"{num_unreadable} unreadable lines of {LOG_FILE} were left out."] if num_unreadable else []
    if not stages:
        notes.append(f"{LOG_FILE} holds no training steps, so there are no training curves.")
    curves = []
    for stage, points in stages.items():
        steps = sorted(points)
        curves.append(TrainingCurve(stage, steps, [points[step] for step in steps]))
    return curves, notes


def _point(record: dict[str, Any]) -> tuple[str, int, float] | None:
    """Return (stage, step, loss) of a training record, None for a record of another kind."""
    if "stage" not in record or "loss" not in record or "step" not in record:
        return None
    loss = float(record["loss"])
    return (str(record["stage"]), int(record["step"]), loss) if math.isfinite(loss) else None
