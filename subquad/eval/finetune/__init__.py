"""Fine-tuned GLUE: a classification head on every contestant, trained with the same budget."""

from subquad.eval.finetune.classifier import build_classifier, contestant_mode
from subquad.eval.finetune.plots import plot_finetuned
from subquad.eval.finetune.run import TASK_PREFIX, compare_finetuned, run_glue_finetune
from subquad.eval.finetune.settings import FinetuneSettings, LoraSettings

__all__ = [
    "TASK_PREFIX",
    "FinetuneSettings",
    "LoraSettings",
    "build_classifier",
    "compare_finetuned",
    "contestant_mode",
    "plot_finetuned",
    "run_glue_finetune",
]
