"""The headline of a report: what the losses say, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subquad.eval.loss import compare_losses
from subquad.eval.loss_record import is_loss, unpack_loss
from subquad.eval.records import EvalRecord
from subquad.eval.results import LossName, PairedDifference, Results
from subquad.eval.style import with_error

_NO_CONTROL = "The student's loss is not judged: neither its own start nor the window-only control was measured."
_NO_LOSS = "The student's loss is not judged: it was not measured."
_NO_COMPARABLE_CONTROL = (
    "The student's loss is not judged: that of the window-only control was not measured with the same settings."
)


@dataclass(frozen=True)
class Verdict:
    """What the losses of a run say.

    Attributes:
        headline: One sentence: does the student beat its own start and the window-only control?
        details: The sentences behind it, each with its numbers.
        success: Whether the student beats every control that was measured.
    """

    headline: str
    details: list[str]
    success: bool


def judge(results: Results) -> Verdict:
    """Say whether the distilled student beats its own start and the window-only control.

    A difference below two standard errors (of the paired difference), or without one (a single row), counts as a tie,
    and a tie is not a win.

    Args:
        results: The run's results.

    Returns:
        The verdict.
    """
    rivals: dict[LossName, str] = {"student_start": "its own start", "window_only": "the window-only control"}
    pairs = {name: results.difference("student", name) for name in rivals}
    outcomes = {rivals[name]: _outcome(pair) for name, pair in pairs.items() if pair is not None}
    details = [_sentence(rivals[name], pair) for name, pair in pairs.items() if pair is not None]
    details += [
        f"{label[0].upper()}{label[1:]} was not measured, so nothing is said about it."
        for name, label in rivals.items()
        if pairs[name] is None
    ]
    details += _gap_sentences(results)
    success = bool(outcomes) and all(outcome == "beats" for outcome in outcomes.values())
    return Verdict(_headline(outcomes) or _NO_CONTROL, details, success)


def judge_records(records: Sequence[EvalRecord]) -> Verdict | None:
    """Say whether a student of an evaluation without a run beats the window-only control.

    Args:
        records: Records of all tasks; those of the held-out loss decide (the task `loss`, else the first named text).

    Returns:
        The verdict; None without a student.
    """
    if not any(record.model == "student" for record in records):
        return None
    tasks = {record.task for record in records if is_loss(record)}
    task = min(tasks, key=lambda name: (name != "loss", name), default=None)
    losses = {record.model: record for record in records if record.task == task}
    student = losses.get("student")
    labels: dict[LossName, str] = {"window_only": "the window-only control", "teacher": "the teacher"}
    pairs: dict[LossName, PairedDifference] = {}
    for name in labels:
        other = losses.get(name)
        if student is None or other is None or student.settings != other.settings:
            continue
        pair = compare_losses(unpack_loss(student.details), unpack_loss(other.details))
        pairs[name] = PairedDifference(
            first="student", second=name, difference=pair.difference, standard_error=pair.standard_error
        )
    control = pairs.get("window_only")
    outcomes = {} if control is None else {labels["window_only"]: _outcome(control)}
    details = [_sentence(labels[name], pair) for name, pair in pairs.items()]
    otherwise = _NO_LOSS if student is None else _NO_COMPARABLE_CONTROL
    return Verdict(_headline(outcomes) or otherwise, details, list(outcomes.values()) == ["beats"])


def _outcome(pair: PairedDifference) -> str:
    if not pair.clear or pair.difference == 0:
        return "ties with"
    return "beats" if pair.difference < 0 else "does not beat"


def _headline(outcomes: dict[str, str]) -> str:
    if not outcomes:
        return ""
    if len(set(outcomes.values())) == 1:
        outcome = next(iter(outcomes.values()))
        joint = " or " if outcome == "does not beat" else " and "
        return f"On held-out loss, the distilled student {outcome} {joint.join(outcomes)}."
    clauses = [f"{outcome} {rival}" for rival, outcome in outcomes.items()]
    return f"On held-out loss, the distilled student {', but '.join(clauses)}."


def _sentence(rival: str, pair: PairedDifference) -> str:
    words = {
        "beats": "lower than",
        "does not beat": "higher than",
        "ties with": "not clearly different from",
    }[_outcome(pair)]
    difference = format_nats(pair.difference, pair.standard_error)
    return f"Its loss is {words} that of {rival}: {difference} (paired, same tokens)."


def format_nats(difference: float, standard_error: float | None) -> str:
    """Return a difference of losses as `-0.0281 ± 0.0021 nats per token`."""
    return f"{with_error(difference, standard_error, sign='+')} nats per token"


def _gap_sentences(results: Results) -> list[str]:
    loss = results.loss
    teacher = results.difference("student", "teacher")
    sentences = []
    if teacher is not None:
        sentences.append(_sentence("the teacher", teacher))
    if loss.window_only is not None and loss.gap_closed is None:
        sentences.append(
            "The window-only control is not clearly behind the teacher on this text, so no share of the gap is given."
        )
    if loss.gap_closed is not None and loss.gap_closed >= 0:
        sentences.append(f"It closes {loss.gap_closed:.0%} of the gap between the window-only control and the teacher.")
    elif loss.gap_closed is not None:
        sentences.append(f"It is behind the window-only control by {-loss.gap_closed:.0%} of the gap to the teacher.")
    far = results.difference("student", "student_without_far")
    if far is not None:
        sentences.append(
            f"Switching its far part off changes its loss by {format_nats(-far.difference, far.standard_error)}."
        )
    return sentences
