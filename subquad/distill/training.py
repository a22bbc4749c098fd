"""Running one stage: its work folder, the Trainer's arguments, resuming, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments
from transformers.training_args import ParallelMode

from subquad.distill.callbacks import DivergenceGuard, LogFile, LogWhenSaving, ProgressBar, read_log
from subquad.distill.checkpoints import checkpoint_step, discard_staged, load_trainable, newest_valid_checkpoint
from subquad.distill.config import COSMETIC, StageConfig
from subquad.distill.objectives import Objective
from subquad.distill.rows import MapRows, TokenRows, first_row, is_counted
from subquad.distill.trainer import DistillTrainer, GroupRule
from subquad.errors import ConfigError, DataError, OutputError

logger = logging.getLogger(__name__)

SETTINGS_NAME = "settings.json"


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage did, runs before an interruption included.

    Attributes:
        stage: `stage1` or `stage2`.
        steps: Optimizer steps.
        tokens: Tokens trained on.
        first_loss: First logged loss.
        last_loss: Last logged loss.
        wall_s: Seconds of training.
        resumed_step: Step this call resumed from; 0 for a fresh start, `steps` if the stage was finished before.
        trainable_parameters: Number of parameters trained.
        checkpoint: The last checkpoint; its `model.safetensors` holds the trained parameters.
    """

    stage: str
    steps: int
    tokens: int
    first_loss: float
    last_loss: float
    wall_s: float
    resumed_step: int
    trainable_parameters: int
    checkpoint: Path


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """One stage, ready to run.

    Attributes:
        stage: Name of the stage.
        objective: What is trained.
        dataset: Packed rows.
        config: Settings.
        rules: Parameter groups.
        work_dir: Folder for checkpoints and settings.
        log: The run's `log.jsonl`.
    """

    stage: str
    objective: Objective
    dataset: TokenRows
    config: StageConfig
    rules: Sequence[GroupRule]
    work_dir: Path
    log: Path


def run_job(job: StageJob) -> StageResult:
    """Train a stage to its end, from its newest whole checkpoint if there is one.

    Args:
        job: The stage.

    Returns:
        What was done.

    Raises:
        ConfigError: Several GPUs are visible to one process, or nothing is trainable.
        DataError: The dataset has fewer rows than a step needs.
        OutputError: The work folder holds a stage with other settings, or cannot be written.
        TrainingError: The loss became NaN, infinite or diverged.
    """
    # once: the first row of a stream is downloaded and tokenised
    first_tokens = first_row(job.dataset)["input_ids"]
    seq_len = len(first_tokens)
    args = _training_arguments(job, seq_len)
    tokens_per_step = _tokens_per_step(args, seq_len)
    checkpoint = newest_valid_checkpoint(job.work_dir)
    resumed_step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    finished = resumed_step >= args.max_steps
    if args.process_index == 0:
        # the trained parameters of a finished stage are the same file whether it was sharded or not
        _claim_work_dir(job, first_tokens, may_differ=(*COSMETIC, "fsdp") if finished else COSMETIC)
    trainable = sum(p.numel() for p in job.objective.parameters() if p.requires_grad)
    if checkpoint is not None and finished:
        load_trainable(job.objective.student, checkpoint)
    else:
        _fit(job, args, tokens_per_step, checkpoint)
    job.objective.student.eval()
    lines = read_log(job.log, job.stage)
    final = newest_valid_checkpoint(job.work_dir)
    assert final is not None, "the Trainer saves at its last step"
    return StageResult(
        stage=job.stage,
        steps=args.max_steps,
        tokens=args.max_steps * tokens_per_step,
        first_loss=lines[0]["loss"] if lines else math.nan,
        last_loss=lines[-1]["loss"] if lines else math.nan,
        wall_s=lines[-1]["wall_s"] if lines else 0.0,
        resumed_step=resumed_step,
        trainable_parameters=trainable,
        checkpoint=final,
    )


def _fit(job: StageJob, args: TrainingArguments, tokens_per_step: int, checkpoint: Path | None) -> None:
    resumed_step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    log = LogFile(job.log, job.stage, tokens_per_step, resumed_step)
    guard = DivergenceGuard(job.work_dir, job.config.divergence_factor, args.warmup_steps, log.lines)
    bar = ProgressBar(log)
    trainer = DistillTrainer(
        job.objective,
        args,
        job.dataset,
        job.rules,
        # the guard first: a loss that stops the run is not written
        [LogWhenSaving(), guard, log, *([bar] if job.config.show_progress else [])],
        job.config.keep_checkpoints,
    )
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
    trainer.accelerator.free_memory()


def _training_arguments(job: StageJob, seq_len: int) -> TrainingArguments:
    config = job.config
    on_gpu = torch.cuda.is_available()
    bf16 = on_gpu and (torch.cuda.is_bf16_supported() if config.bf16 is None else config.bf16)
    args = TrainingArguments(
        output_dir=str(job.work_dir),
        max_steps=1,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        max_grad_norm=config.max_grad_norm,
        optim="adamw_torch",
        save_strategy="steps",
        save_steps=config.save_steps,
        logging_steps=config.logging_steps,
        # the filter would hide NaN from the guard, and waits for the GPU at every step
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=list(config.report_to) or "none",
        seed=config.seed,
        data_seed=config.seed,
        bf16=bf16,
        use_cpu=not on_gpu,
        # processes without GPUs (started by torchrun, which sets RANK) are one run only if the backend is named
        ddp_backend="gloo" if not on_gpu and "RANK" in os.environ else None,
        fsdp=bool(config.fsdp),
        fsdp_config=dict(config.fsdp) if isinstance(config.fsdp, dict) else None,
        dataloader_drop_last=True,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=config.dataloader_num_workers,
    )
    if config.fsdp and (not on_gpu or args.parallel_mode != ParallelMode.DISTRIBUTED):
        raise ConfigError(
            f"fsdp shards over GPUs of several processes, but this one has {'no GPU' if not on_gpu else 'no others'}; "
            "start it with `accelerate launch` or `torchrun`, or set fsdp: false"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs; start one process per GPU with `accelerate launch` or `torchrun`, or "
            "choose one with CUDA_VISIBLE_DEVICES"
        )
    rows_per_batch = args.train_batch_size * args.world_size
    if is_counted(job.dataset) and len(job.dataset) < rows_per_batch:
        raise DataError(
            f"the data has {len(job.dataset)} rows of {seq_len} tokens, but one batch over {args.world_size} processes "
            f"takes {rows_per_batch}. Give more text, a smaller batch_size or a smaller seq_len"
        )
    args.max_steps = math.ceil(config.tokens / _tokens_per_step(args, seq_len))
    args.warmup_steps = round(config.warmup_ratio * args.max_steps)
    return args


def _tokens_per_step(args: TrainingArguments, seq_len: int) -> int:
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size * seq_len


def _claim_work_dir(job: StageJob, first_tokens: Tensor, may_differ: Sequence[str]) -> None:
    """Create the folder, or make sure that what it holds is this stage with these settings."""
    rows = len(job.dataset) if is_counted(job.dataset) else None
    settings: dict[str, Any] = {"stage": job.stage, "seq_len": len(first_tokens), "rows": rows}
    settings["data"] = _fingerprint(job.dataset, first_tokens)
    settings = json.loads(json.dumps(settings | dataclasses.asdict(job.config)))
    path = job.work_dir / SETTINGS_NAME
    try:
        job.work_dir.mkdir(parents=True, exist_ok=True)
        discard_staged(job.work_dir)
        if not path.exists():
            path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
            return
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot use the work folder {job.work_dir}: {error}. Give a folder that can be written"
        ) from error
    changed = [
        f"{key}: {before.get(key)!r} there, {settings.get(key)!r} now"
        for key in sorted(before.keys() | settings.keys())
        if key not in may_differ and before.get(key) != settings.get(key)
    ]
    if changed:
        raise OutputError(
            f"{job.work_dir} holds a run with other settings ({'; '.join(changed)}). "
            "Give another folder, or delete this one to start again"
        )


def _fingerprint(dataset: TokenRows, first_tokens: Tensor) -> str:
    """Hash the tokens that are trained on, of a stream those of its first row."""
    digest = hashlib.sha256()
    for tokens in _token_blocks(dataset) if is_counted(dataset) else [first_tokens]:
        digest.update(np.ascontiguousarray(tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()


def _token_blocks(dataset: MapRows) -> Iterator[Any]:
    """Return all tokens in order: of a data set of `datasets` many rows at a time, of other rows one."""
    if hasattr(dataset, "with_format"):
        yield from (batch["input_ids"] for batch in dataset.with_format("numpy").iter(batch_size=1000))
    else:
        yield from (dataset[index]["input_ids"] for index in range(len(dataset)))


@contextlib.contextmanager
def recomputation(model: PreTrainedModel, enabled: bool) -> Iterator[None]:
    """Recompute each block in the backward pass inside the `with` block, if enabled.

    Not the reentrant kind: that gives no gradient to adapters where a block's input needs none, as here.

    Args:
        model: The model.
        enabled: Whether to do anything.

    Yields:
        Nothing.
    """
    if not enabled:
        yield
        return
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        disable = model.activation_checkpointing_disable
    else:
        # the name before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        disable = model.gradient_checkpointing_disable
    try:
        yield
    finally:
        disable()
