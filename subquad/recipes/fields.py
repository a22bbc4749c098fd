"""The kinds of values that the keys of a recipe take."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def whole_number(value: object) -> object:
    """Return `1e6` and `5e5` as whole numbers, since YAML 1.1 hands them over as text; anything else as it is."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        if number.is_integer():
            return int(number)
    return value


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in itertools.pairwise(values)):
        raise ValueError(f"must be ascending without repeats, got {list(values)}")
    return values


Count = Annotated[int, BeforeValidator(whole_number), Field(ge=1)]
Ascending = Annotated[tuple[Count, ...], AfterValidator(_ascending)]
RowLength = Annotated[int, BeforeValidator(whole_number), Field(ge=8)]
CountOrZero = Annotated[int, BeforeValidator(whole_number), Field(ge=0)]
Indices = Annotated[tuple[CountOrZero, ...], Field(min_length=1), AfterValidator(_ascending)]
LearningRate = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSection(Section):
    """Base of what has a folder of its own.

    Attributes:
        name: letters, digits, dot, dash and underscore.
        output_dir: the folder; None is `runs/<name>`.
    """

    name: RunName
    output_dir: str | None = None

    @property
    def run_dir(self) -> Path:
        """The folder."""
        return Path(self.output_dir) if self.output_dir is not None else Path("runs") / self.name
