"""Training a model from random weights, on the machinery of distillation: checkpoints, resuming, guard, log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, IterableDataset

from subquad.distill import LossWeights, StageResult
from subquad.distill.config import StageConfig
from subquad.distill.objectives import LogitObjective
from subquad.distill.stages import MIXER_MARK
from subquad.distill.trainer import GroupRule
from subquad.distill.training import StageJob, recomputation, run_job
from subquad.models import SubquadLlamaForCausalLM
from subquad.pretrain.schema import PretrainRecipe

STAGE = "pretrain"


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(StageConfig):
    """Next-token prediction with every weight trained.

    Attributes:
        weight_decay: Of the weight matrices; norms, biases and mixer parameters have none.
        chunk_tokens: Tokens whose logits exist at one time.
        gradient_checkpointing: Recompute each block in the backward pass instead of keeping its activations.
    """

    weight_decay: float = 0.1
    chunk_tokens: int = 1024
    gradient_checkpointing: bool = False

    def problems(self) -> list[str]:
        """Return what is wrong with the fields, one message each."""
        problems = super().problems()
        if self.weight_decay < 0:
            problems.append(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.chunk_tokens < 1:
            problems.append(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        return problems


def pretrain_config(recipe: PretrainRecipe) -> PretrainConfig:
    """Return the settings of training that a recipe describes."""
    return PretrainConfig(**recipe.training.model_dump(), **recipe.trainer.model_dump(), seed=recipe.seed)


def pretrain_model(
    model: SubquadLlamaForCausalLM,
    dataset: Dataset | IterableDataset,
    config: PretrainConfig,
    work_dir: Path,
    log: Path,
) -> StageResult:
    """Train all weights on next-token prediction, in place; resumed from its newest whole checkpoint.

    With FSDP the model is sharded and of no use afterwards: build it again and call this without FSDP, which loads the
    finished training.

    Args:
        model: The model, in float32.
        dataset: Rows `input_ids`, `position_ids`, `labels` (not shifted, -100 is not predicted).
        config: Settings.
        work_dir: Folder for checkpoints and settings.
        log: The run's `log.jsonl`.

    Returns:
        What was done.

    Raises:
        ConfigError: Several GPUs are visible to one process.
        DataError: The dataset has fewer rows than a step needs.
        OutputError: The work folder holds a training with other settings, or cannot be written.
        TrainingError: The loss became NaN, infinite or diverged; the last good checkpoint was kept.
    """
    rules = (
        GroupRule(name="mixer", pattern=re.escape(MIXER_MARK), learning_rate=config.learning_rate),
        GroupRule(name="norms", pattern=r"norm\.weight$|\.bias$", learning_rate=config.learning_rate),
        GroupRule(name="weights", pattern="", learning_rate=config.learning_rate, weight_decay=config.weight_decay),
    )
    objective = LogitObjective(model, None, LossWeights(kl=0.0, ce=1.0), config.chunk_tokens)
    with recomputation(model, config.gradient_checkpointing):
        return run_job(
            StageJob(
                stage=STAGE,
                objective=objective,
                dataset=dataset,
                config=config,
                rules=rules,
                work_dir=work_dir,
                log=log,
            )
        )
