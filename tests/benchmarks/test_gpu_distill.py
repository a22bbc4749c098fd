"""The distillation of a prepared folder: loads, budgets, and a whole run on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import gpu_distill
from benchmarks.distillation.budget import USED_SHARE, Speed, fit_tokens
from benchmarks.distillation.bundle import join_bundle, write_bundle
from benchmarks.distillation.rows import PackedRows
from benchmarks.distillation.run import RunOptions, make_recipe
from subquad.distill.data import rows_dataset
from subquad.distill.packing import pack_documents
from subquad.errors import ConfigError, DataError
from subquad.recipes.checkpoint import load_checkpoint
from tests.eval.niah.tiny import random_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN = 128
# without the packages that the machine with the GPU lacks: as if they were not installed
WITHOUT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
absent = ("datasets", "lm_eval")
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in absent else find(name, path, target)
)
from benchmarks.gpu_distill import main
main(sys.argv[1:])
assert not [name for name in sys.modules if name.split(".")[0] in absent]
"""
SMALL = [
    "convert.mixer={preset: 2mamba, window: 16, sinks: 2, kept_keys: 8, mix_by_mass: true}",
    "calibrate.tokens=256",
    "calibrate.key_tokens=1024",
    "stage1.batch_size=2",
    "stage2.batch_size=2",
    "trainer.logging_steps=1",
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder of loads, made by the command."""
    folder = tmp_path_factory.mktemp("prepared")
    tokenizer = tiny_tokenizer()
    random_model(len(tokenizer)).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    for part in ("train", "eval"):
        lines = [
            f"{part} {number}: the grass is green and the sky is blue, there and back.\n\n" for number in range(400)
        ]
        (folder / f"{part}.txt").write_text("".join(lines))
    command = [
        *("prepare", "--model", str(folder / "teacher"), "--output", str(folder / "loads")),
        *("--text", str(folder / "train.txt"), "--held-out", str(folder / "eval.txt"), "--seq-len", str(SEQ_LEN)),
        *("--tokens", "4096", "--held-out-tokens", "512", "--recall", "0.5", "--load-mib", "0.1"),
        *("--needle-lengths", "160", "200", "--needle-samples", "1"),
    ]
    gpu_distill.main(command)
    return folder / "loads"


def run_command(data, output, tokens, seconds=600):
    sets = [part for text in SMALL for part in ("--set", text)]
    return ["run", "--data", str(data), "--output", str(output), f"--tokens={tokens}", f"--seconds={seconds}", *sets]


def test_a_whole_run_without_datasets(prepared, tmp_path):
    assert len(list(prepared.glob("load-*"))) > 1
    command = [sys.executable, "-c", WITHOUT, *run_command(prepared, tmp_path / "out", 6144)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads((tmp_path / "out" / "gpu_distill.json").read_text())
    assert row["status"] == "done"
    assert row["commit"]
    assert row["device"]
    models = {"teacher", "window_only", "student_start", "student", "student_without_far"}
    assert set(row["loss"]) == set(row["needle"]) == models
    for name in models:
        assert row["loss"][name]["num_tokens"] > 400
        assert (
            sum(bucket["num_tokens"] for bucket in row["loss"][name]["by_position"]) == row["loss"][name]["num_tokens"]
        )
        assert set(row["needle"][name]) == {"160", "200"}
        assert all(scores["key_rank1"]["num"] == 5 for scores in row["needle"][name].values())
        assert all(scores["key_logprob"]["value"] < 0 for scores in row["needle"][name].values())
    assert row["loss"]["student"] != row["loss"]["student_start"]
    parts = [
        "load",
        "warm_up",
        "baseline",
        "calibrate",
        "start",
        "stage1_speed",
        "stage2_speed",
        "stage1",
        "stage2",
        "keys",
        "student",
    ]
    assert list(row["phases"]) == parts
    assert all(part["seconds"] >= 0 and "peak_memory_bytes" in part for part in row["phases"].values())
    assert row["recipe"]["data"]["recall"]["share"] == row["prepared"]["recall"]["share"] == 0.5
    assert row["needle_settings"]["scores"] == ["teacher_forced"]
    assert {"recipe", "prepared", "needle_settings", "calibration", "differences", "gap_closed"} <= row.keys()
    assert {stage: row["stages"][stage]["tokens"] for stage in ("stage1", "stage2")} == {"stage1": 2048, "stage2": 4096}
    assert row["stages"]["stage2"]["tokens_per_s"] > 0
    assert row["passes"] == 1.5
    assert any("passes" in note for note in row["notes"])
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in log] == ["stage1"] * 8 + ["stage2"] * 16
    names = load_file(tmp_path / "out" / "student" / "model.safetensors").keys()
    assert any("mixer" in name for name in names)
    assert any("lora_" in name for name in names)
    assert all("mixer" in name or "lora_" in name for name in names)
    _export_is_the_student(prepared, tmp_path, row)


def _export_is_the_student(prepared, tmp_path, row):
    gpu_distill.main(
        ["export", "--data", str(prepared), "--result", str(tmp_path / "out"), "--output", str(tmp_path / "student")]
    )
    from subquad.eval.loss import evaluate_loss

    loaded = load_checkpoint(str(tmp_path / "student"), torch.float32)
    held_out = PackedRows.load(prepared / "joined" / "held_out.safetensors")
    assert evaluate_loss(loaded.model, held_out).loss == pytest.approx(
        row["loss"]["student"]["nats_per_token"], abs=1e-4
    )


def test_a_run_without_time_takes_one_step_and_says_so(prepared, tmp_path):
    command = run_command(prepared, tmp_path / "out", 10**9, seconds=1)
    gpu_distill.main(command)
    row = json.loads((tmp_path / "out" / "gpu_distill.json").read_text())
    assert row["status"] == "done"
    assert {stage["steps"] for stage in row["stages"].values()} == {1}
    assert row["stages"]["stage1"]["asked_tokens"] > row["stages"]["stage1"]["tokens"] == 2 * SEQ_LEN
    for start in (
        "stage1 had 256 tokens in place of",
        "stage2 had 256 tokens",
        "calibrated on 1 rows in place of 2",
        "it took",
    ):
        assert [note for note in row["notes"] if note.startswith(start)], start
    with pytest.raises(SystemExit, match="holds the result of a run already"):
        gpu_distill.main(command)


def test_a_run_that_fails_leaves_its_row(prepared, tmp_path):
    with pytest.raises(SystemExit, match=r"convert.mixer"):
        gpu_distill.main([*run_command(prepared, tmp_path / "out", 4096), "--set", "convert.mixer=nonsense"])
    row = json.loads((tmp_path / "out" / "gpu_distill.json").read_text())
    assert row["status"] == "failed"
    assert "convert.mixer" in row["reason"]


@pytest.mark.parametrize("size, load_bytes", [(1000, 300), (1000, 1000), (9, 2), (1, 5)])
def test_loads_join_to_the_same_bytes(tmp_path, size, load_bytes):
    generator = np.random.default_rng(0)
    files = {"a.bin": tmp_path / "a.bin", "model/b.bin": tmp_path / "b.bin", "empty": tmp_path / "empty"}
    for path, share in zip(files.values(), (size, 2 * size, 0), strict=True):
        path.write_bytes(generator.bytes(share))
    loads = write_bundle(files, tmp_path / "loads", load_bytes)
    assert len(loads) >= 3 * size / load_bytes
    for load in loads:
        assert sum(path.stat().st_size for path in load.iterdir() if path.name != "manifest.json") <= load_bytes
    join_bundle(tmp_path / "loads", tmp_path / "joined")
    for name, path in files.items():
        assert (tmp_path / "joined" / name).read_bytes() == path.read_bytes()


@pytest.fixture
def loads(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.random.default_rng(0).bytes(1000))
    return write_bundle({"a.bin": tmp_path / "a.bin"}, tmp_path / "loads", 400)


def flip(load):
    path = load / "00-a.bin.2"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


DAMAGE = {
    r"load-2/00-a.bin.2 is damaged: .* Carry load-2 again": flip,
    r"is damaged: 3 bytes": lambda load: (load / "00-a.bin.2").write_bytes(b"abc"),
    r"00-a.bin.2 is missing; carry all of load-2 again": lambda load: (load / "00-a.bin.2").unlink(),
    r"lacks load-2 of 3 loads": lambda load: load.rename(load.with_name("elsewhere")),
    r"of different preparations": lambda load: (load / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_loads_are_refused(loads, tmp_path, message):
    DAMAGE[message](loads[1])
    with pytest.raises(DataError, match=message):
        join_bundle(tmp_path / "loads", tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_a_folder_without_loads_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no load-N/manifest"):
        join_bundle(tmp_path, tmp_path / "joined")


@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.parametrize("seq_len, largest", [(16, 97), (13, 2**16 + 5)])
def test_packed_rows_are_the_rows(tmp_path, seq_len, largest, recall):
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, largest, size=length) for length in (20, 3, 1, 50, 31)]
    documents[0][0] = largest - 1
    columns = pack_documents(documents, seq_len)
    if recall:
        columns["loss_weights"] = np.where(generator.random(columns["input_ids"].shape) < 0.2, 10, 1).astype(np.float32)
    PackedRows.pack(columns).save(tmp_path / "rows.safetensors")
    rows, wanted = PackedRows.load(tmp_path / "rows.safetensors"), rows_dataset(columns)
    assert rows.input_ids.itemsize == (2 if largest < 2**16 else 4)
    assert len(rows) == len(wanted) > 3
    for index, row in enumerate(wanted):
        packed = rows[index]
        assert packed.keys() == row.keys()
        assert all(torch.equal(packed[name], row[name]) for name in row)
    taken = rows.take(len(rows) - 1, 3)
    assert [int(row["input_ids"][0]) for row in taken] == [int(rows[index]["input_ids"][0]) for index in (-1, 0, 1)]


def test_a_file_of_something_else_holds_no_rows(tmp_path):
    (tmp_path / "rows.safetensors").write_bytes(b"something else")
    with pytest.raises(DataError, match="holds no packed rows"):
        PackedRows.load(tmp_path / "rows.safetensors")


def test_budgets_fit_the_time():
    speeds = {"stage1": Speed(100.0, 10), "stage2": Speed(50.0, 20)}
    asked = {"stage1": 1000, "stage2": 2000}
    assert fit_tokens(asked, speeds, 60.0) == asked
    cut = fit_tokens(asked, speeds, 25.0)
    assert cut == {"stage1": 450, "stage2": 900}
    assert sum(cut[stage] / speeds[stage].tokens_per_s for stage in cut) <= USED_SHARE * 25
    assert fit_tokens(asked, speeds, -5.0) == {"stage1": 10, "stage2": 20}
    assert fit_tokens({}, {}, 5.0) == {}


def test_overrides_come_last_and_what_a_run_cannot_do_is_refused(tmp_path):
    def recipe(*overrides, tokens=30_000_000):
        return make_recipe(RunOptions(data=tmp_path, output=tmp_path, tokens=tokens, overrides=overrides), "m", 1024)

    plain = recipe()
    assert (plain.stage1.tokens, plain.stage2.tokens) == (10_000_000, 20_000_000)
    assert plain.model.source == "m"
    assert plain.data.seq_len == 1024
    assert recipe("stage1.tokens=0", "stage2.batch_size=3").stage2.batch_size == 3
    for override, message in {
        "data.seq_len=512": "those of the preparation",
        "data.recall={share: 0.5}": "those of the preparation",
        "convert.exact_heads={count: 2}": "chooses heads",
        "stage2.full=true": "use adapters",
    }.items():
        with pytest.raises(ConfigError, match=message):
            recipe(override)
    named = recipe("convert.exact_heads={heads: {0: [1]}}")
    assert named.convert.named_heads == {0: (1,)}
