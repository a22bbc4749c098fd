"""Fine-tuning runs of a few steps."""

from __future__ import annotations

from pathlib import Path

from subquad.eval.finetune import FinetuneSettings, run_glue_finetune


def settings(data_dir: Path, **changes) -> FinetuneSettings:
    values = {"tasks": ("sst2",), "data_dir": data_dir, "max_length": 64, "max_steps": 3, "learning_rate": 1e-2}
    return FinetuneSettings(**(values | changes))


def run(models, chosen: FinetuneSettings, folder: Path, progress=None):
    return run_glue_finetune(models, chosen, folder, command="subquad eval", progress=progress)
