"""What training takes: rows that can be counted and indexed, or a stream of them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from datasets import IterableDataset


class MapRows(Protocol):
    """Rows in memory or on disk: a `datasets.Dataset`, a `torch.utils.data.Dataset` with a length, a list."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]:
        """Return a row."""


TokenRows: TypeAlias = "MapRows | IterableDataset"


def is_counted(rows: TokenRows) -> TypeGuard[MapRows]:
    """Return whether rows have a length and can be indexed; a stream of `datasets` has neither."""
    return isinstance(rows, Sized)


def first_row(rows: TokenRows) -> Mapping[str, Tensor]:
    """Return the first row; a stream reads as far as it needs for that."""
    return rows[0] if is_counted(rows) else next(iter(rows))
