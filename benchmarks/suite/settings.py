"""How large the cases of a run are, on what they run and how long each section may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["full", "quick", "toy"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# The whole run ends before 8 minutes (quick: 2 to 3) whatever the GPU: at this age everything still running is stopped.
HARD_LIMIT_S: Mapping[Mode, float] = {"full": 470.0, "quick": 160.0, "toy": 600.0}
# Between them the sections' budgets stay below the hard limit; a section that is done early leaves its rest unused.
BUDGETS_S: Mapping[Mode, Mapping[str, float]] = {
    "full": {"correctness": 140.0, "models": 60.0, "timings": 175.0, "end_to_end": 85.0},
    "quick": {"correctness": 45.0, "models": 30.0, "timings": 50.0, "end_to_end": 25.0},
    "toy": {"correctness": 200.0, "models": 100.0, "timings": 100.0, "end_to_end": 100.0},
}


@dataclass(frozen=True)
class Settings:
    """What a worker needs to build the cases of a run.

    Attributes:
        mode: `full` and `quick` run on a GPU; `toy` runs every case at a tiny size on the CPU, in PyTorch.
        seed: Seed of all random inputs.
    """

    mode: Mode
    seed: int = 0

    @property
    def toy(self) -> bool:
        """Whether sizes are tiny and the CPU does the work."""
        return self.mode == "toy"

    @property
    def device(self) -> torch.device:
        """Where the cases run."""
        return torch.device("cpu" if self.toy else "cuda")

    @property
    def backend(self) -> Literal["torch", "triton"]:
        """The implementation of the op that is checked and timed."""
        return "torch" if self.toy else "triton"

    @property
    def measure_ms(self) -> float:
        """Time to spend on the repetitions of one contender."""
        return {"full": 400.0, "quick": 150.0, "toy": 2.0}[self.mode]
