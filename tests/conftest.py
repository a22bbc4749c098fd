"""Rules for every test: no network, and a reason where a test is skipped."""

import os

# before anything imports huggingface_hub, which reads it once
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
