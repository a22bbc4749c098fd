"""The report: what a conversion cost and gained, as one HTML file and Markdown, made from files alone."""

from subquad.eval.report.across import compose_comparison
from subquad.eval.report.compose import summary_table
from subquad.eval.report.data import RunData, load_run
from subquad.eval.report.losses import LOSS_HEAD, MEMORY_HEAD, format_difference, loss_table, memory_table
from subquad.eval.report.measures import Measure, measures_of
from subquad.eval.report.plain import comparison_to_dict, report_to_dict
from subquad.eval.report.render import PLOTS_FOLDER, ReportPaths
from subquad.eval.report.write import write_comparison, write_report

__all__ = [
    "LOSS_HEAD",
    "MEMORY_HEAD",
    "PLOTS_FOLDER",
    "Measure",
    "ReportPaths",
    "RunData",
    "comparison_to_dict",
    "compose_comparison",
    "format_difference",
    "load_run",
    "loss_table",
    "measures_of",
    "memory_table",
    "report_to_dict",
    "summary_table",
    "write_comparison",
    "write_report",
]
