"""The tuner without a GPU: what it would measure, what it chooses, what it prints."""

from __future__ import annotations

import pytest
import torch

from benchmarks import tune
from benchmarks.tune import Row, candidates, choose, format_row, gpu_problem
from subquad.kernels.triton.tuning import ScanTile, Tile, Tiles, tiles_for
from tests.benchmarks.fakes import FakeHardware


def row(order: int = 2, dtype: torch.dtype = torch.bfloat16) -> Row:
    return Row(90, 64, order, dtype, tiles_for(90, 64, order, dtype.itemsize))


def test_the_dry_run_lists_every_candidate(capsys):
    assert tune.main(["--dry-run", "--head-dim", "64", "--order", "2", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "row (90, 64, 2, 2): 16384 tokens" in out
    for field in Tiles._fields:
        assert f"  {field}: {len(candidates(field, row()))} candidates" in out
    assert out.count("    Tile(") + out.count("    ScanTile(") == sum(len(candidates(f, row())) for f in Tiles._fields)


def test_it_refuses_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        tune.main([])
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_it_refuses_the_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in (gpu_problem() or "")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu_problem() is None


def test_candidates_by_order_and_operands():
    assert candidates("scan", row(order=1)) == []
    assert ScanTile(16, 16, 64, 8, 3) in candidates("scan", row())
    assert Tile(128, 64, 8, 2) in candidates("forward", row())
    wide = candidates("forward", row(dtype=torch.float32))
    assert max(tile.rows * tile.inner for tile in wide) < 128 * 64


def test_the_table_stays_unless_a_candidate_is_clearly_faster():
    assert choose({"a": 0.99, "b": 1.3}, standing_runs=True) is None
    assert choose({"a": 0.97, "b": 0.9}, standing_runs=True) == "b"
    # Milliseconds, where the table's tile cannot be launched.
    assert choose({"a": 7.0, "b": 5.0}, standing_runs=False) == "b"
    assert choose({}, standing_runs=False) is None


def test_a_row_can_be_pasted():
    text = format_row(row(), {"dq": "Tile(64, 32, 4, 1)"})
    table = eval("{" + text + "}", {"Tiles": Tiles, "Tile": Tile, "ScanTile": ScanTile})
    assert table == {(90, 64, 2, 2): row().tiles._replace(dq=Tile(64, 32, 4, 1))}


def test_candidates_are_compared_with_the_table_in_turns(monkeypatch, capsys):
    hardware = FakeHardware({"Tile(64, 32, 4, 1)": [0.5], "Tile(128, 32, 8, 2)": [1.0]})
    tiles = [Tile(64, 32, 4, 1), Tile(64, 64, 4, 1)]
    monkeypatch.setattr(tune, "candidates", lambda field, row: tiles if field == "dq" else [])

    def call(row, field, tile):
        result = RuntimeError("out of shared memory") if tile == tiles[1] else 1.0
        return hardware.call(tune._text(tile), result)

    monkeypatch.setattr(tune, "_call", call)
    standing = row()
    standing = Row(90, 64, 2, torch.bfloat16, standing.tiles._replace(dq=Tile(128, 32, 8, 2)))
    printed = tune.tune(standing, ["forward", "dq"], hardware)
    assert "dq=Tile(64, 32, 4, 1)," in printed
    out = capsys.readouterr().out
    assert "0.500  Tile(64, 32, 4, 1)" in out
    assert "Tile(64, 64, 4, 1): RuntimeError: out of shared memory" in out
    assert hardware.resets >= 2


@pytest.mark.parametrize("field", Tiles._fields)
def test_a_candidate_reaches_its_launches(field):
    pytest.importorskip("triton")
    tile = candidates(field, row())[0]
    launches = tune.launches_of(row(), field, tile, device="cpu", tokens=512)
    # Two scores, and a forward and a reverse launch of some kernels.
    assert len(launches) >= 2
    for one in launches:
        if isinstance(tile, ScanTile):
            assert (one.arguments["BI"], one.arguments["BJ"], one.arguments["BT"]) == tile[:3]
        else:
            assert one.arguments["BT"] == tile.rows
        assert field == "prepare" or one.num_warps == tile.num_warps
        floats = [x for x in one.arguments.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        assert all(x.count_nonzero() > 0 for x in floats if x.numel())
