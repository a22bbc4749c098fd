"""Training in several processes, on CPUs (two processes, gloo)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subquad.distill.callbacks import read_log

from .tiny import STEPS
from .two_processes import run_both_stages

pytestmark = pytest.mark.slow


def launch(*arguments: str | Path) -> None:
    script = Path(__file__).with_name("two_processes.py")
    env = os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_ddp_trains_as_one_process_that_accumulates_does(tmp_path):
    run_both_stages(tmp_path / "one", accumulated=2)
    launch("ddp", tmp_path / "two")
    for stage in ("stage1", "stage2"):
        one, two = (read_log(tmp_path / name / "log.jsonl", stage) for name in ("one", "two"))
        assert [line["tokens"] for line in one] == [line["tokens"] for line in two]
        figures = [torch.tensor([[line["loss"], line["grad_norm"]] for line in lines]) for lines in (one, two)]
        torch.testing.assert_close(*figures, rtol=1e-4, atol=0)
        files = (tmp_path / name / stage / f"checkpoint-{STEPS}" / "model.safetensors" for name in ("one", "two"))
        weights = [load_file(file) for file in files]
        assert weights[0].keys() == weights[1].keys()
        for name, weight in weights[0].items():
            assert (weights[1][name] - weight).norm() <= 1e-3 * weight.norm() + 1e-6, name


def test_fsdp2_gives_the_gradients_of_one_process():
    launch("fsdp")
