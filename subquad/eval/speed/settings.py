"""What a measurement of speed is made of: lengths, tokens written, rounds."""

from __future__ import annotations

import itertools
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from subquad.errors import ConfigError

DEFAULT_LENGTHS = (512, 2048)
Count = Annotated[int, Field(ge=1)]


class SpeedSettings(BaseModel):
    """Settings of `run_speed`.

    Attributes:
        lengths: Prompt lengths in tokens, ascending. None: those of 512 and 2,048 that the teacher's context has room
            for together with `new_tokens`, or what fills its context.
        new_tokens: Tokens written after each prompt, one forward pass each.
        repeats: Rounds that count; one more comes before them and does not.
        batch_size: Sequences per forward pass.
        seed: Seed of the tokens, which are random: what they say changes no speed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lengths: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    new_tokens: Count = 32
    repeats: Annotated[int, Field(ge=3)] = 5
    batch_size: Count = 1
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if any(low >= high for low, high in itertools.pairwise(self.lengths or ())):
            raise ValueError(f"lengths must be ascending without repeats, got {list(self.lengths or ())}")
        return self

    def resolved(self, context_length: int) -> SpeedSettings:
        """Fill in the lengths where they are None.

        Args:
            context_length: The teacher's context in tokens.

        Returns:
            Settings with `lengths`.

        Raises:
            ConfigError: `new_tokens` leaves no room for a prompt.
        """
        if self.lengths is not None:
            return self
        room = context_length - self.new_tokens
        if room < 1:
            raise ConfigError(
                f"speed.new_tokens is {self.new_tokens}, which leaves no room for a prompt in the teacher's context of "
                f"{context_length} tokens; lower it"
            )
        lengths = tuple(length for length in DEFAULT_LENGTHS if length <= room) or (room,)
        return self.model_copy(update={"lengths": lengths})

    def fits(self, length: int, context_length: int) -> bool:
        """Return whether a context holds a prompt of this length and the tokens written after it."""
        return length + self.new_tokens <= context_length
