"""The rows of the first screen: what the conversion cost and what it gains, a value per model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from subquad.eval.finetune.run import TASK_PREFIX as FINETUNE_PREFIX
from subquad.eval.glue import LM_EVAL_TASKS, GlueAverage, glue_average, glue_metrics
from subquad.eval.loss import perplexity
from subquad.eval.loss_record import is_loss
from subquad.eval.niah.cells import CellScore, pooled
from subquad.eval.niah.stats import mean_and_error, wilson_interval
from subquad.eval.records import EvalRecord, Metric
from subquad.eval.report.blocks import Cell, Missing
from subquad.eval.report.commands import eval_command
from subquad.eval.report.data import ByMetric, ByModel, RunData
from subquad.eval.report.differences import (
    MEASURED_LENGTHS,
    Difference,
    common_cells,
    conditions,
    decimals_of,
    differing,
    format_number,
    is_needle,
    is_speed,
    measured_on,
)
from subquad.eval.report.rows import Measure, metric_cell
from subquad.eval.report.speed import speed_rows
from subquad.eval.results import CacheTable, LossName, PairedDifference, Results
from subquad.eval.style import format_bytes

# the condition of an average that makes all others idle
TASKS = "tasks"
_CACHE_LENGTHS = (512, 2048, 8192, 32_768, 131_072)
_MOST_CACHE_ROWS = 4


def measures_of(run: RunData) -> list[Measure]:
    """Return every row that a folder has data for, in the order of the summary.

    Args:
        run: The folder's content.

    Returns:
        The rows.

    Raises:
        OutputError: A record of the needle task has no readable cells.
    """
    found = _loss_of_run(run.results) if run.results else []
    found += [row for task in _tasks(run, is_loss) for row in _loss_of_records(run, task)]
    found += [row for task in run.by_task for row in metric_rows(run, task, ("word_perplexity",))]
    found += _glue(run, "", "zero-shot")
    found += _glue(run, FINETUNE_PREFIX, "fine-tuned")
    found += [row for task in _tasks(run, is_needle) for row in _needle(run, task)]
    found += [row for task in _tasks(run, is_speed) for row in speed_rows(run, task)]
    if run.results and run.results.cache_bytes:
        found += _cache(run.results.cache_bytes)
    return found


def _tasks(run: RunData, kind: Callable[[EvalRecord], bool]) -> list[str]:
    """Return the tasks whose records are all of a kind."""
    return [task for task, by_model in run.by_task.items() if all(map(kind, by_model.values()))]


def missing_of(run: RunData) -> list[Missing]:
    """Return what the summary would show, too, had it been measured, each with the command that measures it."""
    records = run.records
    glue = any(record.task in LM_EVAL_TASKS and record.metrics for record in records)
    checks = [
        ("held-out loss", "loss", run.results is not None or any(map(is_loss, records))),
        ("needle in a haystack", "niah", any(map(is_needle, records))),
        ("GLUE, zero-shot", "glue", glue),
        ("GLUE, fine-tuned", "glue-finetune", any(record.task.startswith(FINETUNE_PREFIX) for record in records)),
        ("speed", "speed", any(map(is_speed, records))),
    ]
    found = [Missing(what, eval_command(run, task)) for what, task, there in checks if not there]
    if run.results is None or run.results.cache_bytes is None:
        found.append(Missing("memory while generating (a run measures it at its end)"))
    return found


def _loss_of_run(results: Results) -> list[Measure]:
    loss = results.loss
    names: tuple[LossName, ...] = ("teacher", "window_only", "student")
    known = {name: value for name, value in loss.measured().items() if name in names}
    nats, perplexities = {}, {}
    for name, value in known.items():
        error = loss.standard_error.get(name)
        nats[str(name)] = Cell(format_number(value, error, 4), value)
        scaled = None if error is None else error * perplexity(value)
        perplexities[str(name)] = Cell(format_number(perplexity(value), scaled, 2), perplexity(value))
    what = {"text": results.data, "tokens": loss.num_tokens, "rows": loss.num_rows, "dtype": results.dtype}
    shared: dict[str, Any] = {
        "note": f"{results.data}, {loss.num_tokens:,} tokens",
        "conditions": dict.fromkeys(nats, what),
    }
    pairs = [results.difference("student", "teacher"), results.difference("student", "window_only")]
    cost, gain = (_nats_cell(pair) for pair in pairs)
    more = [_perplexity_cell(pair, loss.student) for pair in pairs]
    return [
        Measure("Loss (nats/token)", nats, cost=cost, gain=gain, told="loss", **shared),
        Measure("Perplexity", perplexities, cost=more[0], gain=more[1], **shared),
    ]


def _nats_cell(pair: PairedDifference | None) -> Cell | None:
    return None if pair is None else Difference(pair.difference, pair.standard_error, False, paired=True).cell(4)


def _perplexity_cell(pair: PairedDifference | None, student: float) -> Cell | None:
    if pair is None:
        return None
    # to first order, as for the perplexity itself
    error = None if pair.standard_error is None else pair.standard_error * perplexity(student)
    value = perplexity(student) - perplexity(student - pair.difference)
    return Difference(value, error, False, paired=True).cell(2)


def _loss_of_records(run: RunData, task: str) -> list[Measure]:
    first = next(iter(run.by_task[task].values()))
    num = first.metrics["loss"].num
    note = f"{first.settings.get('data', first.task)}, {num:,} tokens (task {task})"
    rows = metric_rows(run, task, ("loss", "perplexity"))
    labels = {"loss": ("Loss (nats/token)", "loss"), "perplexity": ("Perplexity", "")}
    return [
        Measure(label, row.values, note, row.cost, row.gain, short, task, row.conditions)
        for (label, short), row in zip(labels.values(), rows, strict=False)
    ]


def metric_rows(run: RunData, task: str, names: Sequence[str] | None) -> list[Measure]:
    """Return a row for each metric of a task.

    Args:
        run: The folder's content.
        task: Name of the task.
        names: Metrics to show, those that are there; None shows all.

    Returns:
        The rows.
    """
    by_model = run.by_task[task]
    there = dict.fromkeys(name for record in by_model.values() for name in record.metrics)
    wanted = [name for name in (there if names is None else names) if name in there]
    rows = []
    for name in wanted:
        metrics = {model: record.metrics[name] for model, record in by_model.items() if name in record.metrics}
        decimals = decimals_of(name)
        rows.append(
            Measure(
                f"{task}: {name}",
                {model: metric_cell(name, metric, decimals) for model, metric in metrics.items()},
                f"n = {max(metric.num for metric in metrics.values()):,}",
                *_cost_and_gain(run, task, name, decimals),
                conditions={model: {**conditions(r), **measured_on(r)} for model, r in by_model.items()},
            )
        )
    return rows


def _cost_and_gain(run: RunData, task: str, metric: str, decimals: int) -> tuple[Cell | None, Cell | None]:
    cost, gain = run.costs[task].get(metric), run.gains[task].get(metric)
    return None if cost is None else cost.cell(decimals), None if gain is None else gain.cell(decimals)


def _glue(run: RunData, prefix: str, how: str) -> list[Measure]:
    """Return the row of the GLUE average over the tasks that all of the models have."""
    by_task = {
        task: {model: record for model, record in by_model.items() if record.metrics}
        for task, by_model in run.by_task.items()
        if task.startswith(prefix) and task.removeprefix(prefix) in LM_EVAL_TASKS
    }
    models = {model for by_model in by_task.values() for model in by_model}
    shared = {task: by_model for task, by_model in by_task.items() if by_model.keys() == models}
    if not shared:
        return []
    everything = [record for by_model in shared.values() for record in by_model.values()]
    averages = glue_average(everything, prefix=prefix)
    if not averages:
        return []
    tasks = next(iter(averages.values())).tasks
    note = f"{len(tasks)} of {len(LM_EVAL_TASKS)} tasks: {', '.join(tasks)}"
    constant = _average_of(shared, prefix, lambda task: _baselines(shared[task]))
    if constant is not None:
        note += f"; a constant answer scores {constant.value:.3f}"
    shots = {record.settings.get("num_fewshot") or 0 for record in everything}
    if not prefix and shots != {0}:
        how = f"{'/'.join(map(str, sorted(shots)))}-shot"
    values = {
        model: Cell(format_number(average.value, average.standard_error, 3), average.value)
        for model, average in averages.items()
    }
    cost, gain = (_glue_difference(shared, prefix, found) for found in (run.costs, run.gains))
    at = _glue_conditions(shared, models)
    return [Measure(f"GLUE average, {how}", values, note, cost, gain, f"GLUE {how}", conditions=at)]


def _glue_conditions(shared: dict[str, ByModel], models: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {
        model: {TASKS: sorted(shared)}
        | {
            f"{task} {name}": value
            for task, by_model in shared.items()
            for name, value in conditions(by_model[model]).items()
        }
        for model in models
    }


def _baselines(by_model: ByModel) -> dict[str, Metric]:
    record = next(iter(by_model.values()))
    return {name: Metric(value=value, num=1) for name, value in record.baselines.items()}


def _average_of(
    shared: dict[str, ByModel], prefix: str, metrics_of: Callable[[str], dict[str, Metric]]
) -> GlueAverage | None:
    """Return the average of other numbers than the scores, such as baselines; None where a task lacks one."""
    records = []
    for task, by_model in shared.items():
        metrics = metrics_of(task)
        if any(name not in metrics for name in glue_metrics(task.removeprefix(prefix))):
            return None
        records.append(next(iter(by_model.values())).model_copy(update={"model": "other", "metrics": metrics}))
    return glue_average(records, prefix=prefix).get("other")


def _glue_difference(shared: dict[str, ByModel], prefix: str, differences: dict[str, ByMetric]) -> Cell | None:
    def metrics_of(task: str) -> dict[str, Metric]:
        found = differences[task]
        return {name: Metric(value=d.value, standard_error=d.standard_error, num=1) for name, d in found.items()}

    average = _average_of(shared, prefix, metrics_of)
    if average is None:
        return None
    return Difference(average.value, average.standard_error, True, paired=False).cell(3)


def _needle(run: RunData, task: str) -> list[Measure]:
    """Return the rows of a needle task over the cells all models were measured on."""
    by_model = run.by_task[task]
    records = list(by_model.values())
    shared = dict(zip(by_model, common_cells(records), strict=True))
    lengths = sorted({cell.length for cell in next(iter(shared.values()))})
    if not lengths:
        return []
    span = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    labels: dict[CellScore, str] = {"accuracy": "Needle accuracy", "key_logprob": "Needle log probability"}
    rows = []
    for score, label in labels.items():
        numbers = {model: pooled(found, score) for model, found in shared.items()}
        numbers = {model: values for model, values in numbers.items() if values}
        if not numbers:
            continue
        note = f"{task}, {span} tokens, {max(map(len, numbers.values())):,} prompts"
        if score == "key_logprob" and "key_logprob" in records[0].baselines:
            note += f"; a guess: {records[0].baselines['key_logprob']:.1f}"
        to_cell = _share_cell if score == "accuracy" else _mean_cell
        decimals = 3 if score == "accuracy" else 2
        cost, gain = _cost_and_gain(run, task, score, decimals)
        at = {model: {**conditions(record), MEASURED_LENGTHS: lengths} for model, record in by_model.items()}
        values = {model: to_cell(found) for model, found in numbers.items()}
        short = label[0].lower() + label[1:]
        rows.append(Measure(label, values, note, cost, gain, short, task, at))
    return rows


def _share_cell(flags: Sequence[float]) -> Cell:
    low, high = wilson_interval(round(sum(flags)), len(flags))
    share = sum(flags) / len(flags)
    return Cell(f"{share:.3f} [{low:.3f}, {high:.3f}]", share)


def _mean_cell(values: Sequence[float]) -> Cell:
    value, error = mean_and_error(values)
    return Cell(format_number(value, error, 2), value)


def _cache(table: CacheTable) -> list[Measure]:
    both = sorted(set(table.student) & set(table.kv))
    usual = [length for length in _CACHE_LENGTHS if length in both]
    lengths = (usual if len(usual) > 1 else both)[-_MOST_CACHE_ROWS:]
    rows = []
    for length in lengths:
        kv, student = table.kv[length], table.student[length]
        ratio = kv / student
        text = f"{ratio:.1f}× smaller" if ratio >= 1 else f"{1 / ratio:.1f}× larger"
        how = "measured" if length in table.measured_lengths else "computed"
        at = {"dtype": table.dtype, "batch_size": table.batch_size}
        rows.append(
            Measure(
                f"Cache at {length:,} tokens",
                {"teacher": Cell(format_bytes(kv), kv), "student": Cell(format_bytes(student), student)},
                how,
                Cell(text, student - kv, "better" if ratio > 1 else "worse"),
                conditions={"teacher": at, "student": at},
            )
        )
    return rows


def mismatches(measure: Measure) -> str:
    """Say which models of a row were not measured like the first one; empty where all were."""
    names = [name for name in measure.conditions if name in measure.values]
    found = []
    for name in names[1:]:
        keys = differing(measure.conditions[names[0]], measure.conditions[name])
        if keys:
            found.append(f"{name}: {', '.join(keys)} differ{'s' if len(keys) == 1 else ''} from {names[0]}")
    return "; ".join(found)


def told(measures: Sequence[Measure], of: Callable[[Measure], Cell | None]) -> str:
    """Return the differences of the rows that matter as one phrase, the first of each kind; empty without any."""
    parts: dict[str, str] = {}
    for measure in measures:
        cell = of(measure)
        if measure.told and cell is not None:
            parts.setdefault(measure.told, f"{measure.told} {cell.text} ({cell.word})")
    return "; ".join(parts.values())
