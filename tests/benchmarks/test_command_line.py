"""The script's options, exit codes and sections, with nothing run."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.suite.rows import Row
from benchmarks.suite.sections import SECTIONS
from benchmarks.suite.settings import Settings


def test_unknown_section_is_refused_with_the_right_names(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main(["correctnes"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "no section 'correctnes'" in message
    assert "correctness, models, timings, end_to_end" in message


def test_quick_without_a_gpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main(["--quick"])
    assert ended.value.code == 2
    assert "--quick needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, gpu, mode",
    [([], True, "full"), (["--quick"], True, "quick"), (["--toy"], True, "toy"), ([], False, "toy")],
)
def test_mode(arguments, gpu, mode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert gpu_suite.choose_mode(gpu_suite.parse_arguments(arguments)) == mode


def test_cases_are_selected_by_section_and_pattern():
    selected = gpu_suite.select_cases(Settings("full"), ["timings"], "forward d64*T32768")
    assert [case.name for case in selected["timings"]] == ["forward d64 G4 T32768", "forward d64 G1 T32768"]
    assert gpu_suite.select_cases(Settings("full"), ["models"], "forward*") == {}
    assert list(gpu_suite.select_cases(Settings("full"), [], None)) == list(SECTIONS)


def test_no_matching_case_is_said(capsys):
    assert gpu_suite.main(["--toy", "models", "--only", "nothing"]) == 2
    assert "no case matches 'nothing'" in capsys.readouterr().err


def test_names_of_cases_are_listed(capsys):
    assert gpu_suite.main(["--toy", "--list", "models"]) == 0
    assert "models / 2mamba-bfloat16\n" in capsys.readouterr().out


@pytest.mark.parametrize("status, code", [("ok", 0), ("skipped", 0), ("failed", 1), ("error", 1)])
def test_exit_code_and_rows_of_a_run(status, code, tmp_path, monkeypatch, capsys):
    def run(settings, selected, recorder):
        recorder.add(Row(what="x", status=status, reason="why", section="models", case="c", config={"dtype": "d"}))

    monkeypatch.setattr(gpu_suite, "run_sections", run)
    assert gpu_suite.main(["--toy", "models", "--output", str(tmp_path)]) == code
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["status"] == status
    printed = capsys.readouterr()
    assert ("models / c / x: why" in printed.out) == (code == 1)
    assert f"models / c / x: {status}" in printed.err


def test_speeds_of_wrong_kernels_are_marked(tmp_path, monkeypatch, capsys):
    def run(settings, selected, recorder):
        config = {"dtype": "bfloat16"}
        recorder.add(
            Row(what="x", status="failed", section="correctness", case="c", config=config, metrics={"worst": 2})
        )
        recorder.add(Row(what="y", section="end_to_end", case="c", metrics={"median_ms": 1.0, "tokens_per_s": 1.0}))

    monkeypatch.setattr(gpu_suite, "run_sections", run)
    assert gpu_suite.main(["--toy", "--output", str(tmp_path)]) == 1
    assert "1 checks did not hold: the speeds above are those of wrong or failing kernels" in capsys.readouterr().out


@pytest.mark.parametrize("memory, cores, workers", [(140, 16, 14), (24, 16, 3), (140, 4, 2), (4, 1, 1)])
def test_workers_fit_cores_and_memory(memory, cores, workers, monkeypatch):
    properties = SimpleNamespace(total_memory=memory * 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu_suite.os, "cpu_count", lambda: cores)
    assert gpu_suite.count_workers(Settings("full")) == workers
    assert gpu_suite.count_workers(Settings("toy")) == 1


def test_what_is_timed_runs_alone(monkeypatch):
    runs = []

    class Pool:
        def __init__(self, settings, factory): ...

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def run(self, cases, num_workers, limits):
            runs.append(([case.name for case in cases], num_workers))
            assert limits.kill_at - limits.start_until <= 15
            return []

    monkeypatch.setattr(gpu_suite, "WorkerPool", Pool)
    monkeypatch.setattr(gpu_suite, "count_workers", lambda settings: 9)
    selected = gpu_suite.select_cases(Settings("toy"), ["timings"], None)
    gpu_suite.run_sections(Settings("toy"), selected, recorder=None)
    (checks, several), (timed, one) = runs
    assert (several, one) == (9, 1)
    assert all(name.startswith("check ") for name in checks)
    assert not any(name.startswith("check ") for name in timed)
