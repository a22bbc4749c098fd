"""Read and write `results.json`, and collect what identifies the software and the device that made it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import ValidationError

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError
from subquad.eval.results import Results

RESULTS_FILE = "results.json"
PACKAGES = ("subquad", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy")


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages a result depends on (`not installed` where absent)."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def device_name(device: torch.device) -> str:
    """Return a device in words: the GPU's name, or the processor and its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"


def git_commit() -> str | None:
    """Return the commit of the checkout subquad runs from, `-dirty` appended with local changes, or None."""
    # An installed copy may lie inside somebody else's checkout, whose commit says nothing about subquad.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") if tracked else None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def save_results(results: Results, run_dir: Path) -> Path:
    """Write `results.json` so that a reader sees the old file or the whole new one.

    Args:
        results: What was measured.
        run_dir: The run's folder; created if missing.

    Returns:
        Path of the file.

    Raises:
        OutputError: The folder cannot be written.
    """
    path = run_dir / RESULTS_FILE
    atomic_file(path, (results.model_dump_json(indent=2) + "\n").encode())
    return path


def load_results(run_dir: Path) -> Results:
    """Read and check `results.json`.

    Args:
        run_dir: The run's folder.

    Returns:
        The results.

    Raises:
        OutputError: The file is missing, not JSON, or not the layout this version reads; all problems are listed.
    """
    path = run_dir / RESULTS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OutputError(
            f"{run_dir} has no {RESULTS_FILE}, so there is nothing to report. It is written when a run has been "
            "evaluated: finish the run, or give the folder of a finished one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise OutputError(
            f"{path} is damaged: not JSON at line {error.lineno}, column {error.colno} ({error.msg}). "
            "Evaluate the run again to rewrite it."
        ) from error
    try:
        return Results.model_validate(content)
    except ValidationError as error:
        problems = "\n".join(f"  {'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors())
        raise OutputError(
            f"{path} is not a results file of this version of subquad (layout 1):\n{problems}\n"
            "Evaluate the run again to rewrite it."
        ) from error
