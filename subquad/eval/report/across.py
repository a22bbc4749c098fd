"""Several runs side by side: the rows of a report, a column for every run and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.errors import ConfigError
from subquad.eval.niah.tables import model_label
from subquad.eval.report.blocks import NOTHING, Block, Bullets, Cell, Code, Heading, Report, Section, Table, Text, cells
from subquad.eval.report.data import RunData, in_order
from subquad.eval.report.differences import differing
from subquad.eval.report.measures import TASKS, Measure, measures_of, metric_rows

UNLIKE = "†"
_LONGEST_VALUE = 40
_MOST_KEYS = 6
_DASH_MEANS = "–: not measured."


@dataclass(frozen=True)
class _Column:
    """A model of a run."""

    run: str
    model: str

    @property
    def title(self) -> str:
        return f"{self.run}: {model_label(self.model)}"


_ByRun = Mapping[str, Measure]


def compose_comparison(runs: Sequence[RunData]) -> Report:
    """Make one page of several runs.

    Args:
        runs: At least two, of different folders.

    Returns:
        The report. Values that were not measured like the first of their row are marked, and the row says what differs.

    Raises:
        ConfigError: Fewer than two runs, or one twice.
        OutputError: A record of the needle task has no readable cells.
    """
    folders = [run.folder.resolve() for run in runs]
    if len(set(folders)) < max(2, len(folders)):
        raise ConfigError(f"a comparison takes at least two different folders, got {', '.join(map(str, folders))}")
    named = _named(runs)
    rows = _rows({name: measures_of(run) for name, run in named.items()})
    tasks = _rows({name: _task_measures(run) for name, run in named.items()})
    unlike = _unlike_sentences([*rows, *(row for row in tasks if row[0] not in {label for label, _ in rows})])
    first = (
        f"Some values below were not measured alike; they are marked {UNLIKE} and must not be compared with the first "
        "value of their row. The first section says what differs."
        if unlike
        else "Every row was measured with the same settings in all runs that have it."
    )
    columns = [_Column(name, model) for name, run in named.items() for model in run.models]
    sections = [
        Section("What was not measured alike", [Bullets(unlike)] if unlike else [Text("Nothing differs.")]),
        Section("What each run cost and gained", _difference_blocks(rows, list(named))),
        Section("Every task", [_values_table(tasks, columns)] if tasks else [Text("No run has evaluation records.")]),
        Section("The runs", _run_blocks(named)),
    ]
    return Report(
        title=f"subquad comparison: {', '.join(named)}",
        subtitle=" · ".join(f"{name}: {run.folder}" for name, run in named.items()),
        headline=f"{len(named)} runs, the same rows for each.",
        success=None if not unlike else False,
        points=[first],
        summary=_values_table(rows, columns),
        sections=sections,
    )


def _named(runs: Sequence[RunData]) -> dict[str, RunData]:
    """Give every run a name of its own: its folder's where two have the same, or the whole path."""
    names = [run.name for run in runs]
    folders = [run.folder.resolve().name for run in runs]
    found: dict[str, RunData] = {}
    for run, name, folder in zip(runs, names, folders, strict=True):
        unique = name if names.count(name) == 1 else folder if folders.count(folder) == 1 else str(run.folder)
        found[unique if unique not in found else str(run.folder)] = run
    return found


def _task_measures(run: RunData) -> list[Measure]:
    return [row for task in run.by_task if task != "layers" for row in metric_rows(run, task, None)]


def _rows(by_run: Mapping[str, Sequence[Measure]]) -> list[tuple[str, _ByRun]]:
    """Bring the rows of several runs together by their names, in the order in which they appear first."""
    found: dict[str, dict[str, Measure]] = {}
    for run, measures in by_run.items():
        for measure in measures:
            found.setdefault(measure.name, {})[run] = measure
    return list(found.items())


def _values_table(rows: Sequence[tuple[str, _ByRun]], columns: Sequence[_Column]) -> Table:
    used = [c for c in columns if any(c.run in by_run and c.model in by_run[c.run].values for _, by_run in rows)]
    table = []
    for label, by_run in rows:
        unlike = _unlike(by_run)
        line = [Cell(label, note=next(iter(by_run.values())).note)]
        for column in used:
            value = by_run[column.run].values.get(column.model) if column.run in by_run else None
            if value is None:
                line.append(NOTHING)
            else:
                mark = f" {UNLIKE}" if (column.run, column.model) in unlike else ""
                line.append(Cell(value.text + mark, value.sort))
        table.append(line)
    caption = f"{_DASH_MEANS} {UNLIKE}: not measured like the first value of its row."
    return Table(["Measure", *(column.title for column in used)], table, caption=caption)


def _unlike(by_run: _ByRun) -> dict[tuple[str, str], list[str]]:
    """Return the names of the conditions in which values differ from the first value of a row."""
    found: dict[tuple[str, str], list[str]] = {}
    first: Mapping[str, Any] | None = None
    for name, measure in by_run.items():
        for model in in_order(measure.values):
            if model not in measure.conditions:
                continue
            if first is None:
                first = measure.conditions[model]
            names = differing(first, measure.conditions[model])
            if names:
                found[name, model] = names
    return found


def _unlike_sentences(rows: Sequence[tuple[str, _ByRun]]) -> list[str]:
    """Say for each row what was not measured alike, rows with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for label, by_run in rows:
        unlike = _unlike(by_run)
        if unlike:
            keys = list(dict.fromkeys(key for names in unlike.values() for key in names))
            shown = [TASKS] if TASKS in keys else keys[:_MOST_KEYS]
            more = f"; {len(keys) - len(shown)} more" if TASKS not in keys and len(keys) > len(shown) else ""
            reasons.setdefault("; ".join(_values_of(key, by_run) for key in shown) + more, []).append(label)
    return [f"{', '.join(labels)}: {reason}." for reason, labels in reasons.items()]


def _values_of(key: str, by_run: _ByRun) -> str:
    values: dict[str, list[str]] = {}
    for name, measure in by_run.items():
        for model, at in measure.conditions.items():
            if model in measure.values:
                values.setdefault(_brief(at.get(key)), []).append(f"{name} {model}")
    runs = {value: dict.fromkeys(owner.rsplit(" ", 1)[0] for owner in owners) for value, owners in values.items()}
    apart = sum(map(len, runs.values())) == len({run for owners in runs.values() for run in owners})
    owners_of = runs if apart else values
    return f"{key} is " + ", ".join(f"{value} for {' and '.join(owners)}" for value, owners in owners_of.items())


def _brief(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:12]}…"


def _difference_blocks(rows: Sequence[tuple[str, _ByRun]], runs: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    titles = (("Cost: student − teacher", "cost"), ("Gain: student − control", "gain"))
    for title, name in titles:
        table = []
        for label, by_run in rows:
            found = [getattr(by_run[run], name) if run in by_run else None for run in runs]
            if any(found):
                unlike = " " + UNLIKE if _unlike(by_run) else ""
                table.append([Cell(label + unlike), *(cell or NOTHING for cell in found)])
        if table:
            caption = f"{_DASH_MEANS} {UNLIKE}: the runs were not measured alike."
            blocks += [Heading(title), Table(["Measure", *runs], table, caption=caption)]
    return blocks or [Text("No run has a student beside its teacher or control.")]


def _run_blocks(named: Mapping[str, RunData]) -> list[Block]:
    rows = []
    for name, run in named.items():
        results = run.results
        if results is None:
            commits = dict.fromkeys(record.provenance.commit or "unknown" for record in run.records)
            rows.append(cells(name, str(run.folder), "an evaluation without a run", "–", "–", "–", ", ".join(commits)))
            continue
        mixers = ", ".join(f"{count} × {mixer}" for mixer, count in results.mixers.items())
        trained = f"{results.tokens.stage1:,} + {results.tokens.stage2:,}"
        machine = f"{results.device}, {results.dtype}, {results.seed}"
        commit = results.commit or "unknown"
        rows.append(cells(name, str(run.folder), results.source, mixers, trained, machine, commit))
    head = ["Run", "Folder", "Converted", "Mixers", "Tokens, stage 1 + 2", "Device, data type, seed", "Commit"]
    recipes = [Code(f"Recipe of {name}", run.recipe, "yaml") for name, run in named.items() if run.recipe is not None]
    return [Table(head, rows, text_columns=len(head)), *recipes]
