"""Memory of every system over length: measured, and equal to the formula and to the papers' figures."""

import json

import pytest
import torch

from subquad.errors import OutputError
from subquad.eval.crossover import _draw_width, measure_systems, plot_systems, system_crossover, systems_table
from subquad.eval.style import BLACK, new_figure
from subquad.pretrain.mixers import scratch_mixer
from subquad.pretrain.systems import pure_systems, report_memory


@pytest.mark.parametrize("head_dim, tokens", [(64, 1058), (128, 4162)])
def test_crossover_of_2mamba_in_numbers_is_the_papers(head_dim, tokens):
    assert system_crossover(scratch_mixer("2mamba"), head_dim, torch.float32) == tokens
    assert 2 * tokens - 2 <= system_crossover(scratch_mixer("2mamba"), head_dim, torch.bfloat16) <= 2 * tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_bytes_are_the_formulas_and_the_crossover_is_where_they_cross(dtype):
    systems = {"mamba2s": scratch_mixer("mamba2s"), "quadratic": scratch_mixer({"score": "taylor", "order": 3})}
    found = measure_systems(systems, head_dims=[8], lengths=[1, 4, 9, 10, 40], dtype=dtype, longest_measured=10)
    state, quadratic = found
    for each in found:
        assert each.measured == (1, 4, 9, 10)
        assert each.differs == ()
        assert each.kv_sizes == {n: 2 * n * 8 * dtype.itemsize for n in (1, 4, 9, 10, 40)}
    assert state.sizes[1] == state.sizes[40] == 64 * 4 + 3 * 8 * dtype.itemsize
    assert quadratic.crossover is None
    for n, size in state.sizes.items():
        assert (size < state.kv_sizes[n]) == (n >= state.crossover)
    assert f"| mamba2s | 8 | {state.crossover} |" in systems_table(found)
    assert "| quadratic | 8 | never | never |" in systems_table(found)


def test_pure_systems_have_no_window_and_all_are_built():
    systems = pure_systems()
    assert {"2mamba", "mamba2s", "taylor"} <= systems.keys()
    assert "softmax" not in systems
    assert len(set(systems.values())) == len(systems)
    assert all(mixer.window == 0 for mixer in systems.values())


@pytest.mark.parametrize("head_dims", [[8], [8, 16]])
def test_report_writes_table_plot_and_json(tmp_path, head_dims):
    report = report_memory(tmp_path, head_dims=head_dims, lengths=[4, 32], longest_measured=4, dtype="float32")
    assert report.plot.path.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(report.json.read_text())["systems"]
    missing = sum(mixer.feature_dim == 16 for mixer in pure_systems().values()) * head_dims.count(8)
    assert missing
    assert len(rows) == len(pure_systems()) * len(head_dims) - missing
    assert report.table.read_text().count("\n| ") == len(rows)


def test_what_a_head_is_too_narrow_for_is_left_out_with_a_note(tmp_path, monkeypatch):
    systems = {"based": pure_systems()["based"], "mamba2s": pure_systems()["mamba2s"]}
    monkeypatch.setattr("subquad.pretrain.systems.pure_systems", lambda: systems)
    # a width given twice is measured once
    report = report_memory(tmp_path, head_dims=[8, 16, 8], lengths=[4], longest_measured=4)
    assert [(each.system, each.head_dim) for each in report.systems] == [("mamba2s", 8), ("based", 16), ("mamba2s", 16)]
    note = "based is left out at head_dim 8: its feature_dim 16 is more than that."
    assert report.table.read_text().splitlines()[-1] == note


def test_a_file_in_place_of_the_folder_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.pretrain.systems.measure_systems", None)
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(OutputError, match="cannot be written"):
            report_memory(folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_plot_marks_crossovers(tmp_path):
    found = measure_systems({"mamba2s": scratch_mixer("mamba2s")}, head_dims=[8], lengths=[2, 64], longest_measured=2)
    assert plot_systems(found, torch.bfloat16, tmp_path / "a.png").path.stat().st_size > 10_000


def test_the_black_line_is_drawn_over_the_others():
    found = measure_systems({"fox": scratch_mixer("fox")}, head_dims=[8], lengths=[2, 64], longest_measured=2)
    _, axes = new_figure("", "", "")
    _draw_width(axes, found)
    black, *others = axes.lines
    assert black.get_color() == BLACK
    assert black.zorder > max(line.zorder for line in others)
