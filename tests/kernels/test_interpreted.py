"""Runs `tests/kernels/interpreted` in processes of their own, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_in_the_interpreter(file):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(FOLDER / file)]
    command += ["--import-mode=importlib", "-o", f"rootdir={ROOT}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    # 5 would be "no tests collected".
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
