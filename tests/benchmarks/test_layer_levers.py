"""The study of levers on single layers: its errors are those of the layer, training lowers them, it goes on."""

import json
import sys

import pytest
import torch
import yaml

from benchmarks.quality import layer_levers, windows
from subquad.convert.plan import plan_conversion
from subquad.convert.source import load_teacher
from subquad.convert.surgery import apply_plan
from subquad.layers import attention_mode, converted_layers, resolve_mixer
from tests.convert.tiny_checkpoints import write_hf

BASE = {"preset": "2mamba", "window": 8, "sinks": 2, "kept_keys": 4}


@pytest.fixture
def study_file(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_levers, "FIRST_POSITION", 12)
    lines = [f"line {number}: the heron stands in the shallow water and waits.\n" for number in range(60)]
    documents = [json.dumps({"text": "".join(lines[start : start + 6])}) for start in range(0, 30, 6)]
    (tmp_path / "train.jsonl").write_text("\n".join(documents))
    (tmp_path / "held_out.txt").write_text("".join(lines[30:]))
    content = {
        "model": str(write_hf(tmp_path / "teacher")),
        "train": str(tmp_path / "train.jsonl"),
        "held_out": str(tmp_path / "held_out.txt"),
        "seq_len": 48,
        "train_rows": 3,
        "calibration_rows": 1,
        "held_out_rows": 2,
        "epochs": 4,
        "layers": [0, 1],
        "base": BASE,
        "levers": {
            "base": {},
            "no kept keys": {"kept_keys": 0},
            "all kept": {"kept_keys": 48},
            "pure": {"window": 0, "sinks": 0, "kept_keys": 0},
        },
    }
    path = tmp_path / "levers.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["layer_levers", *map(str, arguments)])
    layer_levers.main()


def read(folder):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return {(row["lever"], row["layer"]): row for row in rows}


def test_levers_are_measured_and_kept(study_file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    start(monkeypatch, study_file, "--output", folder, "--levers", "base,all kept")
    first = (folder / "rows.jsonl").read_text()
    start(monkeypatch, study_file, "--output", folder)
    assert (folder / "rows.jsonl").read_text().startswith(first)
    rows = read(folder)
    assert len(rows) == 8
    for layer in (0, 1):
        base, without, everything = (rows[name, layer] for name in ("base", "no kept keys", "all kept"))
        assert base["window"] == pytest.approx(without["window"])
        assert without["exact"] == pytest.approx(without["window"])
        assert base["exact"] < base["window"]
        assert everything["exact"] < 1e-6 < base["exact"]
        assert base["trained"] != base["calibrated"]
        # a pure mixer starts far from softmax: four epochs bring it nearer
        assert rows["pure", layer]["trained"] < rows["pure", layer]["calibrated"]
    table = (folder / "table.md").read_text()
    assert "| no kept keys |" in table
    assert "4 epochs (576 tokens)" in table


@torch.no_grad()
def test_the_recorded_output_is_the_layers_own(study_file):
    content = yaml.safe_load(study_file.read_text())
    study = layer_levers.Levers.model_validate(content)
    teacher = load_teacher(study.model, torch.float32)
    train, test = layer_levers.read_rows(study, teacher.tokenizer)
    assert (len(train), len(test)) == (3, 2)
    model = apply_plan(teacher.model, plan_conversion(teacher.model.config, resolve_mixer({**BASE, "kept_keys": 48})))
    records = layer_levers.record_layers(model, [*train, *test], (1,))
    assert list(records) == [1]
    layer = converted_layers(model)[1]
    assert layer_levers.held_out_error(layer, records[1]) < 1e-6
    with attention_mode(model, "window_only"):
        assert layer_levers.held_out_error(layer, records[1]) > 1e-3


def test_wrong_levers_are_named(study_file, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        start(monkeypatch, study_file, "--levers", "bass")
    assert "no lever bass" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="kept_keys"):
        start(monkeypatch, study_file, "--output", tmp_path / "x", "--set", "base.kept_keys=-1")
    with pytest.raises(SystemExit, match="fit_maps names narow, which no lever is called"):
        start(monkeypatch, study_file, "--output", tmp_path / "x", "--set", "fit_maps=[narow]")


def test_fitted_maps_start_elsewhere(study_file, tmp_path, monkeypatch):
    narrow = {"qk_maps": False, "feature_map": "learned", "feature_dim": 4}
    content = yaml.safe_load(study_file.read_text())
    content |= {"levers": {"narrow": narrow, "fitted": narrow}, "fit_maps": ["fitted"], "layers": [1], "epochs": 1}
    study_file.write_text(yaml.safe_dump(content))
    start(monkeypatch, study_file, "--output", tmp_path / "out")
    rows = read(tmp_path / "out")
    assert {lever: row["fit_maps"] for (lever, _), row in rows.items()} == {"narrow": False, "fitted": True}
    assert rows["narrow", 1]["calibrated"] != rows["fitted", 1]["calibrated"]
    # one layer has no spread
    assert "(sd" not in (tmp_path / "out" / "table.md").read_text()


def test_shapes_of_the_window(study_file, monkeypatch, capsys):
    assert windows.visible(6, 2, "sliding", sinks=1).int().sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert windows.visible(6, 2, "terraced", sinks=1).int().tolist()[4:] == [[1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1]]
    monkeypatch.setattr(
        sys, "argv", ["windows", str(study_file), "--set", "base={preset: 2mamba, window: 8, sinks: 4}"]
    )
    monkeypatch.setattr(windows, "WINDOWS", (4, 8))
    windows.main()
    errors = [[float(cell) for cell in line.split("|")[2:4]] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert all(0 < sliding < terraced for sliding, terraced in errors)


def test_the_sliding_shape_is_the_window_of_the_layers(study_file):
    study = layer_levers.parse_section(layer_levers.Levers, yaml.safe_load(study_file.read_text()), origin="x")
    teacher = load_teacher(study.model, torch.float32)
    rows = layer_levers.read_rows(study, teacher.tokenizer)[1]
    mixer = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 4})
    model = apply_plan(teacher.model, plan_conversion(teacher.model.config, mixer))
    records = layer_levers.record_layers(model, rows, [1])[1]
    layer = converted_layers(model)[1]
    with attention_mode(model, "window_only"):
        expected = layer_levers.held_out_error(layer, records)
    assert windows.window_error(layer, records, 8, "sliding") == pytest.approx(expected, rel=1e-4)
