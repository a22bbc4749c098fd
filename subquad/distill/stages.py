"""The two stages of distillation: attention transfer layer by layer, then the whole model against its teacher."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedModel, set_seed

from subquad.distill.adapters import ADAPTER_MARK, add_lora
from subquad.distill.config import Stage1Config, Stage2Config
from subquad.distill.losses import LossWeights
from subquad.distill.objectives import LogitObjective, TransferObjective
from subquad.distill.rows import TokenRows
from subquad.distill.trainer import GroupRule
from subquad.distill.training import StageJob, StageResult, recomputation, run_job
from subquad.errors import ConfigError
from subquad.layers import require_window

MIXER_MARK = ".self_attn.mixer."
# what a layer computes from its whole input takes small steps: hundreds of weights move it together
_FROM_INPUT = r"\bmixer\.(decay\.|write_gate\.|far_weight\.input_weight$)"


def run_stage1(
    model: PreTrainedModel, dataset: TokenRows, config: Stage1Config, work_dir: Path, log: Path
) -> StageResult:
    """Train the mixers' parameters of every converted layer to reproduce the teacher's attention output.

    A step costs the teacher's forward pass without its head and, one layer at a time, the student's attention forward
    and backward. The work folder is resumed from its newest whole checkpoint; a finished stage is only loaded.

    With FSDP the model is sharded in place and of no use afterwards: build it again and call this function without
    FSDP, which loads the finished stage. The same holds for stage 2.

    Args:
        model: A converted model, trained in place; everything but `.self_attn.mixer.` parameters is frozen.
        dataset: Rows of `build_token_dataset`, or others with the same columns.
        config: Settings.
        work_dir: Folder for this stage's checkpoints and settings.
        log: The run's `log.jsonl`, which the stages share.

    Returns:
        What was done.

    Raises:
        ConfigError: The model has no mixer parameters, or several GPUs are visible to one process.
        DataError: The dataset has fewer rows than a step needs.
        OutputError: The work folder holds a stage with other settings, or cannot be written.
        TrainingError: The loss became NaN, infinite or diverged; the last good checkpoint was kept.
    """
    train_only(model, MIXER_MARK)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has no converted layer with parameters, so stage 1 has nothing to train; skip it")
    return run_job(
        StageJob(
            stage="stage1",
            objective=TransferObjective(model),
            dataset=dataset,
            config=config,
            rules=stage1_rules(config),
            work_dir=work_dir,
            log=log,
        )
    )


def stage1_rules(config: Stage1Config) -> tuple[GroupRule, ...]:
    """Return which rate each of a mixer's parameters has in stage 1."""
    return (
        GroupRule(name="maps", pattern=r"\bmixer\..*_map$", learning_rate=config.map_learning_rate),
        GroupRule(name="decay", pattern=_FROM_INPUT, learning_rate=config.decay_learning_rate),
        GroupRule(name="other", pattern=r"\bmixer\.", learning_rate=config.learning_rate),
    )


def run_stage2(
    model: PreTrainedModel,
    dataset: TokenRows,
    config: Stage2Config,
    work_dir: Path,
    log: Path,
    teacher: PreTrainedModel | None = None,
) -> StageResult:
    """Train the model's output against its teacher's: adapters and mixers, mixers alone, or all weights.

    With adapters the teacher is the model itself, in teacher mode and with adapters off. They stay in the model, so
    that both can be evaluated; `convert.export.merge_adapters` makes them part of the weights. Full tuning changes the
    weights the teacher needs and so takes a separate one; it keeps the trained weights in float32.

    Args:
        model: A converted model, trained in place.
        dataset: Rows of `build_token_dataset`, or others with the same columns.
        config: Settings.
        work_dir: Folder for this stage's checkpoints and settings.
        log: The run's `log.jsonl`, which the stages share.
        teacher: The teacher of full tuning, frozen here; None otherwise.

    Returns:
        What was done.

    Raises:
        ConfigError: A teacher without `full` or the other way round, `far_weight` for a model with a layer that has no
            window, adapters that match no layer, or several GPUs visible to one process.
        DataError: The dataset has fewer rows than a step needs.
        OutputError: The work folder holds a stage with other settings, or cannot be written.
        TrainingError: The loss became NaN, infinite or diverged; the last good checkpoint was kept.
    """
    if config.full != (teacher is not None):
        raise ConfigError(
            "full tuning changes the weights the teacher is made of, so it needs a separate teacher, and adapters do "
            f"not: got full: {str(config.full).lower()} {'without' if teacher is None else 'with'} a teacher"
        )
    if config.far_weight:
        require_window(model, f"far_weight {config.far_weight}")
    set_seed(config.seed)
    if teacher is not None:
        teacher.requires_grad_(False)
        model.float().requires_grad_(True)
    else:
        if config.lora_targets:
            add_lora(model, config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_targets)
        train_only(model, MIXER_MARK, ADAPTER_MARK)
    rules = (
        GroupRule(name="mixer", pattern=re.escape(MIXER_MARK), learning_rate=config.mixer_learning_rate),
        GroupRule(name="base", pattern="", learning_rate=config.learning_rate, weight_decay=config.weight_decay),
    )
    weights = LossWeights(
        kl=config.kl_weight, ce=config.ce_weight, hidden=config.hidden_weight, temperature=config.temperature
    )
    objective = LogitObjective(model, teacher, weights, config.chunk_tokens, config.far_weight)
    with recomputation(model, config.gradient_checkpointing):
        return run_job(
            StageJob(
                stage="stage2",
                objective=objective,
                dataset=dataset,
                config=config,
                rules=rules,
                work_dir=work_dir,
                log=log,
            )
        )


def train_only(model: PreTrainedModel, *marks: str) -> None:
    """Let the parameters whose names hold one of the marks require gradients, and no others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(mark in name for mark in marks))
