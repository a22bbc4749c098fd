"""Write the report of a folder, or the comparison of several, from their files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from subquad.errors import OutputError
from subquad.eval.report.across import compose_comparison
from subquad.eval.report.compose import compose_report
from subquad.eval.report.data import load_run
from subquad.eval.report.render import PLOTS_FOLDER, ReportPaths, render_report


def write_report(folder: Path, output: Path | None = None) -> ReportPaths:
    """Write the report of a run, or of an evaluation without one, from the files in its folder.

    Reads `results.json`, `log.jsonl`, `recipe.yaml` and `evals/`; needs no model and no network. Existing reports and
    plots are replaced.

    Args:
        folder: The run's or the evaluation's folder.
        output: Where the report goes; None is the folder itself.

    Returns:
        The files written.

    Raises:
        OutputError: There is nothing to report, a file is damaged, or the folder cannot be written.
    """
    run = load_run(folder)
    target = output or folder
    try:
        report = compose_report(run, target / PLOTS_FOLDER)
    except OSError as error:
        raise OutputError(f"the plots of {target} cannot be written: {error}") from error
    return render_report(report, target)


def write_comparison(folders: Sequence[Path], output: Path) -> ReportPaths:
    """Write one page that shows several runs side by side.

    Args:
        folders: At least two folders of runs or evaluations.
        output: Where the page goes; created if missing.

    Returns:
        The files written.

    Raises:
        ConfigError: Fewer than two folders, or the same one twice.
        OutputError: One of them has nothing to report or is damaged, or `output` cannot be written.
    """
    return render_report(compose_comparison([load_run(folder) for folder in folders]), output)
