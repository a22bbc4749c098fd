"""Fixtures of the op's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from subquad.kernels import chunked, ops


@pytest.fixture
def set_tile_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the tiles inside a chunk so small that short sequences have many."""

    def set_to(tile_size: int) -> None:
        monkeypatch.setattr(ops, "chunked_attention", functools.partial(chunked.chunked_attention, tile_size=tile_size))

    return set_to
