"""The settings of fine-tuned GLUE."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from subquad.eval.glue_data import GlueTask

Count = Annotated[int, Field(ge=1)]
Method = Literal["lora", "full"]

DEFAULT_EPOCHS = 3.0
# LoRA starts from a correction of zero and takes far higher rates (Hu et al. 2021, appendix D). SmolLM2-135M after 64
# steps of 16 rows of SST-2: accuracy on 200 rows 0.72 at 5e-4, 0.845 at 1.5e-3.
DEFAULT_LEARNING_RATE: dict[Method, float] = {"lora": 1e-3, "full": 3e-5}


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoraSettings(_Settings):
    """The adapters of `method: lora`.

    Attributes:
        rank: Rank of each adapter.
        alpha: Scale; an adapter's output is multiplied by `alpha / rank`.
        dropout: Dropout on an adapter's input.
        target_modules: Names of the linear layers with adapters.
    """

    rank: Count = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FinetuneSettings(_Settings):
    """How every contestant is fine-tuned on every task.

    Attributes:
        tasks: GLUE's tasks.
        method: `lora` trains adapters and the head, `full` all weights.
        lora: The adapters.
        epochs: Passes over the training rows; 3 where `max_steps` is not given either.
        max_steps: Optimizer steps, in place of `epochs`.
        train_limit: Training rows, drawn anew for every seed; None takes all.
        eval_limit: Validation rows, the first ones, as lm-eval's `limit` takes them; None takes all.
        batch_size: Rows per step.
        eval_batch_size: Rows per forward pass in evaluation; does not change a score beyond rounding.
        learning_rate: Peak of AdamW's rate, falling linearly to 0; None is 1e-3 for `lora`, 3e-5 for `full`.
        warmup_ratio: Share of the steps in which the rate rises.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Longest gradient.
        max_length: Longest row in tokens; the longer text of a pair is cut first.
        separator: Stands before the second text of a pair.
        seeds: One training each, all with other training rows, other order and another start of head and adapters.
        bf16: Autocast to bfloat16; None where the GPU can or the weights are bfloat16.
        gradient_checkpointing: Recompute each block in the backward pass: less memory, more time.
        data_dir: Folder with GLUE's files, see `load_glue`; None loads them from the hub.
    """

    tasks: tuple[GlueTask, ...] = get_args(GlueTask)
    method: Method = "lora"
    lora: LoraSettings = LoraSettings()
    epochs: Annotated[float, Field(gt=0)] | None = None
    max_steps: Count | None = None
    train_limit: Count | None = None
    eval_limit: Annotated[int, Field(ge=2)] | None = None
    batch_size: Count = 16
    eval_batch_size: Count = 32
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.06
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    max_length: Annotated[int, Field(ge=8)] = 256
    separator: str = "\n"
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = (0,)
    bf16: bool | None = None
    gradient_checkpointing: bool = False
    data_dir: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: Any) -> Any:
        """Write the defaults that depend on another setting, so that a record shows what was used."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if values.get("epochs") is None and values.get("max_steps") is None:
            values["epochs"] = DEFAULT_EPOCHS
        if values.get("learning_rate") is None:
            values["learning_rate"] = DEFAULT_LEARNING_RATE.get(values.get("method", "lora"))
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.epochs is not None and self.max_steps is not None:
            problems.append(f"epochs {self.epochs:g} and max_steps {self.max_steps} both say how long; give one")
        for name in ("tasks", "seeds"):
            values = getattr(self, name)
            # Here, not as min_length: pydantic would say so of one wrong name, too, for it counts the right ones.
            if not values:
                problems.append(f"{name} is empty; name at least one")
            if len(set(values)) < len(values):
                problems.append(f"{name} {values} names one twice")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def steps(self, num_rows: int) -> int:
        """Return the optimizer steps of one training.

        Args:
            num_rows: Rows of the training split before `train_limit`.

        Returns:
            At least 1; the last batch of an epoch may be smaller.
        """
        if self.max_steps is not None:
            return self.max_steps
        rows = min(num_rows, self.train_limit or num_rows)
        return max(1, math.ceil(math.ceil(rows / self.batch_size) * (self.epochs or DEFAULT_EPOCHS)))

    def for_record(self) -> dict[str, Any]:
        """Return what decides a task's numbers: everything but the other tasks."""
        return self.model_dump(mode="json", exclude={"tasks"})

    def for_training(self) -> dict[str, Any]:
        """Return what decides one training: everything but the other tasks and seeds."""
        return self.model_dump(mode="json", exclude={"tasks", "seeds"})
