"""How many tokens each stage gets, so that a run ends in time: by what a few steps of it took on the same machine."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.distillation.rows import PackedRows
from subquad.distill import Stage1Config, Stage2Config, run_stage1, run_stage2
from subquad.distill.callbacks import read_log
from subquad.distill.training import StageResult

# steps that are timed, and those before them: kernels are compiled and memory is found in the first ones
TIMED_STEPS = 5
FIRST_STEPS = 3
# share of the time that is given out: a stage also builds its optimizer and writes a checkpoint
USED_SHARE = 0.9

AnyStage = Stage1Config | Stage2Config


@dataclass(frozen=True)
class Speed:
    """What a few steps of a stage took.

    Attributes:
        tokens_per_s: Tokens trained on per second.
        tokens_per_step: Tokens of an optimizer step.
    """

    tokens_per_s: float
    tokens_per_step: int


def train(
    stage: str, model: PreTrainedModel, rows: PackedRows, first: int, config: AnyStage, work_dir: Path, log: Path
) -> StageResult:
    """Run a stage on as many rows as it takes, from a given one on.

    Args:
        stage: `stage1` or `stage2`.
        model: The converted model, trained in place.
        rows: All training rows.
        first: Index of the first row; behind the last row comes the first again.
        config: Settings of the stage.
        work_dir: Folder for its checkpoints.
        log: The log.

    Returns:
        What was done.
    """
    per_batch = config.batch_size * config.gradient_accumulation_steps
    steps = -(-config.tokens // (per_batch * rows.seq_len))
    taken = rows.take(first, steps * per_batch)
    if isinstance(config, Stage1Config):
        return run_stage1(model, taken, config, work_dir / stage, log)
    return run_stage2(model, taken, config, work_dir / stage, log)


def measure_speed(stage: str, model: PreTrainedModel, rows: PackedRows, config: AnyStage) -> Speed:
    """Train a copy of the model for a few steps and time the last of them.

    Args:
        stage: `stage1` or `stage2`.
        model: The converted model, left as it is.
        rows: All training rows.
        config: Settings of the stage.

    Returns:
        The speed.
    """
    per_step = config.batch_size * config.gradient_accumulation_steps * rows.seq_len
    steps = FIRST_STEPS + TIMED_STEPS
    short = dataclasses.replace(
        config, tokens=steps * per_step, logging_steps=1, save_steps=steps, report_to=(), show_progress=False
    )
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        train(stage, copy.deepcopy(model), rows, 0, short, Path(scratch), log)
        times = [line["wall_s"] for line in read_log(log, stage)]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # wall_s is rounded to milliseconds
    seconds = max(times[-1] - times[FIRST_STEPS - 1], 1e-3)
    return Speed(TIMED_STEPS * per_step / seconds, per_step)


def fit_tokens(asked: Mapping[str, int], speeds: Mapping[str, Speed], seconds: float) -> dict[str, int]:
    """Return how many tokens each stage gets.

    Args:
        asked: Stage to the tokens it should have.
        speeds: Stage to its speed.
        seconds: Time for all of them.

    Returns:
        Stage to tokens: those asked for where the time is enough, else all cut by one factor and to whole steps. A
        stage has one step at least, so that a run without time for it still shows that it works.
    """
    needed = sum(tokens / speeds[stage].tokens_per_s for stage, tokens in asked.items())
    share = min(1.0, USED_SHARE * max(seconds, 0.0) / needed) if needed else 1.0
    if share == 1.0:
        return dict(asked)
    return {
        stage: max(1, int(share * tokens) // speeds[stage].tokens_per_step) * speeds[stage].tokens_per_step
        for stage, tokens in asked.items()
    }
