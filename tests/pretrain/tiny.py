"""A tiny recipe with text of its own, and (run as a script) a training that kills itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 32
STEPS = 10
SAVE_STEPS = 4
WORDS = ("heron", "water", "stands", "shallow", "the", "a", "river", "grey", "morning", "slowly", "reed", "bank")


def write_texts(folder: Path) -> dict[str, str]:
    """Write training and held-out text of random sentences; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for seed, part in enumerate(("train", "eval")):
        rng = np.random.default_rng(seed)
        sentences = (" ".join(rng.choice(WORDS, 8)) + ".\n" for _ in range(300))
        paths[part] = str(folder / f"{part}.txt")
        Path(paths[part]).write_text("".join(sentences))
    return paths


def base_content(texts: dict[str, str]) -> dict[str, Any]:
    """Return the sections of a tiny recipe, without name and mixer."""
    return {
        "model": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24},
        "tokenizer": {"vocab_size": 270},
        "data": {
            "train": {"kind": "text", "paths": [texts["train"]]},
            "eval": {"kind": "text", "paths": [texts["eval"]]},
            "seq_len": SEQ_LEN,
        },
        "training": {
            "tokens": STEPS * 2 * SEQ_LEN,
            "batch_size": 2,
            "learning_rate": 1e-2,
            "save_steps": SAVE_STEPS,
        },
        "trainer": {"logging_steps": 3},
        "eval": {"tokens": 8 * SEQ_LEN, "batch_size": 4},
    }


if __name__ == "__main__":
    import torch

    from subquad.pretrain.run import run_pretrain
    from subquad.pretrain.schema import load_pretrain_recipe
    from tests.distill.tiny import kill_in_second_save

    torch.set_num_threads(1)
    kill_in_second_save()
    run_pretrain(load_pretrain_recipe(sys.argv[1]))
