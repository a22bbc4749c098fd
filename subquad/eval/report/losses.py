"""The sections of a report on held-out loss and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from subquad.eval.loss import LossResult, compare_losses, compare_losses_by_position, perplexity
from subquad.eval.loss_record import is_loss, unpack_loss
from subquad.eval.niah.tables import model_label
from subquad.eval.plots import Plot, PositionRow, crossover_sentence, plot_loss_by_position, plot_memory
from subquad.eval.report.blocks import DASH, NOTHING, Block, Cell, Figures, Heading, Missing, Section, Table, Text
from subquad.eval.report.commands import eval_command
from subquad.eval.report.data import ByModel, RunData
from subquad.eval.report.differences import Difference, conditions, differing
from subquad.eval.results import LOSS_LABELS, CacheTable, LossName, PairedDifference, Results
from subquad.eval.style import format_bytes, format_positions, with_error

LOSS_HEAD = ["Model", "Loss (nats/token)", "Perplexity", "Student minus this"]
MEMORY_HEAD = ["Tokens", "Key/value cache", "Student", "KV ÷ student", "How known"]


def loss_table(results: Results) -> list[list[str]]:
    """Return the rows (model, loss, perplexity, student minus this model) of the table of losses, as text."""
    rows = []
    for name, value in results.loss.measured().items():
        error = results.loss.standard_error.get(name)
        loss = with_error(value, error)
        difference = results.difference("student", name)
        rows.append([LOSS_LABELS[name], loss, f"{perplexity(value):.2f}", format_difference(difference)])
    return rows


def memory_table(table: CacheTable) -> list[list[str]]:
    """Return the rows (tokens, key/value cache, student, ratio, how known) of the table of memory, as text."""
    return [
        [
            f"{length:,}",
            format_bytes(table.kv[length]),
            format_bytes(table.student[length]),
            f"{table.kv[length] / table.student[length]:.2f}×",
            "measured" if length in table.measured_lengths else "computed",
        ]
        for length in sorted(set(table.student) & set(table.kv))
    ]


def format_difference(pair: PairedDifference | None) -> str:
    """Return a paired difference as `-0.0281 ± 0.0021`, or a dash where there is none."""
    if pair is None:
        return DASH
    return with_error(pair.difference, pair.standard_error, sign="+")


def loss_section(run: RunData, folder: Path) -> Section:
    """Return the section on held-out loss, of the run itself and of the evaluation's texts.

    Args:
        run: The folder's content.
        folder: Where plots go.

    Returns:
        The section.
    """
    blocks: list[Block] = []
    if run.results is not None:
        blocks += _run_blocks(run.results, folder)
    for task, by_model in run.by_task.items():
        losses = {name: record for name, record in by_model.items() if is_loss(record)}
        if losses:
            blocks += _record_blocks(task, losses, folder)
    if not blocks:
        blocks.append(Missing("held-out loss", eval_command(run, "loss")))
    return Section("Held-out loss", blocks)


def _run_blocks(results: Results, folder: Path) -> list[Block]:
    rows = []
    for (name, value), texts in zip(results.loss.measured().items(), loss_table(results), strict=True):
        pair = results.difference("student", name)
        difference = NOTHING
        if pair is not None:
            difference = Difference(pair.difference, pair.standard_error, False, paired=True).cell(4)
        rows.append([Cell(texts[0]), Cell(texts[1], value), Cell(texts[2], perplexity(value)), difference])
    blocks: list[Block] = [Table(LOSS_HEAD, rows)]
    if results.loss.gap_closed is not None:
        share = f"{100 * results.loss.gap_closed:.1f} %"
        blocks.append(Text(f"Gap between the window-only control and the teacher closed: {share}."))
    rows_by_position = [
        PositionRow(bucket.start, bucket.end, bucket.num_tokens, _plain(bucket.loss), _plain(bucket.error_to_teacher))
        for bucket in results.by_position
    ]
    return blocks + _position_blocks(rows_by_position, folder / "loss_by_position.png")


def _plain(values: Mapping[LossName, float]) -> dict[str, float]:
    return {str(name): value for name, value in values.items()}


def _record_blocks(task: str, by_model: ByModel, folder: Path) -> list[Block]:
    first = next(iter(by_model.values()))
    alike = {name: r for name, r in by_model.items() if not differing(conditions(first), conditions(r))}
    results = {name: unpack_loss(record.details) for name, record in alike.items()}
    rows = []
    for name, record in by_model.items():
        loss, perplexities = record.metrics["loss"], record.metrics["perplexity"]
        rows.append(
            [
                Cell(model_label(name)),
                Cell(with_error(loss.value, loss.standard_error), loss.value),
                Cell(f"{perplexities.value:.2f}", perplexities.value),
                _student_minus(results, name),
            ]
        )
    blocks: list[Block] = [
        Heading(f"Task {task}: {first.settings.get('data', 'text')}, {first.metrics['loss'].num:,} tokens"),
        Table(LOSS_HEAD, rows),
    ]
    others = [model_label(name) for name in by_model if name not in alike]
    if others:
        blocks.append(Text(f"On other rows or with other settings, so not compared: {', '.join(others)}."))
    return blocks + _position_blocks(position_rows(results), folder / f"loss_by_position_{task}.png")


def _student_minus(results: Mapping[str, LossResult], name: str) -> Cell:
    if name == "student" or name not in results or "student" not in results:
        return NOTHING
    pair = compare_losses(results["student"], results[name])
    return Difference(pair.difference, pair.standard_error, False, paired=True).cell(4)


def position_rows(results: Mapping[str, LossResult]) -> list[PositionRow]:
    """Return losses by position of models that were measured on the same rows.

    Args:
        results: Evaluations by model.

    Returns:
        A row per bucket that holds a token.
    """
    columns = {name: result.by_position for name, result in results.items()}
    teacher = results.get("teacher")
    pairs = {} if teacher is None else {n: compare_losses_by_position(r, teacher) for n, r in results.items()}
    rows = []
    for index, bucket in enumerate(next(iter(columns.values()))):
        errors = {name: pair[index].standard_error for name, pair in pairs.items() if name != "teacher"}
        rows.append(
            PositionRow(
                bucket.start,
                bucket.end,
                bucket.num_tokens,
                {name: column[index].loss for name, column in columns.items()},
                {name: error for name, error in errors.items() if error is not None},
            )
        )
    return rows


def _position_blocks(rows: Sequence[PositionRow], path: Path) -> list[Block]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row.loss))
    table = [
        [
            Cell(format_positions(row.start, row.end), row.start),
            Cell(f"{row.num_tokens:,}", row.num_tokens),
            *(Cell(f"{row.loss[name]:.4f}", row.loss[name]) if name in row.loss else NOTHING for name in names),
        ]
        for row in rows
    ]
    blocks: list[Block] = [Heading("By position in the document")]
    if len(rows) > 1:
        blocks.append(Figures([plot_loss_by_position(rows, path)]))
    return [*blocks, Table(["Position", "Tokens", *map(model_label, names)], table)]


def memory_section(results: Results | None, folder: Path) -> Section:
    """Return the section on the memory of generation.

    Args:
        results: The run's results.
        folder: Where the plot goes.

    Returns:
        The section.
    """
    title = "Memory while generating"
    if results is None or results.cache_bytes is None:
        return Section(title, [Text("Memory was not measured: a run measures it at its end.")])
    table = results.cache_bytes
    lengths = sorted(set(table.student) & set(table.kv))
    rows = []
    for length, texts in zip(lengths, memory_table(table), strict=True):
        sorts = [length, table.kv[length], table.student[length], table.kv[length] / table.student[length], None]
        rows.append([Cell(text, sort) for text, sort in zip(texts, sorts, strict=True)])
    plot: Plot = plot_memory(table, folder / "memory.png")
    return Section(title, [Text(crossover_sentence(table)), Figures([plot]), Table(MEMORY_HEAD, rows)])
