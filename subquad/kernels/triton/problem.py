"""One call of the op as the kernels see it: tensors, sizes, and the arguments that the launches share."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.kernels.backend import Precision
from subquad.kernels.state import num_rows
from subquad.kernels.triton.tuning import ScanTile, Tile, Tiles, num_processors

_LANGUAGE_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Scan programs below this many per processor leave it idle: then smaller blocks make more of them.
_MIN_PROGRAMS_PER_PROCESSOR = 2


class Operands(NamedTuple):
    """What the matrix products take: the dtype, and the precision of float32 products."""

    dtype: torch.dtype
    precision: str


def operands_for(dtype: torch.dtype, precision: Precision) -> Operands:
    """Choose the operands of the matrix products.

    Products of two float16 can overflow, so float16 goes through tf32, which holds its 11 bits. Float32 is split in
    three tf32 products. `high` does the same for every dtype: 2Mamba's weak spot is a query orthogonal to the common
    mean of its keys, where bfloat16 products cancel.

    Args:
        dtype: dtype of k and v.
        precision: `default` or `high`.

    Returns:
        The choice.
    """
    if precision == "high" or dtype == torch.float32:
        return Operands(torch.float32, "tf32x3")
    return Operands(torch.float32, "tf32") if dtype == torch.float16 else Operands(dtype, "tf32")


class States(NamedTuple):
    """The states of a segment's chunks: before each chunk (forward) or, as gradients, after each (backward).

    Attributes:
        products: `[B * Hkv, chunks, d (d + 1) / 2, e]` in the operands' dtype: the value rows of power 2; or None.
        rest: `[B * Hkv, chunks, r * e + rows]` float32: the r value rows of powers 0 and 1, then all normaliser rows.
        first_reads: Whether the state at the segment's open end can differ from 0.
    """

    products: Tensor | None
    rest: Tensor
    first_reads: bool


class Carry(NamedTuple):
    """A state between two segments: `values [B * Hkv, rows, e]` and `normaliser [B * Hkv, rows]`, float32."""

    values: Tensor
    normaliser: Tensor


class Outputs(NamedTuple):
    """Where the forward kernel writes.

    Attributes:
        out: `[B, Tq, H, e]`.
        normaliser: `[B, Tq, H]` float32, the sum of weights.
        safe: `[B, Tq, H]` float32, what `out` was divided by (inf where no key is seen); empty without `normalize`.
        normalize: Whether to divide.
    """

    out: Tensor
    normaliser: Tensor
    safe: Tensor
    normalize: bool


@dataclass(frozen=True)
class Problem:
    """One call.

    Attributes:
        q: `[B, Tq, H, d]` contiguous, like the next two.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, e]`, multiplied by the key weight.
        weight: `[B, T, Hkv]` float32, the key weight.
        high: `[B * Hkv, padded T]` float32, log2 of the decay since the start of the token's chunk, coarse part; None
            without decay.
        low: The fine part.
        coefs: `[3, H]` float32; 0 for powers that are not there.
        orders: The powers that have state rows.
        scale: Factor on q . k.
        chunk_size: Tokens per chunk, a multiple of every tile.
        operands: Of the matrix products.
        tiles: Tile sizes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    high: Tensor | None
    low: Tensor | None
    coefs: Tensor
    orders: tuple[int, ...]
    scale: float
    chunk_size: int
    operands: Operands
    tiles: Tiles

    @property
    def seq_len(self) -> int:
        return self.k.shape[1]

    @property
    def num_states(self) -> int:
        """Sequences times key/value heads."""
        return self.k.shape[0] * self.k.shape[2]

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def num_rows(self) -> int:
        return num_rows(self.k.shape[3], self.orders)

    @property
    def num_rest_rows(self) -> int:
        """State rows of powers 0 and 1, which come first."""
        return num_rows(self.k.shape[3], tuple(order for order in self.orders if order < 2))

    @functools.cached_property
    def squares(self) -> Tensor:
        """`[B, T, Hkv]` float32, the key weight times `|k|^2`, for the guard of the division."""
        return torch.linalg.vector_norm(self.k, dim=-1, dtype=torch.float32).square() * self.weight

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time constants that all kernels share."""
        width, value_width = self.k.shape[3], self.v.shape[3]
        return {
            "G": self.num_groups,
            "d": width,
            "e": value_width,
            "BD": padded(width),
            "BE": padded(value_width),
            "HAS0": int(0 in self.orders),
            "HAS1": int(1 in self.orders),
            "HAS2": int(2 in self.orders),
            "DECAY": self.high is not None,
            "OPERAND": _LANGUAGE_DTYPE[self.operands.dtype],
            "PRECISION": self.operands.precision,
        }


@dataclass(frozen=True)
class Segment:
    """The keys from `start` (a chunk's first) up to `stop`, and the queries at their positions."""

    problem: Problem
    start: int
    stop: int

    @property
    def num_chunks(self) -> int:
        return math.ceil((self.stop - self.start) / self.problem.chunk_size)

    @property
    def padded_len(self) -> int:
        """Tokens of the segment's workspaces: whole chunks."""
        return self.num_chunks * self.problem.chunk_size

    def num_query_tiles(self, rows: int) -> int:
        """Return the number of tiles that hold a query, the first one aligned to the keys."""
        ahead = self.problem.seq_len - self.problem.q.shape[1]
        first = max(self.start, ahead // rows * rows)
        return max(math.ceil((self.stop - first) / rows), 0)

    def workspace(self, *shape: int, heads: str = "kv", dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor `[B * heads, *shape]`, in the operands' dtype unless given."""
        problem = self.problem
        sequences = problem.num_states * (problem.num_groups if heads == "q" else 1)
        return problem.k.new_empty(sequences, *shape, dtype=dtype or problem.operands.dtype)

    def arguments(self) -> dict[str, Any]:
        """The arguments that all kernels over tokens share."""
        problem = self.problem
        return {
            "p_high": problem.high,
            "p_low": problem.low,
            "T": problem.seq_len,
            "start": self.start,
            "stop": self.stop,
            "chunk_size": problem.chunk_size,
            "num_chunks": self.num_chunks,
            "decay_len": 0 if problem.high is None else problem.high.shape[1],
            "HKV": problem.k.shape[2],
            **problem.constants,
        }

    def pair_arguments(self, tile: Tile) -> dict[str, Any]:
        """The arguments of the kernels that walk pairs of tokens."""
        problem = self.problem
        return {
            **self.arguments(),
            "p_q": problem.q,
            "p_k": problem.k,
            "p_v": problem.v,
            "p_weight": problem.weight,
            "p_coefs": problem.coefs,
            "scale": problem.scale,
            "TQ": problem.q.shape[1],
            "BT": tile.rows,
            "BS": tile.inner,
            "BP": tile.block,
        }

    def state_arguments(self, states: States | None, tile: Tile) -> dict[str, Any]:
        """The arguments of the kernels that read states."""
        if states is None:
            return {
                "p_products": None,
                "p_rest": None,
                "p_pairs": None,
                "num_pairs": 0,
                "first_reads": 0,
                "STATE": False,
            }
        pairs = block_pairs(self.problem.k.shape[3], tile.block, tile.block, self.problem.k.device)
        return {
            "p_products": states.products,
            "p_rest": states.rest,
            "p_pairs": pairs,
            "num_pairs": pairs.shape[0],
            "first_reads": int(states.first_reads),
            "STATE": True,
        }


def padded(width: int) -> int:
    """Return the smallest power of two, at least 16, that holds `width`: what a matrix product can take."""
    return max(16, 1 << (width - 1).bit_length())


@functools.lru_cache(maxsize=64)
def block_pairs(head_dim: int, block_i: int, block_j: int, device: torch.device) -> Tensor:
    """Return the blocks `(i0, j0)` that cover the upper triangle of a `head_dim` square matrix, `[blocks, 2]` int32."""
    corners = [(i, j) for i in range(0, head_dim, block_i) for j in range(0, head_dim, block_j) if j + block_j - 1 >= i]
    # Outside inference mode: the table is cached and must serve later calls too.
    with torch.inference_mode(False):
        return torch.tensor(corners, dtype=torch.int32, device=device)


def scan_tile(problem: Problem) -> ScanTile:
    """Return the scan's tile, with smaller blocks where they are needed to fill the GPU."""
    tile = problem.tiles.scan
    head_dim, device = problem.k.shape[3], problem.k.device
    programs = problem.num_states * block_pairs(head_dim, tile.block_i, tile.block_j, device).shape[0]
    if programs >= _MIN_PROGRAMS_PER_PROCESSOR * num_processors(device):
        return tile
    return problem.tiles.small_scan
