"""Write `report.md`, `report.html` and the plots of a run from its files alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError
from subquad.eval.loss import perplexity
from subquad.eval.plots import Plot, crossover_sentence, write_plots
from subquad.eval.results import LOSS_LABELS, CacheTable, LossName, PairedDifference, Results
from subquad.eval.storage import load_results
from subquad.eval.style import format_bytes, format_positions, format_seconds
from subquad.eval.training_log import read_curves
from subquad.eval.verdict import judge

RECIPE_FILE = "recipe.yaml"
PLOTS_FOLDER = "plots"
LIMITS = (
    "Losses are in nats per token (natural logarithm) on held-out text; every model saw exactly the same tokens.",
    "Standard errors (±) take a row of the packed text as the sampling unit. Rows of one document resemble each other, "
    "so they are a lower bound on the true uncertainty.",
    "A paired difference compares two models on the same rows; below two standard errors it counts as a tie.",
    "The window-only control has the teacher's weights, the student's window and sinks, and no far part. "
    "It costs no training, so a student must beat it to be worth anything.",
    "A low loss does not show that the model can look things up in a long context; that needs its own test.",
)
Table = list[list[str]]


@dataclass(frozen=True)
class ReportPaths:
    """Files of a report.

    Attributes:
        markdown: `report.md`, with links to the plots.
        html: `report.html`, one file with the plots inside.
        plots: The PNG files.
    """

    markdown: Path
    html: Path
    plots: list[Path]


def write_report(run_dir: Path) -> ReportPaths:
    """Write the report of a run from `results.json`, `log.jsonl` and `recipe.yaml` in its folder.

    Needs no model and no network. Existing reports and plots are replaced.

    Args:
        run_dir: The run's folder.

    Returns:
        The files written.

    Raises:
        OutputError: `results.json` is missing or damaged, or the folder cannot be written.
    """
    results = load_results(run_dir)
    curves, log_notes = read_curves(run_dir)
    try:
        plots = write_plots(results, curves, run_dir / PLOTS_FOLDER)
        content = _content(results, plots, log_notes, _recipe_text(run_dir))
        images = {plot.path.name: base64.b64encode(plot.path.read_bytes()).decode() for plot in plots}
    except OSError as error:
        raise OutputError(f"the plots of {run_dir} cannot be written: {error}") from error
    paths = ReportPaths(run_dir / "report.md", run_dir / "report.html", [plot.path for plot in plots])
    atomic_file(paths.markdown, _render("report.md.j2", content).encode())
    atomic_file(paths.html, _render("report.html.j2", {**content, "images": images}).encode())
    return paths


def loss_table(results: Results) -> Table:
    """Return the rows (model, loss, perplexity, student minus this model) of the table of losses, as text."""
    rows = []
    for name, value in results.loss.measured().items():
        error = results.loss.standard_error.get(name)
        loss = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
        difference = results.difference("student", name)
        rows.append([LOSS_LABELS[name], loss, f"{perplexity(value):.2f}", format_difference(difference)])
    return rows


def memory_table(table: CacheTable) -> Table:
    """Return the rows (tokens, key/value cache, student, ratio, how known) of the table of memory, as text."""
    return [
        [
            f"{length:,}",
            format_bytes(table.kv[length]),
            format_bytes(table.student[length]),
            f"{table.kv[length] / table.student[length]:.2f}×",
            "measured" if length in table.measured_lengths else "computed",
        ]
        for length in sorted(set(table.student) & set(table.kv))
    ]


def format_difference(pair: PairedDifference | None) -> str:
    """Return a paired difference as `-0.0281 ± 0.0021`, or a dash where there is none."""
    if pair is None:
        return "–"
    error = "" if pair.standard_error is None else f" ± {pair.standard_error:.4f}"
    return f"{pair.difference:+.4f}{error}"


def _content(
    results: Results, plots: Sequence[Plot], log_notes: Sequence[str], recipe: str | None
) -> dict[str, object]:
    memory = results.cache_bytes
    return {
        "results": results,
        "verdict": judge(results),
        "labels": LOSS_LABELS,
        "loss_rows": loss_table(results),
        "position_head": [LOSS_LABELS[name] for name in _position_names(results)],
        "position_rows": _position_table(results),
        "memory_rows": [] if memory is None else memory_table(memory),
        "memory_sentence": "Memory was not measured." if memory is None else crossover_sentence(memory),
        "plots": {plot.path.stem: plot for plot in plots},
        "training_plots": [plot for plot in plots if plot.path.stem.startswith("training_")],
        "facts": _facts(results),
        "recipe": recipe,
        "notes": [*results.notes, *log_notes],
        "limits": LIMITS,
        "plots_folder": PLOTS_FOLDER,
    }


def _position_names(results: Results) -> list[LossName]:
    return [name for name in LOSS_LABELS if any(name in bucket.loss for bucket in results.by_position)]


def _position_table(results: Results) -> Table:
    names = _position_names(results)
    rows = []
    for bucket in results.by_position:
        losses = [f"{bucket.loss[name]:.4f}" if name in bucket.loss else "–" for name in names]
        rows.append([format_positions(bucket.start, bucket.end), f"{bucket.num_tokens:,}", *losses])
    return rows


def _facts(results: Results) -> list[tuple[str, str]]:
    """Return (what, value) of everything needed to judge or repeat the run."""
    mixers = ", ".join(f"{count} × {name}" for name, count in results.mixers.items())
    facts = [
        ("Command", results.command),
        ("Converted checkpoint", results.source),
        ("Mixers (layers × kind)", mixers),
        ("Held-out text", f"{results.data}: {results.loss.num_tokens:,} tokens in {results.loss.num_rows:,} rows"),
        ("Training tokens, stage 1", f"{results.tokens.stage1:,}"),
        ("Training tokens, stage 2", f"{results.tokens.stage2:,}"),
        ("Calibration tokens", f"{results.tokens.calibration:,}"),
    ]
    facts += [(f"Time: {step}", format_seconds(seconds)) for step, seconds in results.wall_seconds.items()]
    facts += [
        ("Device, data type, seed", f"{results.device}, {results.dtype}, {results.seed}"),
        ("Commit", results.commit or "unknown (not run from a checkout)"),
        ("Versions", ", ".join(f"{package} {number}" for package, number in results.versions.items())),
        ("Created", results.created),
    ]
    return facts


def _recipe_text(run_dir: Path) -> str | None:
    path = run_dir / RECIPE_FILE
    return path.read_text(encoding="utf-8", errors="replace").rstrip() if path.is_file() else None


def _render(template: str, content: dict[str, object]) -> str:
    environment = Environment(
        loader=PackageLoader("subquad.eval"),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: text.replace("|", "\\|")
    environment.filters["quote"] = lambda text: "\n".join(f"> {line}".rstrip() for line in text.splitlines() or [""])
    return environment.get_template(template).render(content)
