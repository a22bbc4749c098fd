"""Where the records of tests come from."""

from __future__ import annotations

from subquad.eval.records import Provenance


def tiny_provenance(**changes) -> Provenance:
    values = {
        "weights": "0",
        "checkpoint": "tiny",
        "mode": None,
        "versions": {},
        "commit": None,
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "batch_size": 1,
        "prompts_hash": "",
        "command": "",
        "created": "",
        "wall_seconds": 0.0,
    }
    return Provenance(**(values | changes))
