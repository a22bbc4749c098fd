"""The power law through runs of several budgets."""

import json
import sys

import pytest

from benchmarks.quality import budgets


def row(group, tokens, student, seed=0):
    loss = {"teacher": 3.0, "window_only": 3.8, "student": student, "student_start": 3.5}
    return {"group": group, "seed": seed, "loss": loss, "tokens": {"stage1": tokens // 2, "stage2": tokens // 2}}


def test_an_exact_power_law_is_found(tmp_path, monkeypatch, capsys):
    rows = [row("a", tokens, 3.0 + 4.0 * tokens**-0.25) for tokens in (80_000, 10_000, 20_000)]
    rows += [row("b", 10_000, 3.2), row("b", 20_000, 3.1), row("a", 0, 3.5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(sys, "argv", ["budgets", str(tmp_path)])
    budgets.main()
    (curve,) = budgets.read_curves(tmp_path / "rows.jsonl")
    assert (curve.scale, curve.power, curve.residual) == pytest.approx((4.0, 0.25, 0.0), abs=1e-9)
    assert [tokens for tokens, _ in curve.points] == [0, 10_000, 20_000, 80_000]
    assert curve.tokens_for(0.5) == pytest.approx((4.0 / 0.4) ** 4)
    text = (tmp_path / "budgets.md").read_text()
    assert text == capsys.readouterr().out[:-1]
    assert "4.000 × tokens^-0.250" in text
    assert (tmp_path / "budgets.png").stat().st_size > 1000


def test_what_cannot_be_fitted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["budgets", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"rows\.jsonl"):
        budgets.main()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("a", 10_000, 3.2)))
    with pytest.raises(SystemExit, match="3 token budgets"):
        budgets.main()
