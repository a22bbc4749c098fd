"""Measure candidate tile sizes of every kernel on this GPU and print rows for the table in `tuning.py`.

    python benchmarks/tune.py                                # all rows; compiles some 2,000 kernels
    python benchmarks/tune.py --head-dim 64 --order 2        # one row
    python benchmarks/tune.py --kernel scan --dtype float32  # one kernel, three tf32 products
    python benchmarks/tune.py --dry-run                      # what would be measured; needs no GPU

The launches of a training step are timed as they are, on tensors filled with noise, each candidate in turns with the
tile that the table has. A row serves every score of its highest power, so the times of those scores are added. What
the table has stays unless a candidate is at least 2 % faster.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

# From a checkout: neither this folder's parent nor an install need be on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.suite.hardware import Call, Hardware, open_hardware
from benchmarks.suite.timing import measure
from subquad.kernels.triton.tuning import ScanTile, Tile, Tiles, tiles_for

if TYPE_CHECKING:
    from subquad.kernels.triton.launch import Launch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Scores by highest power.
SCORES: Mapping[int, tuple[tuple[int, ...], ...]] = {1: ((1,),), 2: ((2,), (0, 1, 2))}
TOKENS = 16384
KV_HEADS = 8
# So few that large blocks of the scan would leave most of the GPU idle.
FEW_KV_HEADS = 1
_BUDGET_MS = 60.0
_WORTH_CHANGING = 0.98
_STANDING = "table"
_KERNELS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "dq": ("dq",),
    "dk": ("dk",),
    "dv": ("dv",),
    "scan": ("scan_products",),
    "small_scan": ("scan_products",),
    "sums": ("sum_rest",),
    "prepare": ("prepare_keys", "prepare_gradients", "even_sums"),
}


@dataclass(frozen=True)
class Row:
    """A row of the table: its key and the tiles that stand there.

    Attributes:
        arch: Compute capability of the GPU, times 10.
        head_dim: 64 or 128.
        order: Highest power.
        dtype: Of q, k and v.
        tiles: The tiles that the table has for it.
    """

    arch: int
    head_dim: int
    order: int
    dtype: torch.dtype
    tiles: Tiles

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The key in the table."""
        return self.arch, self.head_dim, self.order, self.dtype.itemsize


def candidates(field: str, row: Row) -> list[Tile | ScanTile]:
    """Return the tile sizes worth a measurement.

    Args:
        field: A field of `Tiles`.
        row: The row of the table; 4-byte operands need smaller tiles.

    Returns:
        Tiles; empty for the scan below power 2, which has none.
    """
    small = row.dtype.itemsize > 2
    warps = (4, 8)
    if field in ("scan", "small_scan"):
        blocks = ((16, 16), (16, 8), (8, 8)) if row.order == 2 else ()
        tokens = (16, 32) if small else (32, 64)
        return [ScanTile(*block, *rest) for block in blocks for rest in itertools.product(tokens, warps, (2, 3))]
    if field == "sums":
        return [Tile(rows, rows, *rest) for rows in (16, 32, 64) for rest in itertools.product(warps, (1, 2), (32, 64))]
    if field == "prepare":
        return [Tile(rows, rows, *rest) for rows in (32, 64) for rest in itertools.product(warps, (1,))]
    rows, inner = ((32, 64), (16, 32)) if small else ((64, 128), (32, 64))
    return [Tile(*sizes) for sizes in itertools.product(rows, inner, warps, (1, 2, 3))]


def launches_of(
    row: Row, field: str, tile: Tile | ScanTile, device: str = "cuda", tokens: int = TOKENS
) -> list[Launch]:
    """Return the launches of one kernel with a candidate's tile sizes, tensors filled with noise.

    Args:
        row: The row of the table.
        field: Which of its tiles the candidate replaces.
        tile: The candidate.
        device: Where the tensors are.
        tokens: Tokens of the sequence.

    Returns:
        Launches, not run.
    """
    # Here, because it needs triton: the dry run does without.
    from benchmarks.aot_report import kernel_name, training_step

    fields = {"scan": tile, "small_scan": tile} if field.endswith("scan") else {field: tile}
    found = []
    for powers in SCORES[row.order]:
        launches = training_step(
            row.head_dim,
            powers,
            row.tiles._replace(**fields),
            dtype=row.dtype,
            device=device,
            kv_heads=FEW_KV_HEADS if field == "small_scan" else KV_HEADS,
            seq_len=tokens,
        )
        found += [one for one in launches if kernel_name(one) in _KERNELS[field]]
    _fill(found)
    return found


def _fill(launches: Sequence[Launch]) -> None:
    """Give every tensor of numbers a value: zeros would draw less power than what is computed with."""
    tensors = {
        id(value): value for one in launches for value in one.arguments.values() if isinstance(value, torch.Tensor)
    }
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.normal_(std=0.1)


def measure_field(row: Row, field: str, hardware: Hardware) -> tuple[dict[str, float], dict[str, str]]:
    """Time the candidates for one field of a row.

    Args:
        row: The row of the table.
        field: A field of `Tiles`.
        hardware: The clock.

    Returns:
        By candidate, as the table would spell it, its time over that of the table's tile (where that one cannot run:
        milliseconds); and the errors of those that cannot run.
    """
    times: dict[str, float] = {}
    failures: dict[str, str] = {}
    for tile in candidates(field, row):
        # Two at a time: each holds the tensors of its launches.
        calls = {_STANDING: _call(row, field, getattr(row.tiles, field)), _text(tile): _call(row, field, tile)}
        timings, failed = measure(hardware, calls, _BUDGET_MS)
        failures |= failed
        if _text(tile) in timings:
            standing = timings[_STANDING].median_ms if _STANDING in timings else 1.0
            times[_text(tile)] = timings[_text(tile)].median_ms / standing
        del calls
        hardware.reset()
    return times, failures


def _call(row: Row, field: str, tile: Tile | ScanTile) -> Call:
    # Imported late, as above.
    from subquad.kernels.triton.launch import run

    launches: list[Launch] = []
    finite = torch.zeros(1)

    def run_all() -> torch.Tensor:
        # Made at the first call, where an error is the candidate's.
        if not launches:
            launches.extend(launches_of(row, field, tile))
        for one in launches:
            run(one)
        return finite

    return run_all


def choose(times: Mapping[str, float], standing_runs: bool) -> str | None:
    """Return the fastest candidate, or None where the table's tile is as good.

    Args:
        times: What `measure_field` returned.
        standing_runs: Whether the table's tile can run at all.

    Returns:
        A key of `times`.
    """
    fastest = min(times, key=times.__getitem__, default=None)
    if fastest is None or (standing_runs and times[fastest] > _WORTH_CHANGING):
        return None
    return fastest


def format_row(row: Row, chosen: Mapping[str, str]) -> str:
    """Return a row as the table has it.

    Args:
        row: The row.
        chosen: Tiles by field, as text; the others are those that stand in the table.

    Returns:
        Lines of Python.
    """
    fields = [f"        {field}={chosen.get(field, _text(getattr(row.tiles, field)))},\n" for field in Tiles._fields]
    return f"    {row.key}: Tiles(\n{''.join(fields)}    ),"


def _text(tile: Tile | ScanTile) -> str:
    values = list(tile)
    if isinstance(tile, Tile) and tile.block == Tile._field_defaults["block"]:
        values.pop()
    return f"{type(tile).__name__}({', '.join(map(str, values))})"


def tune(row: Row, fields: Sequence[str], hardware: Hardware) -> str:
    """Measure a row's candidates, print what they took, and return the row to paste.

    Args:
        row: The row of the table.
        fields: The fields to tune.
        hardware: The clock.

    Returns:
        Lines of Python.
    """
    chosen = {}
    for field in fields:
        times, failures = measure_field(row, field, hardware)
        better = choose(times, _STANDING not in failures)
        if better:
            chosen[field] = better
        print(f"{row.key} {field}: {better or 'stays'}; times relative to {_text(getattr(row.tiles, field))}")
        for name, time in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {time:8.3f}  {name}")
        for name, reason in failures.items():
            print(f"  {'-':>8}  {name}: {reason.splitlines()[0][:100]}", flush=True)
    return format_row(row, chosen)


def plan(rows: Sequence[Row], fields: Sequence[str]) -> Iterator[str]:
    """Describe what would be measured, line by line."""
    for row in rows:
        scores = " + ".join(str(powers) for powers in SCORES[row.order])
        yield f"row {row.key}: {TOKENS} tokens, {KV_HEADS} key/value heads of 4 queries each, powers {scores}"
        for field in fields:
            tiles = candidates(field, row)
            yield f"  {field}: {len(tiles)} candidates; the table has {_text(getattr(row.tiles, field))}"
            yield from (f"    {_text(tile)}" for tile in tiles)


def gpu_problem() -> str | None:
    """Return why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device; --dry-run prints what would be measured, aot_report.py needs no GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 runs the kernels on the CPU; unset it to measure them on the GPU"
    return None


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ends the program with a message where nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, action="append", choices=(64, 128), help="default: both")
    parser.add_argument("--order", type=int, action="append", choices=(1, 2), help="highest power; default: both")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="of q, k and v; default: both")
    parser.add_argument("--kernel", action="append", choices=Tiles._fields, help="default: all")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured, and measure nothing")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times 10 for --dry-run (default 90)")
    parsed = parser.parse_args(arguments)
    if not parsed.dry_run and (problem := gpu_problem()):
        parser.error(problem)
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Tune, or say what would be tuned.

    Args:
        arguments: Command-line arguments; None takes the process's.

    Returns:
        0.
    """
    parsed = parse_arguments(arguments)
    arch = parsed.arch
    if not parsed.dry_run:
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    keys = itertools.product(
        parsed.head_dim or (64, 128), parsed.order or (2, 1), parsed.dtype or ("bfloat16", "float32")
    )
    rows = [
        Row(arch, head_dim, order, DTYPES[name], tiles_for(arch, head_dim, order, DTYPES[name].itemsize))
        for head_dim, order, name in keys
    ]
    fields = parsed.kernel or list(Tiles._fields)
    if parsed.dry_run:
        print("\n".join(plan(rows, fields)))
        return 0
    hardware = open_hardware(torch.device("cuda"))
    print("\n".join([tune(row, fields, hardware) for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
