"""`subquad doctor`: what it finds, what it says about it, and its exit code."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console

from subquad import cli, environment
from subquad.doctor import Diagnosis, Examined, diagnose, render_diagnosis
from subquad.environment import Device, Package, driver_version, find_packages, select_devices
from subquad.errors import ConfigError
from subquad.kernels import ops
from subquad.kernels.backend import import_problem
from subquad.kernels.selfcheck import CheckResult
from subquad.kernels.selfcheck_compare import Check, Measured

ROOT = Path(__file__).resolve().parent.parent
HOPPER = Device("cuda:0", "NVIDIA H200", (9, 0), 150 * 2**30)
AMPERE = Device("cuda:0", "NVIDIA A100", (8, 0), 80 * 2**30)
KERNELS = Check(implementation="triton", dtype=torch.bfloat16, head_dim=64)
FALLBACK = Check(implementation="torch", head_dim=32)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("SUBQUAD_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `subquad doctor` in this process; returns (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["subquad", "doctor", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run


def diagnosis_of(*results: CheckResult, device: Device = HOPPER, triton: str = "3.7.1", **changes) -> Diagnosis:
    examined = Examined(device=device, op="triton", op_reason="as asked", window="flex", results=results)
    packages = (Package("triton", triton, ">=3.6"),)
    found = Diagnosis(packages=packages, driver="570.1", gpu_problem=None, triton_problem=None, examined=(examined,))
    return replace(found, **changes)


def wrong(check: Check) -> CheckResult:
    measured = {"out": Measured(1e-3, 5e-3), "d k": Measured(0.5, 5e-3)}
    return CheckResult(check=check, status="failed", measured=measured, problems=("d k: relative error 5.0e-01",))


def right(check: Check) -> CheckResult:
    return CheckResult(check=check, status="ok", measured={"out": Measured(1e-3, 5e-3)})


def shown(diagnosis: Diagnosis) -> str:
    console = Console(width=400)
    with console.capture() as captured:
        console.print(render_diagnosis(diagnosis))
    return captured.get()


def test_a_sound_machine(command):
    code, out, err = command("--device", "cpu", "--seconds", "1000")
    assert code == 0
    assert out.splitlines()[-1] == "All checks passed (6)."
    assert torch.__version__ in out
    assert "torch: square, head_dim 32" in " ".join(out.split())
    assert "cpu: torch: window" in err


def test_json_is_all_there_is_on_standard_output(command):
    code, out, _ = command("--device", "cpu", "--json", "--seconds", "0")
    found = json.loads(out)
    assert (code, found["ok"], found["problems"], found["advice"]) == (0, True, [], [])
    (device,) = found["devices"]
    assert (device["name"], device["op"]["implementation"], device["window"]["implementation"]) == (
        "cpu",
        "torch",
        "torch",
    )
    assert [check["status"] for check in device["checks"]] == ["ok"] + 5 * ["no time"]
    measured = device["checks"][0]["measured"]["d log_decay"]
    assert 0 < measured["error"] < measured["limit"]


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu:1"])
def test_a_device_that_is_not_here(command, name):
    code, out, err = command("--device", name)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: there is no device '{name}'")
    assert "this machine has" in err
    assert "Traceback" not in err


def test_a_wrong_kernel_exits_with_1(command, monkeypatch):
    original = ops.chunked_attention

    def scaled(*arguments):
        joined, state = original(*arguments)
        return joined * torch.nan, state

    monkeypatch.setattr(ops, "chunked_attention", scaled)
    code, out, _ = command("--device", "cpu", "--json", "--seconds", "1000")
    found = json.loads(out)
    assert (code, found["ok"]) == (1, False)
    assert any(problem.startswith("cpu: torch: square, head_dim 32") for problem in found["problems"])
    assert found["devices"][0]["checks"][0]["measured"]["out"]["error"] is None  # JSON has no infinity
    assert found["advice"][-1] == "If it stays wrong, report it with the output of: subquad doctor --json"
    code, out, _ = command("--device", "cpu", "--seconds", "1000")
    assert (code, out.splitlines()[-1]) == (1, "4 of 6 checks failed.")


@pytest.mark.parametrize(
    "value, message", [("triton", "cannot run: "), ("fast", "it must be one of auto, torch, triton")]
)
def test_a_backend_that_cannot_run(command, monkeypatch, value, message):
    monkeypatch.setenv("SUBQUAD_BACKEND", value)
    code, out, _ = command("--device", "cpu", "--json", "--seconds", "1000")
    found = json.loads(out)
    assert code == 1
    assert found["devices"][0]["op"]["implementation"] is None
    assert message in found["problems"][0]


def run_doctor(environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run the command in a process of its own, started as the installed script starts it."""
    script = "import sys; sys.argv[:1] = ['subquad']\nfrom subquad.cli import main\nmain()"
    command = [sys.executable, "-c", script, "doctor", "--json", "--device", "cpu", "--seconds", "100"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment
    )


@pytest.mark.parametrize("error", ["RuntimeError('libtriton is broken')", "ImportError('undefined symbol: x')"])
def test_a_triton_that_cannot_be_imported(tmp_path, error):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"raise {error}")
    done = run_doctor({"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    name, message = error.rstrip("')").split("('")
    assert found["problems"] == [f"triton is installed but cannot be imported: {name}: {message}"]
    assert "pip install --force-reinstall triton" in found["advice"][0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_are_checked_in_the_interpreter():
    done = run_doctor({"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)["devices"][0]["checks"]
    kernels = [check for check in checks if check["name"].startswith("triton: ")]
    assert [check["status"] for check in kernels] == ["ok", "ok"]
    assert "d coefs" in kernels[0]["measured"]


def test_wrong_kernels_lead_to_pytorch_and_another_triton():
    found = diagnosis_of(wrong(KERNELS), right(FALLBACK))
    assert found.problems == ["cuda:0: triton: square, head_dim 64, bfloat16: d k: relative error 5.0e-01"]
    assert "SUBQUAD_BACKEND=torch" in found.advice[0]
    assert "right here" in found.advice[0]
    assert "another release of Triton" in found.advice[1]
    text = shown(found)
    assert "│ d k " in text
    assert "5.0e-01" in text
    assert "1 of 2 checks failed." in text


def test_advice_says_whether_pytorch_is_right_here():
    assert "wrong here, too" in diagnosis_of(wrong(KERNELS), wrong(FALLBACK)).advice[0]
    assert "could not be checked" in diagnosis_of(wrong(KERNELS)).advice[0]


def test_wrong_pytorch_is_not_blamed_on_triton():
    advice = " ".join(diagnosis_of(right(KERNELS), wrong(FALLBACK)).advice)
    assert "another build of torch" in advice
    assert "SUBQUAD_BACKEND" not in advice


def test_wrong_window_leads_to_another_torch():
    window = replace(KERNELS, part="window", implementation="flex")
    advice = diagnosis_of(right(KERNELS), wrong(window), right(FALLBACK)).advice
    assert "SUBQUAD_BACKEND=torch" in advice[0]
    assert "another release of torch" in advice[1]
    assert "Triton" not in " ".join(advice)


@pytest.mark.parametrize(
    "device, triton, expected",
    [(HOPPER, "3.6.0", True), (HOPPER, "3.7.0", True), (HOPPER, "3.7.1", False), (AMPERE, "3.6.0", False)],
)
def test_known_wrong_releases_are_a_warning_only(device, triton, expected):
    found = diagnosis_of(right(KERNELS), device=device, triton=triton)
    assert found.ok
    assert any("flash-linear-attention#640" in warning for warning in found.warnings) is expected
    failed = diagnosis_of(wrong(KERNELS), device=device, triton=triton)
    assert any("triton>=3.7.1" in step for step in failed.advice) is expected


def test_an_unused_gpu_is_a_warning():
    found = diagnosis_of(right(FALLBACK), gpu_problem="torch 2.13.0+cpu is built for CPUs only")
    assert "570.1 is installed, but PyTorch uses no GPU: torch 2.13.0+cpu" in found.warnings[0]
    assert diagnosis_of(right(FALLBACK), gpu_problem="x", driver=None).warnings == []


def test_what_was_left_out_is_said():
    late = CheckResult(check=KERNELS, status="no time")
    text = shown(diagnosis_of(right(FALLBACK), late, late, CheckResult(check=KERNELS, status="no memory")))
    assert "no time for 2 of the checks: --seconds 120" in text
    assert "too little free memory on the device for 1 of the checks" in text
    assert text.splitlines()[-1].strip() == "All checks that ran passed (1)."


def test_a_device_that_cannot_be_used_is_a_problem(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("CUDA error: device busy\nmore")

    monkeypatch.setattr("subquad.kernels.backend.choose_backend", refuse)
    assert diagnose("cpu").problems == ["cpu: CUDA error: device busy"]


def test_supported_versions_come_from_the_metadata(monkeypatch):
    requires = ["torch>=2.11,<4", 'lm_eval>=0.4.9; extra == "eval"', "numpy"]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    found = {package.name: package for package in find_packages()}
    assert found["torch"].version == metadata.version("torch")
    assert found["torch"].supported == "<4,>=2.11"
    assert found["lm-eval"].supported == ">=0.4.9"
    assert found["peft"].supported is None


def test_a_checkout_that_is_not_installed_has_no_ranges(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert all(package.supported is None and package.problem is None for package in find_packages())


@pytest.mark.parametrize("version, fits", [("2.11.0+cu128", True), ("2.12.0a0", True), ("2.10.1", False), (None, True)])
def test_versions_outside_the_range(version, fits):
    problem = Package("torch", version, ">=2.11").problem
    assert (problem is None) is fits
    assert fits or problem == "torch 2.10.1 is not a supported version (>=2.11): pip install -U 'torch>=2.11'"


def test_devices_by_name():
    devices = [HOPPER, replace(HOPPER, name="cuda:1"), Device("cpu", "x86_64", threads=2)]
    assert [device.name for device in select_devices(devices, "cuda")] == ["cuda:0", "cuda:1"]
    assert [device.name for device in select_devices(devices, "cuda:1")] == ["cuda:1"]
    assert select_devices(devices, None) == devices
    with pytest.raises(ConfigError, match=r"'cuda:2'.*this machine has cuda:0, cuda:1, cpu"):
        select_devices(devices, "cuda:2")


def test_device_in_one_line():
    assert str(HOPPER) == "NVIDIA H200, compute capability 9.0, 150.0 GiB"
    assert str(Device("cpu", "x86_64", threads=2)) == "x86_64, PyTorch threads: 2"


def test_driver_version(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    tool.chmod(0o755)
    assert driver_version() == "570.86.15"
    tool.write_text("#!/bin/sh\necho failed\nexit 9\n")
    assert driver_version() is None


def test_import_problem():
    assert import_problem("json") is None
    assert import_problem("a_module_that_is_not_there") is None


def test_no_gpu_has_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built for CPUs only" in str(environment.cuda_problem())
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert environment.cuda_problem() == "Found no NVIDIA driver on your system."
