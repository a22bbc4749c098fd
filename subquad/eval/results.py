"""The typed content of `results.json`: what a run measured and what is needed to measure it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from subquad.errors import ConfigError
from subquad.eval.loss import LossResult, compare_losses, compare_losses_by_position

LossName = Literal["teacher", "window_only", "student_start", "student", "student_without_far"]
LOSS_LABELS: dict[LossName, str] = {
    "teacher": "Teacher (softmax)",
    "window_only": "Window-only control",
    "student_start": "Student at its start",
    "student": "Student, distilled",
    "student_without_far": "Student, far part off",
}
_COMPARED: tuple[tuple[LossName, LossName], ...] = (
    ("student", "student_start"),
    ("student", "window_only"),
    ("student", "student_without_far"),
    ("student", "teacher"),
    ("student_start", "window_only"),
    ("window_only", "teacher"),
)
# standard errors of the paired difference from which on a difference is said to be one
CLEAR_ERRORS = 2.0

Loss = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LossTable(_Frozen):
    """Held-out loss in nats per token; every model saw the same tokens.

    Attributes:
        teacher: The original softmax model.
        student: The converted model after distillation.
        student_start: The converted model before distillation.
        window_only: The control: the teacher's weights with the student's window, sinks and softmax heads alone.
        student_without_far: The distilled student with its far part off: what its exact part, window, sinks, kept keys
            and softmax heads, does with its weights.
        standard_error: Standard error of each loss over rows.
        num_tokens: Predicted tokens.
        num_rows: Rows they came in.
        gap_closed: `(window_only - student) / (window_only - teacher)`; None without a control, or where the gap is
            below two standard errors.
    """

    teacher: Loss
    student: Loss
    student_start: Loss | None = None
    window_only: Loss | None = None
    student_without_far: Loss | None = None
    standard_error: dict[LossName, Loss] = {}
    num_tokens: Annotated[int, Field(ge=1)]
    num_rows: Annotated[int, Field(ge=1)]
    gap_closed: Loss | None = None

    def measured(self) -> dict[LossName, float]:
        """Return the losses that were measured, by name, teacher first."""
        values = {name: getattr(self, name) for name in LOSS_LABELS}
        return {name: value for name, value in values.items() if value is not None}


class PairedDifference(_Frozen):
    """`loss[first] - loss[second]` on the same tokens; negative where the first is better.

    Attributes:
        first: Name of the first loss.
        second: Name of the second loss.
        difference: Nats per token.
        standard_error: Standard error over rows; None with fewer than two rows.
    """

    first: LossName
    second: LossName
    difference: Loss
    standard_error: Loss | None

    @property
    def clear(self) -> bool:
        """Whether the difference is at least two standard errors."""
        return is_clear(self.difference, self.standard_error)


class PositionLoss(_Frozen):
    """Loss of the tokens at `start <= position < end` in their document.

    Attributes:
        start: First position.
        end: One past the last position; None for no bound.
        num_tokens: Predicted tokens.
        loss: Nats per token, by model.
        error_to_teacher: Standard error of (model - teacher) on these tokens, by model; empty where there is none.
    """

    start: int
    end: int | None
    num_tokens: int
    loss: dict[LossName, Loss]
    error_to_teacher: dict[LossName, Loss] = {}


class CacheTable(_Frozen):
    """Bytes of the generation cache after a number of tokens.

    Attributes:
        student: Tokens to bytes, for the converted model.
        kv: Tokens to bytes, for the teacher's key/value cache.
        measured_lengths: The lengths at which both were read from a real cache; at the others they are computed.
        crossover_length: Shortest length at which the student's cache is the smaller one; None if there is none.
        batch_size: Sequences held.
        dtype: Data type of keys and values (states are float32 whatever it is).
    """

    student: dict[int, int]
    kv: dict[int, int]
    measured_lengths: list[int]
    crossover_length: int | None
    batch_size: int = 1
    dtype: str


class TokenCounts(_Frozen):
    """Training tokens seen by each stage.

    Attributes:
        stage1: Tokens of layer-local output matching.
        stage2: Tokens of end-to-end distillation.
        calibration: Tokens of the calibration before training.
    """

    stage1: int
    stage2: int
    calibration: int = 0


class Sample(_Frozen):
    """A greedy continuation.

    Attributes:
        model: Which model wrote it.
        prompt: The text given.
        text: The text written, without the prompt.
    """

    model: LossName
    prompt: str
    text: str


class Results(_Frozen):
    """Everything a run measured; `report.md`, `report.html` and the plots are made from this and `log.jsonl`.

    Attributes:
        schema_version: Version of this layout.
        name: Name of the run.
        source: The checkpoint that was converted.
        mixers: Number of layers of each mixer.
        data: What the held-out text is.
        loss: Held-out losses.
        differences: Paired differences of the losses.
        by_position: Losses by position in the document.
        cache_bytes: Memory over length; None where it was not measured.
        tokens: Training tokens per stage.
        wall_seconds: Wall time per step of the run.
        samples: Greedy continuations.
        versions: Python and package versions.
        commit: Git commit of subquad, `-dirty` appended with local changes; None outside a checkout.
        device: Where the run took place.
        dtype: Data type of the weights.
        seed: Seed of data order and initialisation.
        command: Command that repeats the run.
        created: UTC time, ISO 8601.
        notes: Anything a reader must know to judge the figures.
    """

    schema_version: Literal[1] = 1
    name: str
    source: str
    mixers: dict[str, int]
    data: str
    loss: LossTable
    differences: list[PairedDifference] = []
    by_position: list[PositionLoss] = []
    cache_bytes: CacheTable | None = None
    tokens: TokenCounts
    wall_seconds: dict[str, float] = {}
    samples: list[Sample] = []
    versions: dict[str, str]
    commit: str | None
    device: str
    dtype: str
    seed: int
    command: str
    created: str
    notes: list[str] = []

    def difference(self, first: LossName, second: LossName) -> PairedDifference | None:
        """Return the paired difference `first - second`, or None where it was not measured."""
        found = (item for item in self.differences if (item.first, item.second) == (first, second))
        return next(found, None)


def summarise_losses(
    losses: Mapping[LossName, LossResult],
) -> tuple[LossTable, list[PairedDifference], list[PositionLoss]]:
    """Turn the evaluations of one run into the loss part of `Results`.

    Args:
        losses: Evaluations by name, all on the same rows; at least `teacher` and `student`.

    Returns:
        The table of losses, the paired differences and the losses by position.

    Raises:
        ConfigError: `teacher` or `student` is missing, or two evaluations are not on the same tokens.
    """
    missing = [name for name in ("teacher", "student") if name not in losses]
    if missing:
        raise ConfigError(f"losses of {', '.join(missing)} are missing (got: {', '.join(losses) or 'none'})")
    student = losses["student"]
    for result in losses.values():
        compare_losses(result, student)
    values = {name: result.loss for name, result in losses.items()}
    errors = {name: result.standard_error for name, result in losses.items()}
    table = LossTable(
        **values,
        standard_error={name: error for name, error in errors.items() if error is not None},
        num_tokens=student.num_tokens,
        num_rows=student.num_rows,
        gap_closed=_clear_gap_closed(losses),
    )
    differences = []
    for first, second in _COMPARED:
        if first in losses and second in losses:
            paired = compare_losses(losses[first], losses[second])
            item = PairedDifference(
                first=first, second=second, difference=paired.difference, standard_error=paired.standard_error
            )
            differences.append(item)
    return table, differences, _by_position(losses)


def _clear_gap_closed(losses: Mapping[LossName, LossResult]) -> float | None:
    """Return the share of the gap that is closed, or None where the gap itself may be chance."""
    control = losses.get("window_only")
    if control is None:
        return None
    gap = compare_losses(control, losses["teacher"])
    if not is_clear(gap.difference, gap.standard_error):
        return None
    return gap_closed(losses["teacher"].loss, losses["student"].loss, control.loss)


def is_clear(difference: float, standard_error: float | None) -> bool:
    """Return whether a paired difference is at least two standard errors; 0, or one without an error, never is."""
    return difference != 0 and standard_error is not None and abs(difference) >= CLEAR_ERRORS * standard_error


def gap_closed(teacher: float, student: float, window_only: float | None) -> float | None:
    """Return the share of the gap between the window-only control and the teacher that the student closes.

    Args:
        teacher: Teacher's loss.
        student: Student's loss.
        window_only: Control's loss, None where there is no control.

    Returns:
        `(window_only - student) / (window_only - teacher)`: 1 at the teacher, 0 at the control, negative below the
        control; None without a control or where the control is no worse than the teacher.
    """
    if window_only is None or window_only <= teacher:
        return None
    return (window_only - student) / (window_only - teacher)


def _by_position(losses: Mapping[LossName, LossResult]) -> list[PositionLoss]:
    columns = {name: result.by_position for name, result in losses.items()}
    pairs = {
        name: compare_losses_by_position(result, losses["teacher"])
        for name, result in losses.items()
        if name != "teacher"
    }
    rows = []
    for index, bucket in enumerate(columns["student"]):
        errors = {name: pair[index].standard_error for name, pair in pairs.items()}
        row = PositionLoss(
            start=bucket.start,
            end=bucket.end,
            num_tokens=bucket.num_tokens,
            loss={name: column[index].loss for name, column in columns.items()},
            error_to_teacher={name: error for name, error in errors.items() if error is not None},
        )
        rows.append(row)
    return rows
