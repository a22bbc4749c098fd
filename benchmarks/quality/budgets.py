"""What more tokens buy: a power law through the runs of a study that differ in their token budget.

    python -m benchmarks.quality.budgets runs/budgets

Per group of arms the loss above the teacher's is fitted as `excess = A * tokens ** -p` by least squares in the logs.
`budgets.md` has the fit, what it says of ten times the tokens and how many close 60, 80 and 90 % of the gap between the
window-only control and the teacher; `budgets.png` shows it. An extrapolation is no measurement.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from subquad.convert.atomic import atomic_file
from subquad.eval.style import BLACK, BLUE, GREEN, ORANGE, RED, new_figure, save_figure

SHARES = (0.6, 0.8, 0.9)
MIN_BUDGETS = 3
_COLORS = (BLUE, ORANGE, GREEN, RED)


@dataclass(frozen=True)
class Curve:
    """A group of runs.

    Attributes:
        group: its name.
        points: (tokens, loss above the teacher's), ascending.
        window: loss of the window-only control above the teacher's.
        start: loss before training above the teacher's.
        scale: A of the fit.
        power: p of the fit.
        residual: root mean square of the logs' residuals.
    """

    group: str
    points: tuple[tuple[int, float], ...]
    window: float
    start: float
    scale: float
    power: float
    residual: float

    def excess(self, tokens: float) -> float:
        """Return the fit's loss above the teacher's."""
        return self.scale * tokens**-self.power

    def tokens_for(self, share: float) -> float:
        """Return the tokens at which the fit has closed a share of the gap; infinite if it never does."""
        target = (1 - share) * self.window
        return (self.scale / target) ** (1 / self.power) if self.power > 0 else math.inf


def fit_curve(group: str, rows: Sequence[dict[str, Any]]) -> Curve:
    """Fit a group.

    Args:
        group: its name.
        rows: lines of a study's `rows.jsonl`, at least three budgets above 0.

    Returns:
        The curve.
    """
    points = sorted((_tokens(row), row["loss"]["student"] - row["loss"]["teacher"]) for row in rows)
    trained = [(math.log(tokens), math.log(excess)) for tokens, excess in points if tokens and excess > 0]
    mean_x, mean_y = fmean(x for x, _ in trained), fmean(y for _, y in trained)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in trained) / sum((x - mean_x) ** 2 for x, _ in trained)
    errors = [y - mean_y - slope * (x - mean_x) for x, y in trained]
    loss = rows[0]["loss"]
    return Curve(
        group=group,
        points=tuple(points),
        window=loss["window_only"] - loss["teacher"],
        start=fmean(row["loss"]["student_start"] - row["loss"]["teacher"] for row in rows),
        scale=math.exp(mean_y - slope * mean_x),
        power=-slope,
        residual=math.sqrt(fmean(error**2 for error in errors)),
    )


def _tokens(row: dict[str, Any]) -> int:
    return row["tokens"]["stage1"] + row["tokens"]["stage2"]


def read_curves(path: Path) -> list[Curve]:
    """Return the curve of every group with at least three budgets.

    Args:
        path: a study's `rows.jsonl`.

    Returns:
        The curves, in the order of the file.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(row["group"], []).append(row)
    enough = {name: rows for name, rows in groups.items() if len({_tokens(row) for row in rows} - {0}) >= MIN_BUDGETS}
    return [fit_curve(name, rows) for name, rows in enough.items()]


def render(curves: Sequence[Curve]) -> str:
    """Return the fits as Markdown."""
    heads = ["arms", "losses above the teacher's, by tokens", "control", "start", "fit", "residual", "at 10 × the most"]
    heads += [f"tokens for {share:.0%} of the gap" for share in SHARES]
    lines = ["| " + " | ".join(heads) + " |", "|---" * 2 + "|---:" * (len(heads) - 2) + "|"]
    for curve in curves:
        points = ", ".join(f"{tokens:,}: {excess:.4f}" for tokens, excess in curve.points)
        cells = [curve.group, points, f"{curve.window:.4f}", f"{curve.start:.4f}"]
        cells += [f"{curve.scale:.3f} × tokens^-{curve.power:.3f}", f"{curve.residual:.1%}"]
        cells.append(f"{curve.excess(10 * curve.points[-1][0]):.4f}")
        cells += [f"{curve.tokens_for(share):,.0f}" for share in SHARES]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Draw points, fits and controls."""
    figure, axes = new_figure(
        "Loss above the teacher's by training tokens", "Tokens", "Nats per token above the teacher"
    )
    for color, curve in zip(_COLORS, curves, strict=False):
        trained = [(tokens, excess) for tokens, excess in curve.points if tokens]
        axes.plot(*zip(*trained, strict=True), "o", color=color, label=curve.group)
        ends = (trained[0][0], 10 * trained[-1][0])
        axes.plot(ends, [curve.excess(tokens) for tokens in ends], color=color, linewidth=1)
        axes.axhline(curve.window, color=color, linewidth=1, linestyle="--")
    axes.plot([], [], color=BLACK, linestyle="--", label="its window-only control")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    """Read a study, write `budgets.md` and `budgets.png` into its folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="folder of a study, with rows.jsonl")
    options = parser.parse_args()
    try:
        curves = read_curves(options.study / "rows.jsonl")
    except OSError as error:
        raise SystemExit(f"error: {error}; give the folder of a study that has finished runs") from error
    if not curves:
        raise SystemExit(f"error: no group of {options.study} has runs with {MIN_BUDGETS} token budgets above 0")
    text = render(curves)
    print(text)
    atomic_file(options.study / "budgets.md", text.encode())
    plot(curves[: len(_COLORS)], options.study / "budgets.png")


if __name__ == "__main__":
    main()
