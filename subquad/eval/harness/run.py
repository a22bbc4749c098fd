"""Any lm-eval task on every model of an evaluation, with the same settings; each result is saved when it is there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from subquad.errors import ConfigError, OutputError
from subquad.eval.contestants import Clock, Contestant
from subquad.eval.harness.library import collected_warnings, quiet_lm_eval, quiet_programs, require_lm_eval
from subquad.eval.harness.paired import SAMPLES_FILE
from subquad.eval.harness.record import (
    Outcome,
    add_standard_errors,
    build_record,
    hash_requests,
    join_hashes,
    record_name,
)
from subquad.eval.harness.tasks import Loaded, load_tasks
from subquad.eval.records import (
    RECORDS_FOLDER,
    EvalRecord,
    load_record,
    record_path,
    save_record,
)

LM_EVAL_FOLDER = "lm-eval"
# log-probabilities of a bfloat16 model in bfloat16 would be rounded to steps of 1/16 nat and tie
SOFTMAX_DTYPE = "float32"


class LmEvalSettings(BaseModel):
    """What lm-eval measures, and how; equal for all models.

    Attributes:
        tasks: Tasks, tags or groups of lm-eval; `glue` is its nine tasks.
        text_files: Texts whose word and byte perplexity and bits per byte are measured, each as a task
            `text-FILE`: `<|endoftext|>` separates documents, or JSON lines hold one each in `text`.
        num_fewshot: Examples before each question; None is each task's own default, 0 for GLUE.
        limit: Documents of each task, the first ones; None is all.
        seed: Seed of the examples and of resampling.
        batch_size: Sequences per forward pass; does not change a score beyond rounding.
        max_length: Longest sequence in tokens; it cuts the beginning of longer prompts and sets the windows of a
            perplexity. None is the smallest context length of the models, so that it is the same for all; one beyond
            a model's context is used as lm-eval uses it, and noted.
        data_dirs: Folders with local files in place of the hub's data sets.
        include_path: Folder with further task definitions in lm-eval's YAML.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[str, ...] = ("glue",)
    text_files: tuple[Path, ...] = ()
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 1234
    batch_size: Annotated[int, Field(ge=1)] = 8
    max_length: Annotated[int, Field(ge=2)] | None = None
    data_dirs: tuple[Path, ...] = ()
    include_path: Path | None = None

    @model_validator(mode="after")
    def _something_to_do(self) -> LmEvalSettings:
        if not self.tasks and not self.text_files:
            raise ValueError("there is nothing to measure: name tasks or text files")
        return self


@dataclass(frozen=True)
class _Run:
    """What every task and model share."""

    settings: LmEvalSettings
    max_length: int
    version: str
    manager: Any
    folder: Path
    command: str

    def settings_of(self, loaded: Loaded, task_version: object, contestant: Contestant) -> dict[str, Any]:
        """Return everything that changes the scores of a task."""
        chosen = self.settings.model_dump(include={"num_fewshot", "limit", "seed", "batch_size"})
        return chosen | {
            "max_length": self.max_length,
            "softmax_dtype": SOFTMAX_DTYPE,
            "dtype": str(contestant.model.dtype).removeprefix("torch."),
            "chat_template": False,
            "lm_eval": self.version,
            "task_version": task_version,
            "data": dict(loaded.data),
            "checkpoint": contestant.checkpoint,
            "mode": contestant.mode,
        }


def run_lm_eval(
    contestants: Sequence[Contestant],
    settings: LmEvalSettings,
    folder: Path,
    *,
    command: str,
    progress: Callable[[int, int], None] | None = None,
) -> list[EvalRecord]:
    """Measure lm-eval tasks on every model through lm-eval's Python interface, unpatched.

    Beside the records, lm-eval's own files lie in `evals/lm-eval/MODEL/`: `results_*.json` and `samples_*.jsonl`, one
    pair per task, for the viewers that read them. The records' standard errors stand in them, too. lm-eval seeds the
    random number generators of Python, NumPy and PyTorch.

    Args:
        contestants: The models.
        settings: What to measure.
        folder: The evaluation folder. A task that was measured with equal settings before is not measured again.
        command: Command that repeats the evaluation.
        progress: Called with (tasks done, tasks in all) after each task of each model.

    Returns:
        A record per task and model, and one per group with a score of its own. A task without data has no metrics
        and a note that says what was looked for.

    Raises:
        ConfigError: lm-eval is missing or too old, or it does not know a task.
        DataError: A local file is damaged or holds a value that is not allowed.
        OutputError: The folder cannot be written.
    """
    if not contestants:
        raise ConfigError("there is no model to evaluate; give at least one")
    version = require_lm_eval()
    manager, found = load_tasks(
        settings.tasks,
        settings.text_files,
        settings.data_dirs,
        settings.include_path,
        train=bool(settings.num_fewshot),
    )
    max_length = settings.max_length or min(contestant.context_length for contestant in contestants)
    run = _Run(settings, max_length, version, manager, folder, command)
    in_all = len(contestants) * sum(max(1, len(loaded.tasks)) for loaded in found)
    records: list[EvalRecord] = []
    done = 0
    for loaded in found:
        for contestant in contestants:
            for record, num_tasks in _records(run, loaded, contestant):
                records.append(record)
                done += num_tasks
                if progress and num_tasks:
                    progress(done, in_all)
    return records


def _records(run: _Run, loaded: Loaded, contestant: Contestant) -> Iterator[tuple[EvalRecord, int]]:
    """Yield the records of one name on one model, each with the number of tasks it is of."""
    if loaded.problem is not None:
        yield _not_run(run, loaded, contestant), 1
        return
    by_task = {}
    for name, task in loaded.tasks.items():
        settings = run.settings_of(loaded, task.VERSION, contestant)
        record = contestant.finished_record(run.folder, record_name(name), settings)
        if record is None or not record.metrics:
            record = _measure(run, loaded, name, contestant, settings)
            save_record(record, run.folder)
        by_task[name] = record
        yield record, 1
    for name, group in loaded.groups.items():
        record = _group_record(run, loaded, name, group, by_task, contestant)
        save_record(record, run.folder)
        yield record, 0


def _measure(run: _Run, loaded: Loaded, name: str, contestant: Contestant, settings: Mapping[str, Any]) -> EvalRecord:
    """Measure one task on one model and save lm-eval's files; the record is the caller's to save."""
    from lm_eval.loggers import EvaluationTracker

    clock, seed = Clock.start(), run.settings.seed
    tracker = EvaluationTracker(output_path=str(run.folder / RECORDS_FOLDER / LM_EVAL_FOLDER))
    task = loaded.tasks[name]
    with contestant.active(), quiet_lm_eval():
        model = _wrapped(run, contestant)
        with collected_warnings() as warnings:
            results = _evaluate(run, task, contestant, model, tracker)
        samples = results.pop("samples")[name]
        methods = add_standard_errors(results["results"][name], task.aggregation(), samples, seed)
    outcome = Outcome(name, results["results"][name], task.higher_is_better(), samples, methods)
    num_fewshot = results["n-shot"][name]
    notes = [*loaded.notes, *warnings.notes()]
    if run.max_length > contestant.context_length:
        notes.append(
            f"max_length is {run.max_length:,}, beyond the context of {contestant.context_length:,} tokens the model "
            "was made for; as in lm-eval, longer inputs are read all the same."
        )
    if run.settings.num_fewshot not in (None, num_fewshot):
        asked = run.settings.num_fewshot
        notes.append(f"Prompts hold {num_fewshot} examples, not {asked}: lm-eval's task fixes their number.")
    record = build_record(
        outcome,
        model=contestant.name,
        settings=settings,
        notes=notes,
        details={
            "num_fewshot": num_fewshot,
            "num_documents": dict(results["n-samples"][name]),
            "dataset": {"path": task.DATASET_PATH, "name": task.DATASET_NAME},
        },
        provenance=clock.provenance(
            contestant,
            seed=seed,
            batch_size=run.settings.batch_size,
            prompts_hash=hash_requests(outcome.documents, model.tok_encode),
            command=run.command,
        ),
    )
    path = _save_lm_eval_files(tracker, contestant.name, name, results, samples)
    return record.model_copy(update={"details": record.details | {SAMPLES_FILE: path}})


def _wrapped(run: _Run, contestant: Contestant) -> Any:
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):
        """lm-eval's model, which says when the evaluation is over: lm-eval then asks what the model is."""

        def get_model_info(self) -> dict[str, Any]:
            info: dict[str, Any] = super().get_model_info()
            self.when_evaluated()
            return info

        def when_evaluated(self) -> None:
            """Do what is to be done then."""

    return Model(
        pretrained=contestant.model,
        backend="causal",
        # a copy: lm-eval gives a tokenizer without a padding token one
        tokenizer=copy.deepcopy(contestant.tokenizer),
        batch_size=run.settings.batch_size,
        max_length=run.max_length,
        softmax_dtype=SOFTMAX_DTYPE,
    )


def _evaluate(run: _Run, task: Any, contestant: Contestant, model: Any, tracker: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    seed = run.settings.seed
    with ExitStack() as until_returned:
        # The next it does is to ask git for a commit, which outside a repository complains to the screen.
        model.when_evaluated = lambda: until_returned.enter_context(quiet_programs())
        return simple_evaluate(
            model=model,
            model_args={"pretrained": contestant.checkpoint, "mode": contestant.mode, "max_length": run.max_length},
            tasks=[task],
            task_manager=run.manager,
            num_fewshot=run.settings.num_fewshot,
            limit=run.settings.limit,
            batch_size=run.settings.batch_size,
            # uncertainty.py makes the standard errors: lm-eval's bootstrap takes minutes
            bootstrap_iters=0,
            evaluation_tracker=tracker,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )


def _save_lm_eval_files(tracker: Any, model: str, task: str, results: dict[str, Any], samples: list[Any]) -> str:
    """Write lm-eval's own files, which it only logs where it cannot; return that of the samples, below `evals`."""
    tracker.general_config_tracker.model_name = tracker.general_config_tracker.model_name_sanitized = model
    with collected_warnings() as warnings:
        tracker.save_results_aggregated(results=results, samples={task: samples})
        tracker.save_results_samples(task_name=record_name(task), samples=samples)
    if warnings.notes():
        raise OutputError(
            f"lm-eval could not write its files of {task} below {tracker.output_path}: {' '.join(warnings.notes())} "
            "Free some space or choose another folder."
        )
    return f"{LM_EVAL_FOLDER}/{model}/samples_{record_name(task)}_{tracker.date_id}.jsonl"


def _not_run(run: _Run, loaded: Loaded, contestant: Contestant) -> EvalRecord:
    """Save that a task has no data, unless that would replace what an earlier run measured."""
    record = EvalRecord(
        task=record_name(loaded.name),
        model=contestant.name,
        metrics={},
        settings=run.settings_of(loaded, None, contestant),
        notes=[f"Not run: {loaded.problem}"],
        provenance=Clock.start().provenance(
            contestant,
            seed=run.settings.seed,
            batch_size=run.settings.batch_size,
            prompts_hash=join_hashes([]),
            command=run.command,
        ),
    )
    path = record_path(run.folder, record.task, record.model)
    if not path.is_file() or not load_record(path).metrics:
        save_record(record, run.folder)
    return record


def _group_record(
    run: _Run,
    loaded: Loaded,
    name: str,
    group: Any,
    by_task: Mapping[str, EvalRecord],
    contestant: Contestant,
) -> EvalRecord:
    """Return the score of a group, lm-eval's mean over its tasks."""
    own = {task.task_name: by_task[task.task_name] for task in group.get_all_tasks()}
    numbers = group.aggregate({task: record.details["lm_eval"] for task, record in own.items()})
    directions = {
        metric: better for task in group.get_all_tasks() for metric, better in task.higher_is_better().items()
    }
    provenance = Clock.start().provenance(
        contestant,
        seed=run.settings.seed,
        batch_size=run.settings.batch_size,
        prompts_hash=join_hashes([record.provenance.prompts_hash for record in own.values()]),
        command=run.command,
    )
    seconds = sum(record.provenance.wall_seconds for record in own.values())
    return build_record(
        Outcome(name, numbers, directions),
        model=contestant.name,
        settings=run.settings_of(loaded, group.version, contestant),
        notes=[f"The mean over {len(own)} tasks, weighted as lm-eval's group says."],
        details={"tasks": list(own)},
        provenance=provenance.model_copy(update={"wall_seconds": seconds}),
    )
