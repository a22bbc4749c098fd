"""The command that measures what a report lacks."""

from __future__ import annotations

import shlex

from subquad.eval.report.data import RunData
from subquad.eval.results import LOSS_LABELS

# Stands where the folder does not say which checkpoint was evaluated.
_UNKNOWN = "CHECKPOINT"


def eval_command(run: RunData, task: str) -> str:
    """Return the command that measures a task for the models of a folder, quoted for a shell.

    Args:
        run: The folder's content.
        task: What to measure, as `--tasks` takes it.

    Returns:
        `subquad eval RUN --tasks TASK` for a run's folder, which knows its models. Any other folder needs them named:
        those of its records, and the folder itself as `--output`.
    """
    # subquad eval knows a run by its recipe
    if run.recipe is not None:
        return shlex.join(["subquad", "eval", str(run.folder), "--tasks", task])
    checkpoints = {record.model: record.provenance.checkpoint for record in run.records}
    teacher = checkpoints.get("teacher") or checkpoints.get("window_only") or (run.results and run.results.source)
    student = checkpoints.get("student")
    if student is None and run.results is not None:
        student = str(run.folder / "student")
    others = {model: source for model, source in checkpoints.items() if model not in LOSS_LABELS}
    words = ["subquad", "eval"]
    if student is not None:
        # Without one, subquad eval takes that of the run the student lies in, or asks for it.
        words += [student, "--teacher", teacher] if teacher else [student]
    else:
        words.append(teacher or (others.pop(next(iter(others))) if others else _UNKNOWN))
    for model, source in others.items():
        words += ["--against", f"{model}={source}"]
    return shlex.join([*words, "--output", str(run.folder), "--tasks", task])
