"""Write a report as one HTML file and as Markdown."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError
from subquad.eval.report.blocks import Report

PLOTS_FOLDER = "plots"


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


def render_report(report: Report, folder: Path) -> ReportPaths:
    """Write both files of a report.

    Args:
        report: The report; its plots lie in `PLOTS_FOLDER` of the folder.
        folder: Where the files go.

    Returns:
        The files.

    Raises:
        OutputError: A plot cannot be read, or a file cannot be written.
    """
    try:
        images = {plot.path.name: base64.b64encode(plot.path.read_bytes()).decode() for plot in report.plots}
    except OSError as error:
        raise OutputError(f"the plots of {folder} cannot be read: {error}") from error
    paths = ReportPaths(folder / "report.md", folder / "report.html", [plot.path for plot in report.plots])
    atomic_file(paths.markdown, _render("report.md.j2", report, {}).encode())
    atomic_file(paths.html, _render("report.html.j2", report, images).encode())
    return paths


def _render(template: str, report: Report, images: dict[str, str]) -> str:
    environment = Environment(
        loader=PackageLoader("subquad.eval"),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["escape_pipe"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    environment.filters["quote"] = lambda text: "\n".join(f"> {line}".rstrip() for line in text.splitlines() or [""])
    return environment.get_template(template).render(report=report, images=images, plots_folder=PLOTS_FOLDER)
