"""Write a report as one HTML file and as Markdown."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError
from subquad.eval.report.blocks import Report

PLOTS_FOLDER = "plots"
# What begins a tag or an address in angle brackets (CommonMark 0.31, sections 4.6, 6.5, 6.6); "< 0.001" does not.
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_HEADING = re.compile(r"^(\s*)#")
# Markdown would take it for an escape.
_BACKSLASH = re.compile(r"\\(?=[!-/:-@\[-`{-~])")


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
    environment.filters |= {
        "prose": _prose,
        "table_cell": lambda text: _prose(text).replace("|", "\\|"),
        "quote": lambda text: "\n".join(f"> {_prose(line)}".rstrip() for line in text.splitlines() or [""]),
        "code_span": _code_span,
        "fence": lambda text: "`" * max(3, _longest_backticks(text) + 1),
    }
    return environment.get_template(template).render(report=report, images=images, plots_folder=PLOTS_FOLDER)


def _prose(text: str) -> str:
    """Return a text as one line of Markdown in which no HTML, link, image or heading begins."""
    # Entities, not backslashes: one that stands before them in the text would take their effect away.
    line = _TAG.sub("&lt;", _BACKSLASH.sub("&#92;", " ".join(text.splitlines())))
    return _HEADING.sub(r"\1&#35;", line.replace("](", "]&#40;").replace("![", "!&#91;"))


def _code_span(text: str) -> str:
    """Return a text as Markdown's inline code, whatever backticks it holds (CommonMark 0.31, section 6.1)."""
    ticks = "`" * (_longest_backticks(text) + 1)
    space = " " if "`" in text else ""
    return f"{ticks}{space}{' '.join(text.splitlines())}{space}{ticks}"


def _longest_backticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
