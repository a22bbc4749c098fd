"""Runs of lm-eval's tasks, and tasks of one's own."""

from __future__ import annotations

from pathlib import Path

import yaml

from subquad.eval.harness import LmEvalSettings, run_lm_eval


def measure(models, folder, **settings):
    return run_lm_eval(models, LmEvalSettings(**settings), folder, command="subquad eval")


def write_yaml(folder: Path, name: str, **definition) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
