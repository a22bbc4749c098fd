"""Evaluation: held-out loss by position, cache memory, samples, and the report made from them."""

from subquad.eval.generate import generate_sample
from subquad.eval.loss import (
    POSITION_BUCKETS,
    LossResult,
    compare_losses,
    compare_losses_by_position,
    evaluate_loss,
    perplexity,
)
from subquad.eval.memory import cache_table, measure_cache_bytes
from subquad.eval.modes import EvalMode, evaluation_mode
from subquad.eval.report import ReportPaths, write_report
from subquad.eval.results import CacheTable, LossTable, Results, Sample, TokenCounts, summarise_losses
from subquad.eval.storage import collect_versions, git_commit, load_results, save_results
from subquad.eval.summary import print_summary

__all__ = [
    "POSITION_BUCKETS",
    "CacheTable",
    "EvalMode",
    "LossResult",
    "LossTable",
    "ReportPaths",
    "Results",
    "Sample",
    "TokenCounts",
    "cache_table",
    "collect_versions",
    "compare_losses",
    "compare_losses_by_position",
    "evaluate_loss",
    "evaluation_mode",
    "generate_sample",
    "git_commit",
    "load_results",
    "measure_cache_bytes",
    "perplexity",
    "print_summary",
    "save_results",
    "summarise_losses",
    "write_report",
]
