"""What a training run shows and writes, and the rule that stops one that diverges."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from subquad.distill.checkpoints import newest_valid_checkpoint
from subquad.errors import TrainingError

# Rows differ a hundredfold in loss, so single lines and running minima say nothing; medians of this many lines do.
MEDIAN_LINES = 20
# A share of the teacher's output (stage 1) or nats per token (stage 2) below which a rise is not divergence.
HARMLESS_LOSS = 0.1


class LogWhenSaving(TrainerCallback):
    """Log at every step that saves.

    The logged loss is a mean since the last log. A resumed run starts that mean at its checkpoint, so the curves of an
    interrupted and an uninterrupted run are the same only if both log there.
    """

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a log where a checkpoint was asked for."""
        if control.should_save:
            control.should_log = True
        return control


class DivergenceGuard(TrainerCallback):
    """Stops a run whose loss is NaN, infinite or diverging.

    After the warm-up, divergence is a median of the last 20 log lines above `factor` times the median of the stage's
    first 20 lines; that reference counts as at least 0.1. Every line is measured on other text and losses of rows
    differ a hundredfold, so neither one line nor the lowest loss so far is compared with anything.
    """

    def __init__(self, work_dir: Path, factor: float, warmup_steps: int, past: list[dict[str, Any]]) -> None:
        """Set up the rule.

        Args:
            work_dir: Folder with the stage's checkpoints, named in the error.
            factor: See above; above 1.
            warmup_steps: Steps during which the rule does not apply; NaN and infinity always do.
            past: Log lines of this stage from before it was resumed, oldest first.
        """
        self.work_dir = work_dir
        self.factor = factor
        self.warmup_steps = warmup_steps
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=MEDIAN_LINES)
        for line in past:
            self._note(line["loss"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the logged loss and gradient norm.

        Args:
            args: The Trainer's arguments.
            state: The Trainer's state.
            control: The Trainer's control.
            logs: What is being logged.
            **kwargs: The rest of what the Trainer passes.

        Raises:
            TrainingError: The loss or gradient is NaN or infinite, or the loss diverges.
        """
        if not logs or "loss" not in logs:
            return
        loss, grad_norm = logs["loss"], logs.get("grad_norm", 0.0)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._stop(state.global_step, f"loss {loss:g} with gradient norm {grad_norm:g}, which is not finite")
        self._note(loss)
        if state.global_step <= self.warmup_steps or len(self._recent) < MEDIAN_LINES:
            return
        start, now = statistics.median(self._first), statistics.median(self._recent)
        if now > self.factor * max(start, HARMLESS_LOSS):
            self._stop(
                state.global_step,
                f"the median loss of the last {MEDIAN_LINES} log lines, {now:g}, is over {self.factor:g} times that of "
                f"the first {MEDIAN_LINES}, {start:g} (counted as at least {HARMLESS_LOSS:g})",
            )

    def _note(self, loss: float) -> None:
        if len(self._first) < MEDIAN_LINES:
            self._first.append(loss)
        self._recent.append(loss)

    def _stop(self, step: int, what: str) -> None:
        good = newest_valid_checkpoint(self.work_dir)
        kept = "no checkpoint was written before" if good is None else f"the last good checkpoint is kept: {good}"
        raise TrainingError(
            f"training diverged at step {step}: {what}; {kept}. Try learning rates three to ten times lower, a longer "
            "warmup_ratio, a smaller max_grad_norm or a larger divergence_factor; changed settings need a new folder"
        )


class LogFile(TrainerCallback):
    """Appends one JSON object per logged step to `log.jsonl`, which the stages of a run share.

    Keys: `stage`, `step`, `tokens` (trained on so far), `loss` (mean since the line before), `grad_norm`, `lr` (by
    parameter group, of this step), `tokens_per_s` (since the line before), `wall_s` (of the stage, resumed runs
    included). Lines of the stage from after the checkpoint it resumes from are dropped first.
    """

    def __init__(self, path: Path, stage: str, tokens_per_step: int, resumed_step: int) -> None:
        """Open the log.

        Args:
            path: The file; created with its folder.
            stage: Name of the stage in each line.
            tokens_per_step: Tokens of all processes per optimizer step.
            resumed_step: Step of the checkpoint the stage resumes from, 0 for a fresh start.
        """
        self.path = path
        self.stage = stage
        self.tokens_per_step = tokens_per_step
        self.lines = read_log(path, stage, resumed_step)
        self._resumed_step = resumed_step
        self._rates: dict[str, float] = {}
        self._past_wall_s = self.lines[-1]["wall_s"] if self.lines else 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop the lines that training is about to write again and start the clock."""
        self._start = self._last_time = time.monotonic()
        self._last_step = state.global_step
        if state.is_world_process_zero:
            _drop_lines(self.path, self.stage, self._resumed_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the rates of this step: when it is logged, the scheduler has moved on."""
        self._rates = {group["name"]: float(group["lr"]) for group in kwargs["optimizer"].param_groups}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append a line.

        Args:
            args: The Trainer's arguments.
            state: The Trainer's state.
            control: The Trainer's control.
            logs: What is being logged.
            **kwargs: The rest of what the Trainer passes.
        """
        if not logs or "loss" not in logs:
            return
        now = time.monotonic()
        steps = state.global_step - self._last_step
        line = {
            "stage": self.stage,
            "step": state.global_step,
            "tokens": state.global_step * self.tokens_per_step,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "lr": self._rates,
            "tokens_per_s": round(steps * self.tokens_per_step / max(now - self._last_time, 1e-9), 2),
            "wall_s": round(self._past_wall_s + now - self._start, 3),
        }
        self._last_time, self._last_step = now, state.global_step
        self.lines.append(line)
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class ProgressBar(TrainerCallback):
    """Shows step, loss, tokens per second and time left; nothing where the output is not a terminal."""

    def __init__(self, log: LogFile) -> None:
        """Set up the bar.

        Args:
            log: The log whose figures are shown; it must come before this callback.
        """
        self._log = log
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeftColumn(),
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        if state.is_world_process_zero:
            self._progress.start()
            self._task = self._progress.add_task(
                self._log.stage, total=state.max_steps, completed=state.global_step, figures=""
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the newest figures."""
        if self._task is not None and self._log.lines:
            line = self._log.lines[-1]
            self._progress.update(self._task, figures=f"loss {line['loss']:.4f} · {line['tokens_per_s']:,.0f} tokens/s")

    def close(self) -> None:
        """Leave the terminal as it was, however training ended."""
        self._progress.stop()


def read_log(path: Path, stage: str, last_step: int | None = None) -> list[dict[str, Any]]:
    """Return the log lines of one stage, oldest first.

    Args:
        path: A `log.jsonl`; need not exist.
        stage: Name of the stage.
        last_step: Lines of later steps are left out; None keeps all.

    Returns:
        The parsed lines. A last line cut short by a kill is left out.
    """
    return [
        line
        for line in (_parse(text) for text in _texts(path))
        if line is not None and line.get("stage") == stage and (last_step is None or line["step"] <= last_step)
    ]


def _drop_lines(path: Path, stage: str, last_step: int) -> None:
    """Rewrite the log without the stage's lines after a step, and without a line cut short by a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for text in _texts(path):
        line = _parse(text)
        if line is not None and (line.get("stage") != stage or line["step"] <= last_step):
            kept.append(text + "\n")
    new = path.with_name(path.name + ".new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)


def _texts(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _parse(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
