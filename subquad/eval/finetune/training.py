"""One training of one contestant on one task with one seed, and the file that keeps what came of it."""

from __future__ import annotations

import copy
import gc
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.training_args import ParallelMode

from subquad.convert.atomic import atomic_file
from subquad.errors import ConfigError, TrainingError
from subquad.eval.contestants import Contestant
from subquad.eval.finetune.classifier import build_classifier, contestant_mode
from subquad.eval.finetune.scores import to_digits
from subquad.eval.finetune.settings import FinetuneSettings
from subquad.eval.glue_data import GLUE_TASKS, GlueSplit, GlueTask
from subquad.eval.records import hash_prompts

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

CURVE_POINTS = 25


@dataclass(frozen=True)
class Encoded:
    """Rows as tokens.

    Attributes:
        rows: `input_ids`, `labels` and, where the model tells texts apart, `token_type_ids`, in the order of the split.
        num_cut: Rows that were longer than `max_length`.
    """

    rows: Dataset
    num_cut: int

    @property
    def hash(self) -> str:
        """SHA-256 of the token ids in order."""
        return hash_prompts(self.rows["input_ids"])


class SeedResult(BaseModel):
    """What one training came to.

    Attributes:
        key: Everything that decides it; a file with another key is not used.
        seed: Its seed.
        predictions: Predicted class of every validation row by split, one digit each.
        curve: Steps and the mean training loss since the point before, in nats.
        steps: Optimizer steps.
        train_rows: Training rows it drew from.
        train_rows_cut: Of these, rows longer than `max_length`.
        train_hash: SHA-256 of the token ids of the training rows in the order of drawing.
        trained_parameters: Parameters that received a gradient.
        train_seconds: Time of training.
        eval_seconds: Time of evaluation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: dict[str, Any]
    seed: int
    predictions: dict[GlueSplit, str]
    curve: list[tuple[int, float]]
    steps: int
    train_rows: int
    train_rows_cut: int
    train_hash: str
    trained_parameters: int
    train_seconds: float
    eval_seconds: float


@dataclass(frozen=True, kw_only=True)
class SeedJob:
    """One training, ready to run.

    Attributes:
        contestant: The model.
        tokenizer: Its tokenizer as `padding_tokenizer` returns it.
        settings: The settings.
        task: The task.
        seed: The seed.
        train: The training split, all of it.
        evals: The encoded validation splits.
        path: File of the result.
    """

    contestant: Contestant
    tokenizer: PreTrainedTokenizerBase
    settings: FinetuneSettings
    task: GlueTask
    seed: int
    train: Dataset
    evals: Mapping[GlueSplit, Encoded]
    path: Path

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.settings.steps(len(self.train))

    @property
    def key(self) -> dict[str, Any]:
        """Everything that decides the result."""
        return {
            "settings": self.settings.for_training(),
            "weights": self.contestant.weights,
            "mode": self.contestant.mode,
            "validation": {split: encoded.hash for split, encoded in self.evals.items()},
            "train_rows": len(self.train),
        }

    def __str__(self) -> str:
        """Name task, model and seed, for messages."""
        return f"fine-tuning {self.contestant.name} on {self.task} with seed {self.seed}"


def padding_tokenizer(
    tokenizer: PreTrainedTokenizerBase, pad_token_id: int, *, segments: bool = False
) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that pads on the right with a given token.

    Args:
        tokenizer: The tokenizer.
        pad_token_id: The token.
        segments: Whether it is to say which of two texts a token is of, which BERT reads.

    Returns:
        The copy.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token_id = pad_token_id
    tokenizer.padding_side = "right"
    tokenizer.model_input_names = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    return tokenizer


def reads_segments(model: PreTrainedModel) -> bool:
    """Return whether a model has an embedding of which of two texts a token is of."""
    return getattr(model.config, "type_vocab_size", 0) > 1


def encode(
    tokenizer: PreTrainedTokenizerBase, dataset: Dataset, texts: Sequence[str], settings: FinetuneSettings
) -> Encoded:
    """Turn rows into tokens.

    Args:
        tokenizer: From `padding_tokenizer`.
        dataset: Rows with the columns `texts` and `label`.
        texts: One or two columns of text.
        settings: Length and separator.

    Returns:
        The rows; one longer than `max_length` loses the end of its longer text.
    """
    columns = [dataset[name][:] for name in texts]
    if len(columns) == 2:
        columns[1] = [settings.separator + text for text in columns[1]]
    encoded = tokenizer(*columns, verbose=False)
    tokens = {name: encoded[name] for name in tokenizer.model_input_names if name != "attention_mask"}
    long = [row for row, ids in enumerate(tokens["input_ids"]) if len(ids) > settings.max_length]
    if long:
        cut = tokenizer(
            *([column[row] for row in long] for column in columns), truncation=True, max_length=settings.max_length
        )
        for name, values in tokens.items():
            for row, shortened in zip(long, cut[name], strict=True):
                values[row] = shortened
    from datasets import Dataset

    return Encoded(Dataset.from_dict({**tokens, "labels": dataset["label"][:]}), len(long))


def load_result(job: SeedJob) -> SeedResult | None:
    """Return the result of a training that was finished before, or None."""
    if not job.path.is_file():
        return None
    try:
        result = SeedResult.model_validate_json(job.path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        logger.warning("%s is damaged (%s), so this training is done again", job.path, error)
        return None
    return result if result.key == job.key else None


def train_seed(job: SeedJob, on_step: Callable[[int], None]) -> SeedResult:
    """Fine-tune a copy of the contestant, predict every validation row and write the result.

    Args:
        job: The training.
        on_step: Called with the number of steps done after each.

    Returns:
        The result.

    Raises:
        ConfigError: Several GPUs or processes, or an architecture without a stock head.
        TrainingError: Loss, gradient or logits are NaN or infinite; names task, model and seed.
        OutputError: The result cannot be written.
    """
    spec = GLUE_TASKS[job.task]
    drawn = job.train.shuffle(seed=job.seed).select(range(min(len(job.train), job.settings.train_limit or 2**63)))
    train = encode(job.tokenizer, drawn, spec.texts, job.settings)
    model = build_classifier(
        job.contestant,
        job.settings,
        num_labels=len(spec.labels),
        pad_token_id=job.tokenizer.pad_token_id,
        seed=job.seed,
    )
    watch = _Watch(job, on_step)
    with tempfile.TemporaryDirectory() as folder, contestant_mode(model, job.contestant):
        trainer = Trainer(
            model,
            _training_arguments(job, model, folder),
            DataCollatorWithPadding(job.tokenizer),
            train_dataset=train.rows,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        started = time.monotonic()
        trainer.train()
        trained = time.monotonic()
        predictions = {split: _predict(job, trainer, encoded.rows) for split, encoded in job.evals.items()}
        ended = time.monotonic()
    result = SeedResult(
        key=job.key,
        seed=job.seed,
        predictions=predictions,
        curve=watch.curve,
        steps=job.steps,
        train_rows=len(train.rows),
        train_rows_cut=train.num_cut,
        train_hash=train.hash,
        trained_parameters=watch.trained_parameters,
        train_seconds=trained - started,
        eval_seconds=ended - trained,
    )
    atomic_file(job.path, (result.model_dump_json(indent=1) + "\n").encode())
    # Trainer and model refer to each other: without this the next copy would stand beside this one
    del trainer, model
    gc.collect()
    return result


def _predict(job: SeedJob, trainer: Trainer, rows: Dataset) -> str:
    lengths = [len(ids) for ids in rows["input_ids"]]
    # rows of one length are batched together; padding changes no logit, so only the time depends on it
    order = np.argsort(lengths, kind="stable")[::-1]
    logits = trainer.predict(rows.select(order)).predictions
    if not np.isfinite(logits).all():
        raise TrainingError(f"{job}: logits are NaN or infinite after {job.steps} steps. {_ADVICE}")
    predictions = np.empty(len(order), dtype=np.int64)
    predictions[order] = logits.argmax(-1)
    return to_digits(predictions.tolist())


def _training_arguments(job: SeedJob, model: PreTrainedModel, folder: str) -> TrainingArguments:
    settings = job.settings
    on_gpu = model.device.type == "cuda"
    wants_bf16 = (on_gpu and torch.cuda.is_bf16_supported()) if settings.bf16 is None else settings.bf16
    args = TrainingArguments(
        output_dir=folder,
        max_steps=job.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.eval_batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(settings.warmup_ratio * job.steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        save_strategy="no",
        logging_steps=math.ceil(job.steps / CURVE_POINTS),
        # the filter would hide NaN from the check
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        seed=job.seed,
        data_seed=job.seed,
        # bfloat16 weights meet a float32 head
        bf16=wants_bf16 or model.dtype == torch.bfloat16,
        use_cpu=model.device.type == "cpu",
        dataloader_pin_memory=on_gpu,
    )
    if args.n_gpu > 1 or args.parallel_mode == ParallelMode.DISTRIBUTED:
        raise ConfigError(
            f"fine-tuning runs in one process on one device, but there are {max(args.n_gpu, args.world_size)}; start "
            "one process and choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    return args


_ADVICE = "Try a learning rate three to ten times lower or a longer warmup_ratio; what was finished before is kept"


class _Watch(TrainerCallback):
    """Counts what is trained, keeps the curve, and stops at a loss that is not finite."""

    def __init__(self, job: SeedJob, on_step: Callable[[int], None]) -> None:
        self.curve: list[tuple[int, float]] = []
        self.trained_parameters = 0
        self._job = job
        self._on_step = on_step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the parameters with a gradient: a control has weights that nothing reads."""
        if not self.trained_parameters:
            parameters = kwargs["model"].parameters()
            self.trained_parameters = sum(p.numel() for p in parameters if p.grad is not None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report progress."""
        self._on_step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the loss, or stop."""
        if not logs or "loss" not in logs:
            return
        loss, norm = logs["loss"], logs.get("grad_norm", 0.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"{self._job}: loss {loss:g} with gradient norm {norm:g} at step {state.global_step}. {_ADVICE}"
            )
        self.curve.append((state.global_step, loss))
