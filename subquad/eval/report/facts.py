"""The sections of a report on training, samples, the recipe and the environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from subquad.eval.niah.tables import model_label
from subquad.eval.plots import plot_training
from subquad.eval.records import EvalRecord
from subquad.eval.report.blocks import (
    Block,
    Bullets,
    Cell,
    Code,
    Figures,
    Heading,
    Quote,
    Section,
    Table,
    Text,
    cells,
)
from subquad.eval.report.data import RunData
from subquad.eval.results import LOSS_LABELS, Results
from subquad.eval.style import format_seconds

LIMITS = (
    "Losses are in nats per token (natural logarithm) on held-out text; every model saw exactly the same tokens.",
    "Standard errors (±) of losses take a row of the packed text as the sampling unit. Rows of one document resemble "
    "each other, so they are a lower bound on the true uncertainty.",
    "A paired difference compares two models on the same rows; below two standard errors it counts as a tie.",
    "The window-only control has the teacher's weights and of the student's attention its window, its sinks and the "
    "heads that stay softmax: no kept keys and no far part. "
    "It costs no training, so a student must beat it to be worth anything.",
    "A low loss does not show that the model can look things up in a long context; the needle in a haystack does.",
)


def training_section(run: RunData, folder: Path) -> Section:
    """Return the training curves.

    Args:
        run: The folder's content.
        folder: Where the plots go.

    Returns:
        The section.
    """
    curves = [curve for curve in run.curves if len(curve.tokens) > 1]
    if curves:
        return Section(
            "Training", [Figures([plot_training(curve, folder / f"training_{curve.stage}.png") for curve in curves])]
        )
    reason = "this folder is not a run's" if run.results is None else "the training log holds none"
    return Section("Training", [Text(f"No training curves: {reason}.")])


def sample_section(results: Results) -> Section:
    """Return the greedy continuations."""
    blocks: list[Block] = [Text("The prompt comes first, set apart.", soft=True)]
    for sample in results.samples:
        blocks += [Heading(LOSS_LABELS[sample.model]), Quote(sample.prompt, sample.text)]
    return Section("Samples (greedy)", blocks)


def facts_section(run: RunData) -> Section:
    """Return what was run: recipe, environment, and the provenance of every record."""
    blocks: list[Block] = []
    if run.results is not None:
        blocks.append(_fact_table(_run_facts(run.results)))
    if run.records:
        blocks += [Heading("Evaluation records"), _fact_table(_record_facts(run.records)), _provenance(run.records)]
    if run.recipe is not None:
        blocks.append(Code("Recipe", run.recipe, "yaml"))
    else:
        blocks.append(Text("There is no recipe in this folder."))
    return Section("What was run", blocks)


def notes_section(run: RunData) -> Section:
    """Return the notes of the run and the limits of its numbers."""
    own = run.results.notes if run.results else []
    return Section("Notes and limits", [Bullets([*own, *run.log_notes, *LIMITS])])


def _fact_table(facts: Sequence[tuple[str, str]]) -> Table:
    return Table(["What", "Value"], [cells(*fact) for fact in facts], text_columns=2)


def _run_facts(results: Results) -> list[tuple[str, str]]:
    """Return (what, value) of everything needed to judge or repeat the run."""
    mixers = ", ".join(f"{count} × {name}" for name, count in results.mixers.items())
    facts = [
        ("Command", results.command),
        ("Converted checkpoint", results.source),
        ("Mixers (layers × kind)", mixers),
        ("Held-out text", f"{results.data}: {results.loss.num_tokens:,} tokens in {results.loss.num_rows:,} rows"),
        ("Training tokens, stage 1", f"{results.tokens.stage1:,}"),
        ("Training tokens, stage 2", f"{results.tokens.stage2:,}"),
        ("Calibration tokens", f"{results.tokens.calibration:,}"),
    ]
    facts += [(f"Time: {step}", format_seconds(seconds)) for step, seconds in results.wall_seconds.items()]
    facts += [
        ("Device, data type, seed", f"{results.device}, {results.dtype}, {results.seed}"),
        ("Commit", _commit(results.commit)),
        ("Versions", _versions(results.versions)),
        ("Created", results.created),
    ]
    return facts


def _record_facts(records: Sequence[EvalRecord]) -> list[tuple[str, str]]:
    """Return what records share, every value once."""
    sources = [record.provenance for record in records]
    facts = [("Command", command) for command in dict.fromkeys(source.command for source in sources)]
    facts += [("Commit", _commit(commit)) for commit in dict.fromkeys(source.commit for source in sources)]
    facts += [("Versions", text) for text in dict.fromkeys(_versions(source.versions) for source in sources)]
    return facts


def _commit(commit: str | None) -> str:
    return commit or "unknown (not run from a checkout)"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {number}" for package, number in versions.items())


def _provenance(records: Sequence[EvalRecord]) -> Table:
    head = [
        "Task",
        "Model",
        "Checkpoint",
        "Mode",
        "Weights",
        "Prompts hash",
        "Device",
        "Data type",
        "Seed",
        "Batch",
        "Time",
    ]
    rows = []
    for record in records:
        source = record.provenance
        texts = cells(
            record.task,
            model_label(record.model),
            source.checkpoint,
            source.mode or "as it stands",
            source.weights,
            source.prompts_hash[:12],
            source.device,
            source.dtype,
        )
        numbers = [
            Cell(str(source.seed), source.seed),
            Cell(str(source.batch_size), source.batch_size),
            Cell(format_seconds(source.wall_seconds), source.wall_seconds),
        ]
        rows.append([*texts, *numbers, Cell(source.created)])
    return Table([*head, "Seed", "Batch", "Time", "Created"], rows, text_columns=8)
