"""The cells of a grid, what they say by length and by depth, and how two models differ on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from subquad.errors import OutputError
from subquad.eval.niah.stats import mean_and_error, wilson_interval
from subquad.eval.records import EvalRecord, list_problems

Axis = Literal["length", "depth"]
CellScore = Literal["accuracy", "key_rank1", "key_logprob"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# One character per prompt, in order: 1 where it was solved.
Flags = Annotated[str, Field(pattern="^[01]+$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cell(_Frozen):
    """What was measured on the prompts of one length and depth; a score that was not asked for is None.

    Attributes:
        length: Tokens of the prompts.
        depth: Where the first needle stands, 0 to 1.
        distance: Mean number of tokens between the last statement of a value and the answer.
        exact: For each prompt, whether the generated answer names exactly the values.
        rank1: For each prompt, whether every token of the key is the most likely one, given the true ones before it.
        log_probs: For each prompt, the log probability of all tokens of the key, nats.
        reciprocal_rank: Mean of 1 / rank over the key's tokens, then over the prompts.
    """

    length: Annotated[int, Field(ge=1)]
    depth: Annotated[float, Field(ge=0, le=1)]
    distance: Finite
    exact: Flags | None = None
    rank1: Flags | None = None
    log_probs: tuple[Finite, ...] | None = None
    reciprocal_rank: Finite | None = None

    def samples(self, score: CellScore) -> list[float] | None:
        """Return one number per prompt, or None where the score was not measured."""
        if score == "key_logprob":
            return None if self.log_probs is None else list(self.log_probs)
        flags = self.exact if score == "accuracy" else self.rank1
        return None if flags is None else [float(flag) for flag in flags]


class Share(_Frozen):
    """A share of prompts with its 95 % Wilson interval.

    Attributes:
        value: The share.
        low: Lower end.
        high: Upper end.
        num: Prompts.
    """

    value: Finite
    low: Finite
    high: Finite
    num: int


class Mean(_Frozen):
    """A mean over prompts.

    Attributes:
        value: The mean.
        standard_error: Its standard error; None for a single prompt.
        num: Prompts.
    """

    value: Finite
    standard_error: Finite | None
    num: int


class Group(_Frozen):
    """All cells of one length, or of one depth; a score that was not measured is None.

    Attributes:
        at: The length or the depth.
        accuracy: Prompts answered exactly.
        key_rank1: Prompts whose key is the most likely continuation, token by token.
        key_logprob: Log probability of the key, nats.
    """

    at: Finite
    accuracy: Share | None
    key_rank1: Share | None
    key_logprob: Mean | None


def cells_of(record: EvalRecord) -> list[Cell]:
    """Read the cells of a record of `run_niah`.

    Args:
        record: The record.

    Returns:
        Its cells by length, then depth; cells that were not measured are not there.

    Raises:
        OutputError: It is the record of another task, or damaged.
    """
    try:
        return TypeAdapter(list[Cell]).validate_python(record.details["cells"])
    except (KeyError, ValidationError) as error:
        problems = list_problems(error) if isinstance(error, ValidationError) else "details.cells is missing"
        raise OutputError(
            f"the record of {record.task} for {record.model} has no readable cells of a needle grid ({problems})."
        ) from error


def measured_lengths(record: EvalRecord) -> list[int]:
    """Return the lengths of the grid that a record was measured on, ascending; its totals are over them.

    Args:
        record: The record.

    Returns:
        Lengths in tokens; fewer than those of the settings where a model's context is too short.

    Raises:
        OutputError: It is the record of another task, or damaged.
    """
    return sorted({cell.length for cell in cells_of(record)})


def group_cells(cells: Sequence[Cell], axis: Axis) -> list[Group]:
    """Pool cells along one axis of the grid.

    Args:
        cells: The cells.
        axis: What the groups have in common.

    Returns:
        Groups, ascending.
    """
    groups = []
    for at in sorted({getattr(cell, axis) for cell in cells}):
        members = [cell for cell in cells if getattr(cell, axis) == at]
        accuracy, rank1 = (_share(pooled(members, score)) for score in ("accuracy", "key_rank1"))
        groups.append(
            Group(at=at, accuracy=accuracy, key_rank1=rank1, key_logprob=_mean(pooled(members, "key_logprob")))
        )
    return groups


def pooled(cells: Sequence[Cell], score: CellScore) -> list[float]:
    """Return a score's numbers of all prompts of several cells; none where it was not measured."""
    return [number for cell in cells for number in cell.samples(score) or ()]


def paired_differences(first: Sequence[Cell], second: Sequence[Cell], score: CellScore) -> dict[int, Mean]:
    """Compare two models prompt by prompt.

    Args:
        first: Cells of one model.
        second: Cells of the other, measured on the same prompts.
        score: What to compare.

    Returns:
        For each length that both have in common, the mean of (first - second) over prompts; its standard error is that
        of the paired difference.
    """
    others = {(cell.length, cell.depth): cell.samples(score) for cell in second}
    differences: dict[int, list[float]] = {}
    for cell in first:
        mine, theirs = cell.samples(score), others.get((cell.length, cell.depth))
        if mine is not None and theirs is not None:
            differences.setdefault(cell.length, []).extend(a - b for a, b in zip(mine, theirs, strict=True))
    means = {length: _mean(values) for length, values in sorted(differences.items())}
    return {length: mean for length, mean in means.items() if mean is not None}


def _share(flags: Sequence[float]) -> Share | None:
    if not flags:
        return None
    low, high = wilson_interval(round(sum(flags)), len(flags))
    return Share(value=sum(flags) / len(flags), low=low, high=high, num=len(flags))


def _mean(values: Sequence[float]) -> Mean | None:
    if not values:
        return None
    mean, error = mean_and_error(values)
    return Mean(value=mean, standard_error=error, num=len(values))
