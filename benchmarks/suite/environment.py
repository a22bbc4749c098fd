"""What a row was measured on: GPU, driver, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
_UNKNOWN = "unknown"


def describe_run(settings: Settings, commit: str | None, command: list[str]) -> dict[str, Any]:
    """Return what every row of a run repeats.

    Args:
        settings: The run's settings.
        commit: The commit where the checkout cannot tell (an exported tree); None asks git.
        command: The command line.

    Returns:
        `gpu` (`cpu` at toy size), `driver`, `cuda`, versions, `commit`, `date` (UTC), `mode`, `seed`, `command`.
    """
    gpu, driver, capability = ("cpu", None, None) if settings.toy else _gpu()
    return {
        "gpu": gpu,
        "driver": driver,
        "capability": capability,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": commit or checkout_commit(ROOT),
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "mode": settings.mode,
        "seed": settings.seed,
        "command": " ".join(command),
    }


def checkout_commit(root: Path) -> str:
    """Return the short commit of a checkout, with `-dirty` if tracked files differ; `unknown` without git."""
    commit = _output(["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"])
    if commit is None:
        return _UNKNOWN
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed else commit


def _gpu() -> tuple[str, str, str]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return properties.name, (driver or _UNKNOWN).splitlines()[0], f"{properties.major}.{properties.minor}"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
