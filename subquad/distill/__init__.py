"""Distillation: token data, losses, and the two training stages on `transformers.Trainer`."""

from subquad.convert.adapters import adapters_disabled
from subquad.distill.adapters import add_lora
from subquad.distill.checkpoints import load_trainable, newest_valid_checkpoint
from subquad.distill.config import Stage1Config, Stage2Config
from subquad.distill.data import build_token_dataset
from subquad.distill.losses import LossWeights, distillation_loss
from subquad.distill.sources import TextSource
from subquad.distill.stages import run_stage1, run_stage2
from subquad.distill.training import StageResult

__all__ = [
    "LossWeights",
    "Stage1Config",
    "Stage2Config",
    "StageResult",
    "TextSource",
    "adapters_disabled",
    "add_lora",
    "build_token_dataset",
    "distillation_loss",
    "load_trainable",
    "newest_valid_checkpoint",
    "run_stage1",
    "run_stage2",
]
