"""GLUE and any other lm-eval task, on every model of an evaluation, from the hub or from local files."""

from subquad.eval.harness.local import LOCAL_TASKS
from subquad.eval.harness.paired import MetricDifference, paired_difference
from subquad.eval.harness.run import LmEvalSettings, run_lm_eval
from subquad.eval.harness.tasks import check_tasks, export_tasks

__all__ = [
    "LOCAL_TASKS",
    "LmEvalSettings",
    "MetricDifference",
    "check_tasks",
    "export_tasks",
    "paired_difference",
    "run_lm_eval",
]
