"""The samples file of a needle record: one line per prompt, from which two models are compared prompt by prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from subquad.convert.atomic import atomic_file
from subquad.eval.niah.measure import Outcome
from subquad.eval.niah.stats import mean_and_error
from subquad.eval.niah.summary import prompt_scores
from subquad.eval.records import RECORDS_FOLDER, EvalRecord

SAMPLES_FOLDER = "samples"
Place = tuple[int, float, int]


def samples_path(folder: Path, task: str, model: str) -> Path:
    """Return the file of a model's samples below `folder`, the evaluation folder."""
    return folder / RECORDS_FOLDER / task / SAMPLES_FOLDER / f"{model}.jsonl"


def save_samples(outcomes: Sequence[Outcome], folder: Path, task: str, model: str) -> None:
    """Write what a model made of every prompt, a line each.

    Args:
        outcomes: One per prompt.
        folder: The evaluation folder.
        task: Name of the task.
        model: Name of the model.

    Raises:
        OutputError: The folder cannot be written.
    """
    text = "".join(outcome.model_dump_json(exclude_none=True) + "\n" for outcome in outcomes)
    atomic_file(samples_path(folder, task, model), text.encode())


def sample_difference(
    folder: Path, first: EvalRecord, second: EvalRecord, metric: str
) -> tuple[float, float | None] | None:
    """Compare two models on a metric, prompt by prompt.

    Args:
        folder: The evaluation folder both are from.
        first: Record of one model.
        second: Record of another, measured with the same settings and prompts.
        metric: Name of a metric of both.

    Returns:
        Mean of (first - second) over the prompts that both have, with its standard error; None where a samples file is
        missing, cannot be read or is not the one the record was made from, or where they have no prompt in common.
    """
    mine, theirs = (_values(folder, record, metric) for record in (first, second))
    if mine is None or theirs is None:
        return None
    differences = [value - theirs[place] for place, value in mine.items() if place in theirs]
    return mean_and_error(differences) if differences else None


def _values(folder: Path, record: EvalRecord, metric: str) -> dict[Place, float] | None:
    try:
        lines = samples_path(folder, record.task, record.model).read_text(encoding="utf-8").splitlines()
        outcomes = [Outcome.model_validate_json(line) for line in lines]
    except (OSError, ValueError):
        return None
    places = [(outcome.length, outcome.depth, outcome.sample) for outcome in outcomes]
    scores = [prompt_scores(outcome).get(metric) for outcome in outcomes]
    found = {place: score for place, score in zip(places, scores, strict=True) if score is not None}
    # An evaluation that was killed may leave new samples beside an old record.
    if not found or not math.isclose(fmean(found.values()), record.metrics[metric].value, rel_tol=1e-6, abs_tol=1e-9):
        return None
    return found
