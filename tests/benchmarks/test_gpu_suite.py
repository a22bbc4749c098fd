"""A whole run of the script at toy size, in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.suite.sections import SECTIONS, all_cases
from benchmarks.suite.settings import Settings

pytestmark = pytest.mark.slow

SCRIPT = Path(gpu_suite.__file__)
# What the suite must not import, directly or through anything.
BLOCKED = ("datasets", "lm_eval")
FIELDS = {"section", "case", "what", "status", "reason", "config", "metrics", "seconds", "run"}
RUN_FIELDS = {"gpu", "driver", "capability", "cuda", "python", "torch", "triton", "transformers", "commit", "date"}
RUN_FIELDS |= {"mode", "seed", "command"}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """Run everything at toy size, from another folder, where importing the blocked packages raises."""
    folder = tmp_path_factory.mktemp("toy")
    for name in BLOCKED:
        (folder / "blocked" / name).mkdir(parents=True)
        (folder / "blocked" / name / "__init__.py").write_text(f"raise ImportError('{name} must not be imported')\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(folder / "blocked"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # a machine with a GPU runs the toy size too
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "results"), "--commit", "abc123"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)
    files = list((folder / "results").glob("*"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return SimpleNamespace(done=done, files=files, rows=rows)


def test_run_ends_without_a_failure(toy_run):
    assert toy_run.done.returncode == 0, toy_run.done.stdout[-3000:] + toy_run.done.stderr[-3000:]
    assert [row for row in toy_run.rows if row["status"] in ("failed", "error")] == []


def test_one_file_named_after_device_and_commit(toy_run):
    (file,) = toy_run.files
    assert file.name.startswith("cpu-abc123-")
    assert file.suffix == ".jsonl"
    assert str(file) in toy_run.done.stdout


def test_every_row_is_complete(toy_run):
    for row in toy_run.rows:
        assert set(row) == FIELDS
        assert set(row["run"]) == RUN_FIELDS
        assert row["config"]
        assert (row["status"] == "ok") == (row["reason"] == "")
    run = toy_run.rows[0]["run"]
    assert run["mode"] == "toy"
    assert run["torch"] == torch.__version__


def test_every_case_of_every_section_has_a_row(toy_run):
    cases = {(case.section, case.name) for case in all_cases(Settings("toy"))}
    assert {section for section, _ in cases} == set(SECTIONS)
    found = {(row["section"], row["case"]) for row in toy_run.rows}
    assert found - {("timings", "summary")} == cases


def test_only_what_needs_a_gpu_or_another_package_is_skipped(toy_run):
    skipped = {row["what"]: row["reason"] for row in toy_run.rows if row["status"] == "skipped"}
    assert set(skipped) <= {"retention", "fla_simple_gla", "sdpa_cudnn"}
    assert all("not installed" in reason or "needs a GPU" in reason for reason in skipped.values())


def test_checks_record_errors_limits_and_those_of_pytorch(toy_run):
    rows = [row for row in toy_run.rows if row["section"] == "correctness"]
    assert len(rows) > 90
    for row in rows:
        metrics = row["metrics"]
        assert set(metrics["errors"]) == set(metrics["limits"]) == set(metrics["torch_errors"])
        assert metrics["worst"] <= 1
    trained = next(row for row in rows if row["case"] == "offset-bfloat16")
    assert {"d q", "d k", "d v", "d log_decay", "d values", "d coefs[0]"} <= set(trained["metrics"]["errors"])


def test_models_compare_prefill_and_decoding(toy_run):
    rows = [row for row in toy_run.rows if row["section"] == "models"]
    assert {row["what"] for row in rows} == {"prefill", "decode"}
    assert {row["config"]["mixer"] for row in rows} >= {"2mamba", "mamba2s", "taylor", "2mamba-pure"}
    assert any(row["metrics"]["error"] > 0 for row in rows)


def _timed(toy_run, section):
    rows = [row for row in toy_run.rows if row["section"] == section and "median_ms" in row["metrics"]]
    assert rows
    return rows


@pytest.mark.parametrize("section", ["timings", "end_to_end"])
def test_timings_have_median_and_spread(toy_run, section):
    for row in _timed(toy_run, section):
        metrics = row["metrics"]
        assert 0 < metrics["p20_ms"] <= metrics["median_ms"] <= metrics["p80_ms"]
        assert metrics["repetitions"] >= 3
        assert "peak_bytes" in metrics


def test_passes_have_rates_shares_and_speeds(toy_run):
    rows = [row for row in _timed(toy_run, "timings") if row["what"] == "subquad"]
    assert {row["config"]["pass"] for row in rows} == {"forward", "forward_backward", "prefill"}
    for row in rows:
        metrics = row["metrics"]
        assert metrics["tflops"] == pytest.approx(metrics["flops"] / metrics["median_ms"] / 1e9, rel=1e-4)
        assert metrics["share_of_matmul"] > 0
        assert metrics["speedup_vs_sdpa"] > 0


def test_decoding_has_bandwidths(toy_run):
    rows = {row["what"]: row["metrics"] for row in _timed(toy_run, "timings") if row["config"].get("pass") == "decode"}
    assert set(rows) == {"subquad_step", "subquad_buffered", "sdpa_flash"}
    assert all(metrics["gbps"] > 0 and metrics["over_bandwidth_floor"] > 0 for metrics in rows.values())


def test_summary_has_crossovers(toy_run):
    rows = [row for row in toy_run.rows if row["case"] == "summary"]
    assert {row["what"] for row in rows} == {"crossover", "switch", "decode crossover"}
    assert all(set(row["metrics"]["ratios"]) <= {"32", "64"} for row in rows)


def test_students_are_compared_with_their_teacher(toy_run):
    rows = _timed(toy_run, "end_to_end")
    assert {(row["case"].split()[0], row["what"]) for row in rows} == {
        (kind, mode) for kind in ("training", "generation") for mode in ("teacher", "student")
    }
    for row in rows:
        assert row["metrics"]["tokens_per_s"] > 0
        assert ("speedup_vs_teacher" in row["metrics"]) == (row["what"] == "student")


def test_the_tables_are_printed(toy_run):
    for title in ("errors over their limits", "speed against flash attention", "decoding one token", "1B model"):
        assert title in toy_run.done.stdout
