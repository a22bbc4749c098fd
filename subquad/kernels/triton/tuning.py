"""Tile sizes per kernel, head width, powers and GPU generation: a table, filled from compiler reports.

Nothing is tuned at import or at the first call. `benchmarks/tune.py` measures candidates on a GPU and prints rows for
this table; `benchmarks/aot_report.py` shows registers, spills and shared memory of what stands here, without a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from subquad.kernels.backend import interpreting
from subquad.kernels.cost import flops_crossover
from subquad.kernels.counts import HeadShape


class Tile(NamedTuple):
    """Tile sizes of a kernel that walks pairs of tokens.

    Attributes:
        rows: Tokens per program (queries, or keys in the kernels for dk and dv).
        inner: Tokens of the other kind per step.
        num_warps: Warps per program.
        num_stages: Depth of the load pipeline.
        block: Width of a block of the products matrix (for `sums`: columns of the matrix of sums per program).
    """

    rows: int
    inner: int
    num_warps: int
    num_stages: int
    block: int = 8


class ScanTile(NamedTuple):
    """Tile sizes of the scan of product states: `block_i x block_j` rows per program, `tokens` per step."""

    block_i: int
    block_j: int
    tokens: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The tile sizes of every kernel for one GPU generation, head width and set of powers."""

    forward: Tile
    dq: Tile
    dk: Tile
    dv: Tile
    scan: ScanTile
    small_scan: ScanTile
    sums: Tile
    prepare: Tile


_INTERPRETER = Tiles(
    forward=Tile(16, 16, 4, 1),
    dq=Tile(16, 16, 4, 1),
    dk=Tile(16, 16, 4, 1),
    dv=Tile(16, 16, 4, 1),
    scan=ScanTile(16, 16, 16, 4, 1),
    small_scan=ScanTile(8, 8, 16, 4, 1),
    sums=Tile(16, 16, 4, 1, 16),
    prepare=Tile(16, 16, 4, 1),
)

# (compute capability, widest head width, highest power, bytes per operand of the matrix products): the tiles.
#
# No GPU has measured them. They are what the compiler (Triton 3.6 and 3.7) leaves without spills in any loop, the
# fastest by an estimate from the machine code: per token, the larger of the clocks to issue all instructions, the
# clocks of the tensor cores and the clocks to read states and keys from the L2 cache (24 bytes per clock and
# multiprocessor), plus, since a program waits for itself at barriers, the smaller of the first two over the programs
# that fit one multiprocessor. That decides:
#   - 128 rows and 8 warps on Hopper at power 2: one program per multiprocessor, but half the reads of states, which 64
#     rows would wait for. On Ampere, with half the tensor rate over the same cache, two or three programs of 64 rows
#     and 4 warps are ahead at width 64 and, for the forward kernel and dk, at width 128.
#   - 4 warps at power 1 where they do not spill: no products are read, and registers allow two or three programs.
#   - `inner` 64 where it fits: fewer barriers per pair. Two stages on Hopper; on Ampere three, whose loads are slower.
#   - scans of 16 x 16 rows, the fewest reads per product, where 8 warps hold them; else 16 x 8.
# Four-byte operands are three tf32 products each: at width 128 they spill whatever the tile, so theirs are such that
# shared memory suffices. Rows of 80 also serve chips with 99 KiB of it (8.6, 8.9, 12.x) and stay within that.
_TABLE: dict[tuple[int, int, int, int], Tiles] = {
    (80, 64, 1, 2): Tiles(
        forward=Tile(64, 32, 4, 3),
        dq=Tile(64, 32, 4, 3),
        dk=Tile(64, 32, 4, 3),
        dv=Tile(64, 32, 4, 3),
        scan=ScanTile(16, 16, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 2, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 64, 2, 2): Tiles(
        forward=Tile(64, 32, 4, 3),
        dq=Tile(64, 32, 4, 3),
        dk=Tile(64, 32, 4, 3),
        dv=Tile(64, 32, 4, 3),
        scan=ScanTile(16, 16, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 2, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 128, 1, 2): Tiles(
        forward=Tile(128, 32, 8, 2),
        dq=Tile(128, 32, 8, 2),
        dk=Tile(64, 32, 4, 3),
        dv=Tile(128, 32, 8, 3),
        scan=ScanTile(16, 8, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 128, 2, 2): Tiles(
        forward=Tile(64, 32, 4, 3),
        dq=Tile(128, 32, 8, 3),
        dk=Tile(64, 32, 4, 3),
        dv=Tile(128, 32, 8, 3),
        scan=ScanTile(16, 8, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 64, 1, 2): Tiles(
        forward=Tile(128, 32, 4, 2),
        dq=Tile(64, 32, 4, 2),
        dk=Tile(64, 32, 4, 2),
        dv=Tile(64, 32, 4, 2),
        scan=ScanTile(16, 16, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 2, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 64, 2, 2): Tiles(
        forward=Tile(128, 64, 8, 2),
        dq=Tile(128, 32, 8, 2),
        dk=Tile(128, 32, 8, 2),
        dv=Tile(128, 64, 8, 2),
        scan=ScanTile(16, 16, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 2, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 128, 1, 2): Tiles(
        forward=Tile(64, 32, 4, 2),
        dq=Tile(64, 32, 4, 2),
        dk=Tile(64, 32, 4, 2),
        dv=Tile(128, 32, 8, 2),
        scan=ScanTile(16, 8, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 128, 2, 2): Tiles(
        forward=Tile(128, 32, 8, 2),
        dq=Tile(128, 32, 8, 2),
        dk=Tile(128, 32, 8, 2),
        dv=Tile(128, 64, 8, 2),
        scan=ScanTile(16, 8, 64, 8, 3),
        small_scan=ScanTile(8, 8, 64, 4, 3),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 64, 1, 4): Tiles(
        forward=Tile(32, 16, 4, 2),
        dq=Tile(32, 16, 4, 2),
        dk=Tile(32, 16, 4, 2),
        dv=Tile(32, 16, 4, 2),
        scan=ScanTile(8, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 8, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 64, 2, 4): Tiles(
        forward=Tile(32, 16, 4, 2),
        dq=Tile(32, 16, 4, 2),
        dk=Tile(32, 16, 4, 2),
        dv=Tile(32, 16, 4, 2),
        scan=ScanTile(8, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 8, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 128, 1, 4): Tiles(
        forward=Tile(32, 16, 4, 1),
        dq=Tile(32, 16, 4, 1),
        dk=Tile(32, 16, 4, 1),
        dv=Tile(32, 16, 4, 1),
        scan=ScanTile(8, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 8, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (80, 128, 2, 4): Tiles(
        forward=Tile(32, 16, 4, 1),
        dq=Tile(32, 16, 4, 1),
        dk=Tile(32, 16, 4, 1),
        dv=Tile(32, 16, 4, 1),
        scan=ScanTile(8, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 8, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 64, 1, 4): Tiles(
        forward=Tile(128, 32, 8, 2),
        dq=Tile(128, 32, 8, 2),
        dk=Tile(128, 32, 8, 2),
        dv=Tile(128, 32, 8, 2),
        scan=ScanTile(16, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 4, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 64, 2, 4): Tiles(
        forward=Tile(128, 32, 8, 2),
        dq=Tile(128, 32, 8, 2),
        dk=Tile(128, 32, 8, 2),
        dv=Tile(128, 32, 8, 2),
        scan=ScanTile(16, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 4, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 128, 1, 4): Tiles(
        forward=Tile(64, 16, 8, 1),
        dq=Tile(64, 16, 8, 1),
        dk=Tile(64, 16, 8, 1),
        dv=Tile(64, 16, 8, 1),
        scan=ScanTile(16, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 4, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
    (90, 128, 2, 4): Tiles(
        forward=Tile(64, 16, 8, 1),
        dq=Tile(64, 16, 8, 1),
        dk=Tile(64, 16, 8, 1),
        dv=Tile(64, 16, 8, 1),
        scan=ScanTile(16, 8, 32, 8, 2),
        small_scan=ScanTile(8, 8, 32, 4, 2),
        sums=Tile(32, 32, 4, 1, 32),
        prepare=Tile(64, 64, 4, 1),
    ),
}
# Chips with fewer bytes of shared memory per program than others of about their generation.
_SMALL_SHARED = 12


def tiles_for(capability: int, head_dim: int, order: int, itemsize: int) -> Tiles:
    """Return the tiles for a GPU: the nearest row of the table.

    Args:
        capability: 80 for Ampere, 90 for Hopper, ...; the row for the newest generation not above it is taken, but 12.x
            has the shared memory of 8.6.
        head_dim: The wider of key and value width, at most 128.
        order: Highest power.
        itemsize: Bytes per operand of the matrix products, 2 or 4.

    Returns:
        The tiles.
    """
    known = sorted({key[0] for key in _TABLE})
    generation = max((known_one for known_one in known if known_one <= capability), default=known[0])
    if capability // 10 == _SMALL_SHARED:
        generation = known[0]
    return _TABLE[generation, 64 if head_dim <= 64 else 128, min(max(order, 1), 2), itemsize]


def tiles_on(device: torch.device, head_dim: int, order: int, itemsize: int) -> Tiles:
    """Return the tiles for a device; the interpreter gets tiny ones. Arguments as in `tiles_for`."""
    if interpreting():
        return _INTERPRETER
    return tiles_for(_capability(device), head_dim, order, itemsize)


def default_chunk_size(head_dim: int, num_groups: int) -> int:
    """Return the tokens per chunk at which reading and writing states costs less than computing with them.

    Per token a chunk of C costs `4 D e / C` bytes of state traffic and `2 d C G` operations inside the chunk (D product
    rows, G query heads per key/value head): wide heads and few query heads want long chunks.
    """
    return (512 if head_dim <= 64 else 1024) // (1 if num_groups < 4 else 2)


@functools.cache
def switch_len(head_dim: int, num_groups: int, orders: tuple[int, ...]) -> int:
    """Return the length up to which one chunk over all tokens, quadratic, needs no more operations than many chunks.

    Both run the same code for pairs, and one chunk costs what causal softmax attention does: `D (1 + 1 / G)` tokens at
    power 2 with D product rows (`cost.py`).
    """
    shape = HeadShape(head_dim, head_dim, num_groups, orders)
    return flops_crossover(shape, default_chunk_size(head_dim, num_groups)) - 1


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
