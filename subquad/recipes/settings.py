"""What the sections of a recipe mean to the functions that do the work."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from subquad.distill import Stage1Config, Stage2Config, TextSource
from subquad.distill.recall import RecallConfig
from subquad.recipes.schema import Recipe
from subquad.recipes.text_sections import EmbeddedText, HubText, RecallRowsSection, TextFiles

_RENAMED = {"r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "lora_targets"}


def text_source(section: EmbeddedText | TextFiles | HubText) -> TextSource:
    """Return the text source that a section under `data` describes."""
    return TextSource(**section.model_dump())


def recall_config(section: RecallRowsSection) -> RecallConfig:
    """Return the settings of the recall rows under `data.recall`."""
    return RecallConfig(**section.model_dump())


def stage1_config(recipe: Recipe) -> Stage1Config:
    """Return the settings of stage 1; the recipe must give it tokens."""
    trainer = _trainer_settings(recipe)
    # stage 1 holds the graph of one layer at a time, so there is nothing to recompute
    del trainer["gradient_checkpointing"]
    return Stage1Config(**recipe.stage1.model_dump(exclude={"seq_len"}), **trainer)


def stage2_config(recipe: Recipe) -> Stage2Config:
    """Return the settings of stage 2; the recipe must give it tokens."""
    settings = recipe.stage2.model_dump(exclude={"seq_len"})
    given = settings.pop("lora") or {"target_modules": ()}
    lora = {_RENAMED[name]: value for name, value in given.items()}
    return Stage2Config(**settings, **lora, **_trainer_settings(recipe))


def weights_dtype(recipe: Recipe, hf_config: PretrainedConfig) -> torch.dtype:
    """Return the data type to load the teacher's weights in.

    Args:
        recipe: the recipe.
        hf_config: the teacher's config.

    Returns:
        What the recipe says; for `auto` the checkpoint's own on a GPU and float32 on a CPU, where bfloat16 is slow.
    """
    if recipe.model.dtype != "auto":
        return getattr(torch, recipe.model.dtype)
    own = getattr(hf_config, "dtype", None)
    return own if torch.cuda.is_available() and isinstance(own, torch.dtype) else torch.float32


def _trainer_settings(recipe: Recipe) -> dict[str, Any]:
    return {**recipe.trainer.model_dump(), "seed": recipe.seed}
