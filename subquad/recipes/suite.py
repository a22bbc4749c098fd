"""An evaluation: tasks on a student, its teacher, the control and others, with the same settings, kept task by task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from subquad.console import open_console
from subquad.convert.families import require_decoder
from subquad.distill import TextSource, build_token_dataset
from subquad.errors import ConfigError, OutputError, SubquadError
from subquad.eval.contestants import Contestant
from subquad.eval.finetune import run_glue_finetune
from subquad.eval.harness import LmEvalSettings, run_lm_eval
from subquad.eval.layers import run_layers
from subquad.eval.loss import Row
from subquad.eval.loss_record import LossSettings, run_loss
from subquad.eval.metric_text import metric_text
from subquad.eval.niah import NiahSettings, run_niah
from subquad.eval.niah.cells import measured_lengths
from subquad.eval.niah.plots import write_niah_plots
from subquad.eval.records import RECORDS_FOLDER, EvalRecord, Metric
from subquad.eval.report.across import UNLIKE
from subquad.eval.report.differences import is_needle
from subquad.eval.speed import run_speed
from subquad.recipes.contestants import load_contestants, run_folder_of
from subquad.recipes.loader import apply_overrides, parse_yaml
from subquad.recipes.problems import describe_problems
from subquad.recipes.progress import progress_bar
from subquad.recipes.suite_settings import SuiteSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SuiteResult:
    """What came of an evaluation.

    Attributes:
        folder: Where the records lie.
        records: What was measured, or had been before with equal settings.
        failures: Task to message, for tasks of which nothing could be measured; the others are complete.
    """

    folder: Path
    records: list[EvalRecord]
    failures: dict[str, str]

    def unmeasured(self) -> dict[str, str]:
        """Return the tasks without a figure that came with others (such as one of GLUE's), and why."""
        by_task: dict[str, list[EvalRecord]] = {}
        for record in self.records:
            by_task.setdefault(record.task, []).append(record)
        return {task: _reason(found) for task, found in by_task.items() if not _has_figures(found)}

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON: task, model, metric."""
        found: dict[str, Any] = {}
        for record in self.records:
            metrics = {name: metric.model_dump() for name, metric in record.metrics.items()}
            found.setdefault(record.task, {})[record.model] = metrics
        return {
            "folder": str(self.folder),
            "tasks": found,
            "failures": self.failures,
            "not_measured": self.unmeasured(),
        }


def _has_figures(records: Sequence[EvalRecord]) -> bool:
    return any(record.metrics for record in records)


def _reason(records: Sequence[EvalRecord]) -> str:
    """Return the notes of records without a figure."""
    notes = dict.fromkeys(note for record in records for note in record.notes)
    return " ".join(notes) or "no model here can be measured by it (layers: only converted ones)"


def evaluate_suite(
    source: str,
    tasks: Sequence[str],
    *,
    config: str | None,
    overrides: Sequence[str],
    teacher: str | None,
    others: Sequence[str],
    output: Path | None,
    command: str,
) -> SuiteResult:
    """Evaluate a checkpoint beside its teacher, the control and others.

    Args:
        source: a run's folder or a checkpoint.
        tasks: tasks in place of the configuration's.
        config: file with settings, see `load_suite`.
        overrides: changes of settings.
        teacher: the teacher; None takes the run's.
        others: further checkpoints.
        output: where records go; None is the run's folder.
        command: command that repeats the evaluation.

    Returns:
        What came of it.

    Raises:
        ConfigError: settings that break rules, or no place for the records.
        SourceError: a checkpoint that cannot be loaded.
        DataError: a checkpoint without a tokenizer.
        OutputError: no teacher is given, and the checkpoint lies in no run.
    """
    settings = load_suite(config, tasks, overrides)
    folder = _place(source, output)
    problems = settings.problems()
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"the evaluation cannot start:\n{listed}")
    contestants = load_contestants(source, teacher=teacher, others=others)
    return run_suite(contestants, settings, folder, command=command, console=open_console(stderr=True))


def _place(source: str, output: Path | None) -> Path:
    """Return the folder of the records."""
    folder = output or run_folder_of(source)
    if folder is None and not Path(source).exists():
        raise ConfigError(
            f"{source} does not exist here; a checkpoint of the hub needs a place for the results: --output"
        )
    if folder is None:
        raise ConfigError(f"{source} lies in no run, so there is no place for the results; give one with --output")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file, and the results need a folder; name another one with --output")
    return folder


def render_suite(result: SuiteResult) -> Table:
    """Return the figures as a table for a rich console: a row per task and metric, a column per model.

    A needle score over other lengths than the first model's is marked; its context was too short for some.
    """
    models = list(dict.fromkeys(record.model for record in result.records))
    table = Table(title=f"Evaluation ({result.folder})", title_justify="left")
    for heading in ("Task", "Metric", *models):
        table.add_column(heading, justify="left" if heading in ("Task", "Metric") else "right")
    notes: list[str] = []
    by_task: dict[str, dict[str, EvalRecord]] = {}
    for record in result.records:
        by_task.setdefault(record.task, {})[record.model] = record
    for task, of_model in by_task.items():
        names = dict.fromkeys(name for record in of_model.values() for name in record.metrics)
        lengths = {m: measured_lengths(record) for m, record in of_model.items() if is_needle(record)}
        unlike = {m for m, found in lengths.items() if found != next(iter(lengths.values()))}
        for name in names:
            found = {m: record.metrics.get(name) for m, record in of_model.items()}
            texts = {m: format_metric(name, metric) for m, metric in found.items()}
            texts |= {m: f"{texts[m]} {UNLIKE}" for m in unlike if found[m] is not None}
            table.add_row(task, name, *(texts.get(m, "–") for m in models))
        for m in sorted(unlike, key=models.index):
            spans = [", ".join(f"{length:,}" for length in lengths[n]) or "none" for n in (m, next(iter(lengths)))]
            notes.append(f"{UNLIKE} {task} of {m}: lengths {spans[0]}; the first model's: {spans[1]}")
        if not names:
            table.add_row(task, "not measured", *["–" for _ in models])
    table.caption, table.caption_justify = "\n".join(notes) or None, "left"
    for task in result.failures.keys() - by_task.keys():
        table.add_row(task, "failed", *["–" for _ in models])
    return table


def format_metric(name: str, metric: Metric | None) -> str:
    """Return a metric with its standard error or interval as text; a dash where it was not measured."""
    return "–" if metric is None else metric_text(name, metric)


def load_suite(source: str | None, tasks: Sequence[str], overrides: Sequence[str]) -> SuiteSettings:
    """Read the settings of an evaluation.

    Args:
        source: a `.yaml` file with the fields of `SuiteSettings`; None is all defaults.
        tasks: tasks in place of the file's; empty keeps them.
        overrides: `key=value` pairs with dotted keys, such as `niah.samples=4`.

    Returns:
        The settings.

    Raises:
        ConfigError: the file is missing or no mapping, or settings break rules; all problems in one message.
    """
    content: dict[str, Any] = {}
    if source is not None:
        try:
            content = parse_yaml(Path(source).read_text(encoding="utf-8"), source)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the evaluation settings {source} cannot be read: {error}") from error
    content = apply_overrides(content, overrides)
    if tasks:
        content["tasks"] = list(tasks)
    try:
        return SuiteSettings.model_validate(content)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in describe_problems(error, SuiteSettings))
        raise ConfigError(f"{source or 'the evaluation'} is not valid:\n{lines}") from error


def run_suite(
    contestants: Sequence[Contestant], settings: SuiteSettings, folder: Path, *, command: str, console: Console
) -> SuiteResult:
    """Measure every task on every contestant; what `folder` holds of equal settings is not measured again.

    Args:
        contestants: the models.
        settings: what to measure.
        folder: where records go (`evals/` in it).
        command: command that repeats the evaluation.
        console: where progress goes.

    Returns:
        The records, and why tasks failed; one that fails does not stop the others.

    Raises:
        ConfigError: a task that an encoder cannot do.
    """
    for contestant in contestants:
        for task in settings.tasks:
            if task != "glue-finetune":
                require_decoder(contestant.model.config.model_type, f"the task {task}")
    shared = _Rows(contestants[0], settings)
    jobs: dict[str, Callable[..., list[EvalRecord]]] = {
        "loss": lambda **how: run_loss(
            contestants, shared.rows(), shared.settings(), folder, task=settings.loss.task, **how
        ),
        "layers": lambda **how: run_layers(contestants, shared.rows_for_layers(), folder, seed=settings.seed, **how),
        "niah": lambda **how: _niah(contestants, settings.niah, folder, **how),
        "speed": lambda **how: run_speed(contestants, settings.speed, folder, **how),
        "perplexity": _lm_eval_job((), contestants, settings.lm_eval, folder),
        "glue-finetune": lambda **how: run_glue_finetune(contestants, settings.finetune, folder, **how),
    }
    records: list[EvalRecord] = []
    failures: dict[str, str] = {}
    for task in dict.fromkeys(settings.tasks):
        job = jobs.get(task) or _lm_eval_job((task,), contestants, settings.lm_eval, folder)
        try:
            with progress_bar(task, console) as advance:
                found = job(command=command, progress=advance)
            records += found
            if not _has_figures(found):
                failures[task] = _reason(found)
        except SubquadError as error:
            failures[task] = str(error)
        if task in failures:
            logger.error("%s could not be measured: %s", task, failures[task])
    return SuiteResult(folder, records, failures)


def _lm_eval_job(
    tasks: tuple[str, ...], contestants: Sequence[Contestant], settings: LmEvalSettings, folder: Path
) -> Callable[..., list[EvalRecord]]:
    """Return the job of one task, or without tasks that of the text files."""

    def job(*, command: str, progress: Callable[[int, int], None]) -> list[EvalRecord]:
        if not tasks and not settings.text_files:
            raise ConfigError("perplexity needs texts: lm_eval.text_files=[FILE]")
        own = settings.model_copy(update={"tasks": tasks, "text_files": () if tasks else settings.text_files})
        return run_lm_eval(contestants, own, folder, command=command, progress=progress)

    return job


def _niah(
    contestants: Sequence[Contestant],
    settings: NiahSettings,
    folder: Path,
    *,
    command: str,
    progress: Callable[[int, int], None],
) -> list[EvalRecord]:
    records = run_niah(contestants, settings, folder, command=command, progress=progress)
    write_niah_plots(records, folder / RECORDS_FOLDER / records[0].task)
    return records


class _Rows:
    """The held-out rows, tokenised when first asked for."""

    def __init__(self, contestant: Contestant, suite: SuiteSettings) -> None:
        self.contestant, self.suite = contestant, suite
        self.found: Dataset | None = None

    @property
    def text(self) -> TextSource:
        paths = self.suite.loss.text
        return TextSource(kind="text", paths=paths) if paths else TextSource(kind="embedded", part="eval")

    def rows(self) -> Sequence[Row]:
        if self.found is None:
            settings = self.suite.loss
            context_length = self.contestant.context_length
            if settings.seq_len > context_length:
                raise ConfigError(
                    f"loss.seq_len is {settings.seq_len}, beyond the model's context of {context_length}; lower it"
                )
            rows = build_token_dataset(
                self.text,
                self.contestant.tokenizer,
                settings.seq_len,
                max_tokens=settings.tokens,
                seed=self.suite.seed,
                shuffle=settings.shuffle,
            )
            assert isinstance(rows, Dataset), "local text is not streamed"
            self.found = rows
        return self.found

    def rows_for_layers(self) -> Sequence[Row]:
        rows = self.rows()
        count = max(1, self.suite.loss.layer_tokens // self.suite.loss.seq_len)
        return [rows[index] for index in range(min(count, len(rows)))]

    def settings(self) -> LossSettings:
        loss = self.suite.loss
        return LossSettings(
            data=self.text.describe(),
            tokens=loss.tokens,
            seq_len=loss.seq_len,
            seed=self.suite.seed,
            shuffle=loss.shuffle,
            batch_size=loss.batch_size,
            position_buckets=loss.position_buckets,
        )
