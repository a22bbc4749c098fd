"""Less to collect between trainings."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap():
    """The Trainer collects garbage in every training; half a second each with all modules of the suite loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
