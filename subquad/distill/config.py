"""Settings of the two training stages."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from subquad.errors import ConfigError

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
COUNTS = ("tokens", "batch_size", "gradient_accumulation_steps", "save_steps", "keep_checkpoints", "logging_steps")
# settings that change what a run shows or keeps, but not what it computes: they may change when it is resumed
COSMETIC = ("keep_checkpoints", "report_to", "show_progress", "dataloader_num_workers")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """What both stages have.

    Attributes:
        tokens: Tokens to train on, rounded up to whole optimizer steps; more than the data has means several passes.
        batch_size: Rows per step and process.
        gradient_accumulation_steps: Batches per optimizer step.
        learning_rate: Peak learning rate of the parameters without a rate of their own.
        warmup_ratio: Share of the steps over which the rates rise linearly.
        lr_scheduler_type: Shape of the rates after that, by its name in transformers.
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them alone.
        divergence_factor: See `DivergenceGuard`.
        save_steps: Steps between checkpoints; one is always written at the end.
        keep_checkpoints: How many of the newest checkpoints stay.
        logging_steps: Steps between lines of the log; steps that save are logged too.
        seed: Order of the rows, start of the adapters, dropout.
        bf16: bfloat16 autocast on a GPU; None turns it on where the GPU has it. A CPU always computes in float32.
        fsdp: Shard the model over the processes (FSDP2); a mapping is passed on as the Trainer's `fsdp_config`.
        dataloader_num_workers: Processes that prepare batches.
        report_to: Trackers of the Trainer beside the log file, such as `tensorboard`.
        show_progress: Whether a terminal shows a progress bar.
    """

    tokens: int
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    learning_rate: float
    warmup_ratio: float = 0.1
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup"] = "cosine"
    max_grad_norm: float = 1.0
    divergence_factor: float = 4.0
    save_steps: int = 100
    keep_checkpoints: int = 2
    logging_steps: int = 1
    seed: int = 0
    bf16: bool | None = None
    fsdp: bool | dict[str, Any] = False
    dataloader_num_workers: int = 0
    report_to: tuple[str, ...] = ()
    show_progress: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: Lists every field that is out of range.
        """
        problems = self.problems()
        if problems:
            raise ConfigError(f"{type(self).__name__} is not valid:\n  " + "\n  ".join(problems))

    def problems(self) -> list[str]:
        """Return what is wrong with the fields, one message each."""
        small = {name: value for name in COUNTS if (value := getattr(self, name)) < 1}
        problems = [f"{name} must be at least 1, got {value}" for name, value in small.items()]
        for field in dataclasses.fields(self):
            if field.name.endswith("learning_rate") and not getattr(self, field.name) > 0:
                problems.append(f"{field.name} must be above 0, got {getattr(self, field.name)}")
        if not 0 <= self.warmup_ratio < 1:
            problems.append(f"warmup_ratio must be in [0, 1), got {self.warmup_ratio}")
        if self.max_grad_norm < 0:
            problems.append(f"max_grad_norm must be at least 0, got {self.max_grad_norm}")
        if not self.divergence_factor > 1:
            problems.append(f"divergence_factor must be above 1, got {self.divergence_factor}")
        return problems


@dataclass(frozen=True, kw_only=True)
class Stage1Config(StageConfig):
    """Stage 1, attention transfer: only the mixers' parameters are trained, each layer on its own.

    Attributes:
        learning_rate: Peak rate of the mixers' scales: offset, temperature, mixing weight, convolution, norms.
        map_learning_rate: Peak rate of the q and k maps.
        decay_learning_rate: Peak rate of the decay.
    """

    learning_rate: float = 3e-2
    map_learning_rate: float = 3e-3
    decay_learning_rate: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Stage2Config(StageConfig):
    """Stage 2, distillation: LoRA on the projections (or all weights) together with the mixers' parameters.

    Attributes:
        learning_rate: Peak rate of the adapters, or of the base weights in full tuning (1e-5 suits those).
        mixer_learning_rate: Peak rate of the mixers' parameters.
        weight_decay: Of adapters and base weights; the mixers' parameters have none.
        full: Train all weights against a separate teacher instead of adapters.
        lora_rank: Rank of the adapters.
        lora_alpha: Their scale, times 1 / rank.
        lora_dropout: Dropout on their input.
        lora_targets: Names of the linear layers that get one; none trains the mixers alone.
        kl_weight: Weight of the divergence to the teacher.
        ce_weight: Weight of the cross-entropy with the text.
        hidden_weight: Weight of the squared distance of the last hidden states, as a share of the teacher's square.
        temperature: Temperature of the divergence.
        far_weight: How much more a token counts per nat that the teacher gains from beyond window and sinks (its log
            probability against that of its window-only self, at most 5 nats).
        chunk_tokens: Tokens whose logits exist at one time.
        gradient_checkpointing: Recompute each block in the backward pass instead of keeping its activations.
    """

    learning_rate: float = 1e-4
    mixer_learning_rate: float = 1e-4
    weight_decay: float = 0.0
    full: bool = False
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = LORA_TARGETS
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    hidden_weight: float = 0.0
    temperature: float = 1.0
    far_weight: float = 0.0
    chunk_tokens: int = 512
    gradient_checkpointing: bool = False

    def problems(self) -> list[str]:
        """Return what is wrong with the fields, one message each."""
        problems = super().problems()
        weights = (self.kl_weight, self.ce_weight, self.hidden_weight)
        if min(weights) < 0 or not sum(weights) > 0:
            problems.append(
                f"kl_weight, ce_weight and hidden_weight must be at least 0 and one of them above, got {weights}"
            )
        if not self.temperature > 0:
            problems.append(f"temperature must be above 0, got {self.temperature}")
        if not 0 <= self.far_weight < math.inf:
            problems.append(f"far_weight must be at least 0, got {self.far_weight}")
        if self.far_weight and self.full:
            problems.append(
                f"far_weight {self.far_weight} compares the teacher with its window-only self, which full: true trains "
                "away; use adapters, or far_weight: 0"
            )
        if self.chunk_tokens < 1:
            problems.append(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not self.full and self.lora_rank < 1:
            problems.append(f"lora_rank must be at least 1, got {self.lora_rank}")
        if not 0 <= self.lora_dropout < 1:
            problems.append(f"lora_dropout must be in [0, 1), got {self.lora_dropout}")
        if self.weight_decay < 0:
            problems.append(f"weight_decay must be at least 0, got {self.weight_decay}")
        return problems
