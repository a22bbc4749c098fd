"""A conversion plan as tables for the console."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from subquad.convert.plan import ConversionPlan
from subquad.kernels.cost import DEFAULT_CHUNK_SIZE


def render_plan(plan: ConversionPlan) -> Group:
    """Return the plan as tables for a rich console: every layer with totals, then the crossovers of every mixer."""
    tables = [_layer_table(plan)]
    if plan.mixers:
        tables.append(_work_table(plan))
    return Group(*tables)


def _layer_table(plan: ConversionPlan) -> Table:
    totals = [plan.total_cache_bytes(length) for length in plan.lengths]
    scale, unit = (1e6, "MB") if max(map(max, totals), default=0) >= 1e6 else (1e3, "kB")
    dtype = str(plan.dtype).removeprefix("torch.")
    caption = (
        f"{unit} of one sequence's cache after so many tokens, new / KV ({dtype}). "
        "'smaller from': the length from which on the new cache is the smaller one."
    )
    if not plan.family.causal:
        caption = "An encoder: every token sees all others, and there is no cache."
    table = Table(title=f"{plan.family.name}, {len(plan.layers)} layers", caption=caption)

    def pair(sizes: tuple[int, int]) -> str:
        return " / ".join(f"{size / scale:,.2f}" for size in sizes)

    table.add_column("layer", justify="right")
    table.add_column("change", overflow="fold")
    table.add_column("parameters added", justify="right")
    for length in plan.lengths:
        table.add_column(f"at {length:,}", justify="right")
    if plan.family.causal:
        table.add_column("smaller from", justify="right")
    for layer in plan.layers:
        change = f"softmax → {layer.label}" if layer.converted else "softmax, unchanged"
        sizes = [pair((layer.cache_bytes[length], layer.kv_bytes[length])) for length in plan.lengths]
        row = (str(layer.layer_idx), change, f"{layer.added_parameters:,}", *sizes)
        if plan.family.causal:
            row = (*row, _length(layer.crossover) if layer.converted else "-")
        table.add_row(*row)
    table.add_section()
    table.add_row("all", f"{len(plan.mixers)} converted", f"{plan.added_parameters:,}", *map(pair, totals))
    return table


def _work_table(plan: ConversionPlan) -> Table:
    caption = (
        "Counts of the attention itself, not times. FLOPs: against causal softmax, in chunks of "
        f"{DEFAULT_CHUNK_SIZE} tokens. Bytes: the state read and written at every token, the exact keys read, "
        f"against a key/value cache in {str(plan.dtype).removeprefix('torch.')}."
    )
    columns: tuple[str, ...] = ("prefill FLOPs", "training FLOPs", "decode bytes")
    if not plan.family.causal:
        caption = "Counts of the attention itself, not times: one state of all keys against all pairs, forward."
        columns = ("forward FLOPs",)
    table = Table(title="Less work than softmax from so many tokens on", caption=caption)
    table.add_column("mixer", overflow="fold")
    for name in ("layers", *columns):
        table.add_column(name, justify="right")
    by_label = {layer.label: layer for layer in plan.layers if layer.converted}
    for label, layer in by_label.items():
        count = sum(other.converted and other.label == label for other in plan.layers)
        lengths = (layer.prefill_crossover, layer.training_crossover, layer.decode_crossover)
        table.add_row(label, str(count), *map(_length, lengths[: len(columns)]))
    return table


def _length(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"
