"""The section of a report on what each layer has become."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

from subquad.eval.layers import TASK, LayerFacts, layers_of
from subquad.eval.niah.tables import model_label
from subquad.eval.plots import plot_layers
from subquad.eval.records import EvalRecord
from subquad.eval.report.blocks import NOTHING, Block, Cell, Figures, Heading, Missing, Section, Table
from subquad.eval.report.commands import eval_command
from subquad.eval.report.data import RunData

_LONGEST_SHOWN = 1_000_000
_HEAD = ["Layer", "Relative error", "Half-lives per KV head (tokens)", "Far share", "by head", "Exact KV heads"]
_CAPTION = (
    "Relative error: squared error of the layer's output against its own softmax attention on the same input, as a "
    "share of that output's power. Half-life: tokens after which the decay of a head has halved what it wrote, at its "
    "mean rate. Far share: part of the attention that goes beyond window, sinks and kept keys. "
    "Exact heads kept their softmax."
)


def layer_section(run: RunData, folder: Path) -> Section:
    """Return the section on the layers of every student.

    Args:
        run: The folder's content.
        folder: Where plots go.

    Returns:
        The section.
    """
    records = [record for record in run.by_task.get(TASK, {}).values() if layers_of(record)]
    blocks: list[Block] = []
    for record in records:
        if len(records) > 1:
            blocks.append(Heading(model_label(record.model)))
        layers = layers_of(record)
        plot = plot_layers(
            [layer.layer for layer in layers],
            [layer.relative_error for layer in layers],
            [fmean(layer.far_shares) if layer.far_shares else None for layer in layers],
            folder / f"layers_{record.model}.png",
        )
        blocks += [Figures([plot]), _table(record)]
    if not blocks:
        blocks.append(Missing("error, half-lives and far share of the layers", eval_command(run, "layers")))
    return Section("Layers", blocks)


def _table(record: EvalRecord) -> Table:
    rows = []
    for layer in layers_of(record):
        shares, exact, error, number = layer.far_shares, layer.exact_kv_heads, layer.relative_error, layer.layer
        rows.append(
            [
                Cell(str(number), number),
                Cell(f"{100 * error:.2f} %", error),
                _half_lives(layer),
                Cell(f"{fmean(shares):.1%}", fmean(shares)) if shares else NOTHING,
                Cell(f"{min(shares):.1%} to {max(shares):.1%}", max(shares)) if shares else NOTHING,
                Cell(", ".join(map(str, exact)) + " exact", len(exact)) if exact else NOTHING,
            ]
        )
    caption = f"{_CAPTION} Measured on {record.settings['tokens']:,} tokens."
    return Table(_HEAD, rows, caption=caption)


def _half_lives(layer: LayerFacts) -> Cell:
    lives = layer.half_lives
    if not lives:
        return Cell("no decay")
    values = [min(life or _LONGEST_SHOWN, _LONGEST_SHOWN) for life in lives]
    texts = ["over 1M" if value >= _LONGEST_SHOWN else _tokens(value) for value in values]
    return Cell(" · ".join(texts), median(values))


def _tokens(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
