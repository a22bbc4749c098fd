"""What the rounds gave: seconds, tokens per second, and ratios to the teacher with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from subquad.errors import OutputError
from subquad.eval.records import EvalRecord, Metric, list_problems

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
TIMINGS = "timings"
_RESAMPLES = 10_000
_SEED = 0
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Timing(BaseModel):
    """One phase of one model at one length.

    Attributes:
        phase: `prefill` reads the prompt in one forward pass, `decode` writes tokens one by one on the cache.
        length: Tokens of the prompt.
        num_tokens: Tokens read or written per round, over all sequences of the batch.
        seconds: Seconds of each round.
        ratios: The teacher's seconds over these, round by round; empty for the teacher.
    """

    # The record also has what follows from these, see `to_dict`.
    model_config = ConfigDict(frozen=True, extra="ignore")

    phase: Phase
    length: Annotated[int, Field(ge=1)]
    num_tokens: Annotated[int, Field(ge=1)]
    seconds: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    ratios: tuple[Seconds, ...] = ()

    @property
    def metric_name(self) -> str:
        """Name of the ratio among a record's metrics, such as `decode_ratio_2048`."""
        return f"{self.phase}_ratio_{self.length}"

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the median time of a round."""
        return self.num_tokens / median(self.seconds)

    def metric(self) -> Metric:
        """Return the median ratio with its standard error over the rounds; higher is faster, 1 is the teacher."""
        error = median_error(self.ratios)
        return Metric(value=median(self.ratios), standard_error=error, num=len(self.ratios))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, with the tokens per second and the range of the ratios."""
        found = self.model_dump(mode="json") | {"tokens_per_second": self.tokens_per_second}
        if self.ratios:
            found |= {"lowest_ratio": min(self.ratios), "highest_ratio": max(self.ratios)}
        return found


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of a median: the spread of the medians of 10,000 bootstrap resamples.

    The rounds count as independent; a machine that is busy for several rounds on end makes it too small.

    Args:
        values: At least three.

    Returns:
        The standard error, the same in every call.
    """
    draws = np.random.default_rng(_SEED).choice(np.asarray(values, dtype=np.float64), (_RESAMPLES, len(values)))
    return float(np.median(draws, axis=1).std(ddof=1))


def timings_of(record: EvalRecord) -> list[Timing]:
    """Read the timings of a record of `run_speed`.

    Args:
        record: The record.

    Returns:
        The timings, by length and phase.

    Raises:
        OutputError: It has none that can be read.
    """
    try:
        return TypeAdapter(list[Timing]).validate_python(record.details.get(TIMINGS))
    except ValidationError as error:
        raise OutputError(
            f"the record of {record.task} for {record.model} has no readable timings ({list_problems(error)})."
        ) from error
