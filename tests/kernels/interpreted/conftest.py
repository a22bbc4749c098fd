"""These tests run the Triton kernels in Triton's interpreter, on the CPU.

The interpreter must be chosen before the kernels are imported, and kernels so imported cannot be compiled: hence a
process of their own, which `tests/kernels/test_interpreted.py` starts. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised tensors with NaN, so that a kernel that leaves a gap is noticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(3).isnan().all(), "torch no longer fills uninitialised memory"
    yield
    torch.use_deterministic_algorithms(False)
