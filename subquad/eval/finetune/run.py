"""Fine-tuned GLUE: every contestant with a head, the same budget, rows, order and start for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from subquad.errors import ConfigError
from subquad.eval.contestants import Clock, Contestant
from subquad.eval.finetune.classifier import padding_token
from subquad.eval.finetune.scores import (
    Score,
    constant_baseline,
    from_digits,
    score_difference,
    score_predictions,
    to_digits,
)
from subquad.eval.finetune.settings import FinetuneSettings
from subquad.eval.finetune.training import (
    Encoded,
    SeedJob,
    SeedResult,
    encode,
    load_result,
    padding_tokenizer,
    reads_segments,
    train_seed,
)
from subquad.eval.glue import LM_EVAL_TASKS, glue_metrics
from subquad.eval.glue_data import GLUE_TASKS, GlueSplit, GlueTask, load_glue
from subquad.eval.metric_text import extreme_interval, no_error_note
from subquad.eval.records import (
    RECORDS_FOLDER,
    EvalRecord,
    Metric,
    hash_prompts,
    save_record,
)

if TYPE_CHECKING:
    from datasets import Dataset

TASK_PREFIX = "glue-finetune-"
Progress = Callable[[int, int], None]


def run_glue_finetune(
    contestants: Sequence[Contestant],
    settings: FinetuneSettings,
    folder: Path,
    *,
    command: str,
    progress: Progress | None = None,
) -> list[EvalRecord]:
    """Fine-tune every contestant on every task and score the validation rows after the last step.

    Each training works on a copy, so contestants that share weights do not touch each other. There is one record per
    lm-eval task name (MNLI gives `mnli` and `mnli_mismatch`), `glue-finetune-<task>`. A run that was interrupted goes
    on with the first training that was not finished.

    Args:
        contestants: The models; names differ.
        settings: What is done.
        folder: The evaluation folder.
        command: Command that repeats it.
        progress: Called with (steps done, steps in all) over all trainings.

    Returns:
        The records, task by task.

    Raises:
        ConfigError: A model that cannot be fine-tuned, whose context is below `max_length`, or several GPUs.
        DataError: A task's data is missing or damaged; all of it is read before the first training.
        TrainingError: A training diverged; names task, model and seed.
        OutputError: The folder cannot be written or holds a damaged record.
    """
    for contestant in contestants:
        if settings.max_length > contestant.context_length:
            raise ConfigError(
                f"max_length {settings.max_length} is above the context of {contestant.name}, "
                f"{contestant.context_length} tokens; lower max_length"
            )
    finished = {
        (task, contestant.name): _finished(folder, task, contestant, settings)
        for task in settings.tasks
        for contestant in contestants
    }
    data = {
        task: _load(task, settings) for task in settings.tasks if any(not finished[task, c.name] for c in contestants)
    }
    tally = _Tally(
        progress,
        sum(
            settings.steps(len(data[task].train)) * len(settings.seeds)
            for (task, _), records in finished.items()
            if not records
        ),
    )
    records = []
    for task in settings.tasks:
        for contestant in contestants:
            known = finished[task, contestant.name]
            records += known or _measure(task, contestant, settings, folder, data[task], tally, command)
    return records


def compare_finetuned(first: EvalRecord, second: EvalRecord) -> dict[str, Metric]:
    """Return the paired difference first - second of two models fine-tuned on the same task.

    Args:
        first: Record of one model.
        second: Record of the other.

    Returns:
        The difference by metric.

    Raises:
        ConfigError: The two are of other tasks, settings or validation rows.
    """
    if first.task != second.task or first.settings != second.settings:
        raise ConfigError(f"{first.model} and {second.model} were not fine-tuned on one task with the same settings")
    if first.details["labels"] != second.details["labels"]:
        raise ConfigError(f"{first.model} and {second.model} were not scored on the same rows of {first.task}")
    labels = from_digits(first.details["labels"])
    predictions = [_stack([seed["predictions"] for seed in record.details["seeds"]]) for record in (first, second)]
    return {name: _metric(score_difference(name, labels, *predictions), labels) for name in first.metrics}


@dataclass(frozen=True)
class _TaskData:
    """The training split and the validation splits that are scored."""

    train: Dataset
    evals: dict[GlueSplit, Dataset]
    num_validation: dict[GlueSplit, int]


def _load(task: GlueTask, settings: FinetuneSettings) -> _TaskData:
    whole = {split: load_glue(task, split, settings.data_dir) for split in GLUE_TASKS[task].eval_splits}
    limit = settings.eval_limit
    return _TaskData(
        train=load_glue(task, "train", settings.data_dir),
        evals={split: rows.select(range(min(len(rows), limit or len(rows)))) for split, rows in whole.items()},
        num_validation={split: len(rows) for split, rows in whole.items()},
    )


class _Tally:
    """Counts optimizer steps over all trainings."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0

    def step(self, done: int) -> None:
        """Report `done` steps of the training under way."""
        if self._progress is not None:
            self._progress(self._before + done, self._total)

    def finish(self, steps: int) -> None:
        """Count a training as done."""
        self._before += steps
        self.step(0)


def _names(task: GlueTask) -> dict[str, GlueSplit]:
    """Return the names of a task's records without prefix, and the split each is of."""
    return {name: split for name, (glue, split) in LM_EVAL_TASKS.items() if glue == task}


def _finished(folder: Path, task: GlueTask, contestant: Contestant, settings: FinetuneSettings) -> list[EvalRecord]:
    """Return all records of a task and model, or none where one is missing."""
    found = [contestant.finished_record(folder, TASK_PREFIX + name, settings.for_record()) for name in _names(task)]
    return [record for record in found if record is not None] if all(found) else []


def _measure(
    task: GlueTask,
    contestant: Contestant,
    settings: FinetuneSettings,
    folder: Path,
    data: _TaskData,
    tally: _Tally,
    command: str,
) -> list[EvalRecord]:
    clock = Clock.start()
    tokenizer = padding_tokenizer(
        contestant.tokenizer,
        padding_token(contestant.tokenizer, contestant.model),
        segments=reads_segments(contestant.model),
    )
    evals = {split: encode(tokenizer, rows, GLUE_TASKS[task].texts, settings) for split, rows in data.evals.items()}
    results = []
    for seed in settings.seeds:
        job = SeedJob(
            contestant=contestant,
            tokenizer=tokenizer,
            settings=settings,
            task=task,
            seed=seed,
            train=data.train,
            evals=evals,
            path=folder / RECORDS_FOLDER / f"{TASK_PREFIX}{task}" / "seeds" / f"{contestant.name}-seed{seed}.json",
        )
        results.append(load_result(job) or train_seed(job, tally.step))
        tally.finish(job.steps)
    # A resumed run has not seen all of the time itself.
    seconds = sum(result.train_seconds + result.eval_seconds for result in results)
    provenance = clock.provenance(
        contestant,
        seed=settings.seeds[0],
        batch_size=settings.eval_batch_size,
        prompts_hash="",
        command=command,
    )
    records = []
    for name, split in _names(task).items():
        encoded = evals[split]
        update = {"prompts_hash": hash_prompts(encoded.rows["input_ids"]), "wall_seconds": seconds}
        numbers = _numbers(glue_metrics(name), results, split, encoded)
        record = EvalRecord(
            task=TASK_PREFIX + name,
            model=contestant.name,
            settings=settings.for_record(),
            notes=[*_notes(results, split, encoded, data.num_validation[split]), *_error_notes(numbers["metrics"])],
            provenance=provenance.model_copy(update=update),
            **numbers,
        )
        save_record(record, folder)
        records.append(record)
    return records


def _numbers(
    metrics: Sequence[str], results: Sequence[SeedResult], split: GlueSplit, encoded: Encoded
) -> dict[str, Any]:
    """Return a record's metrics, baselines and details."""
    labels = np.array(encoded.rows["labels"][:])
    scores = {
        name: score_predictions(name, labels, _stack([r.predictions[split] for r in results])) for name in metrics
    }
    seeds = [
        {
            "seed": result.seed,
            "metrics": {name: score.per_seed[index] for name, score in scores.items()},
            "curve": [list(point) for point in result.curve],
            "train_hash": result.train_hash,
            "train_seconds": result.train_seconds,
            "eval_seconds": result.eval_seconds,
            "predictions": result.predictions[split],
        }
        for index, result in enumerate(results)
    ]
    details = {
        "steps": results[0].steps,
        "train_rows": results[0].train_rows,
        "trained_parameters": results[0].trained_parameters,
        "errors": {
            name: {"examples": score.error_examples, "seeds": score.error_seeds} for name, score in scores.items()
        },
        "labels": to_digits(labels.tolist()),
        "seeds": seeds,
    }
    return {
        "metrics": {name: _of_shares(name, _metric(score, labels)) for name, score in scores.items()},
        "baselines": {name: constant_baseline(name, labels) for name in metrics},
        "details": details,
    }


def _metric(score: Score, labels: np.ndarray) -> Metric:
    return Metric(value=score.value, standard_error=score.standard_error, num=len(labels))


def _of_shares(name: str, metric: Metric) -> Metric:
    """Return a metric without its standard error of 0 where it is an accuracy of 0 or 1."""
    return metric.model_copy(update={"standard_error": None}) if extreme_interval(name, metric) else metric


def _stack(digits: Sequence[str]) -> np.ndarray:
    return np.stack([from_digits(row) for row in digits])


def _error_notes(metrics: Mapping[str, Metric]) -> list[str]:
    return [no_error_note(name, metric) for name, metric in metrics.items() if metric.standard_error is None]


def _notes(results: Sequence[SeedResult], split: GlueSplit, encoded: Encoded, num_validation: int) -> list[str]:
    notes = ["The baseline is the best score of one and the same answer to every row."]
    if len(results) == 1:
        notes.append("One seed: the standard errors are of the choice of rows only, not of the training.")
    else:
        notes.append(f"Mean of {len(results)} trainings; the standard errors are of the choice of rows and of seeds.")
    num = len(encoded.rows)
    if num < num_validation:
        notes.append(f"The first {num} of {num_validation} validation rows.")
    cut = max(result.train_rows_cut for result in results)
    if encoded.num_cut or cut:
        notes.append(f"Cut to max_length: {encoded.num_cut} of the validation rows, {cut} of the training rows.")
    constant = [str(result.seed) for result in results if len(set(result.predictions[split])) == 1]
    if constant:
        notes.append(
            f"Seed {', '.join(constant)}: every row got the same answer, so nothing was learned; a Matthews "
            "correlation is 0 by definition then, and its standard error says nothing."
        )
    return notes
