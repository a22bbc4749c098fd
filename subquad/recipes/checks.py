"""What a recipe can get wrong only in view of the model's config or of the files it names."""

from __future__ import annotations

import glob
import logging
import os
from typing import TYPE_CHECKING

from subquad.convert.key_scores import MIN_FAR_QUERIES
from subquad.convert.plan import ConversionPlan, plan_conversion
from subquad.distill.recall import SHORTEST_ROW
from subquad.errors import ConfigError
from subquad.recipes.exact_heads import count_exact_heads
from subquad.recipes.schema import TRAINING_STAGES, Recipe
from subquad.recipes.sections import ExactHeadsSection
from subquad.recipes.text_sections import TextFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


def check_recipe_against(recipe: Recipe, hf_config: PretrainedConfig) -> None:
    """Check what depends on the model and on local files; call it before weights load.

    Warns where training could not teach the far part anything, because no row is longer than the window.

    Args:
        recipe: the recipe.
        hf_config: the teacher's config.

    Raises:
        ConfigError: every problem found: rows beyond the context, layers or heads the model does not have,
            stage 1 for a mixer without parameters, tasks nobody knows, text files that do not exist, or that serve both
            training and evaluation.
        SourceError: the model is not of a family that can be converted.
    """
    problems = _length_problems(recipe, hf_config.max_position_embeddings)
    problems += _missing_files(recipe) + _shared_files(recipe)
    if recipe.eval.suite is not None:
        problems += [f"eval.suite.{problem}" for problem in recipe.eval.suite.problems()]
    try:
        convert = recipe.convert
        plan = plan_conversion(hf_config, convert.mixer, convert.layers, exact_kv_heads=convert.named_heads)
    except ConfigError as error:
        problems.append(f"convert: {error}")
    else:
        if convert.exact_heads is not None and convert.chooses_heads:
            problems += _budget_problems(convert.exact_heads, plan)
        if not plan.mixers:
            problems.append("convert: every layer stays softmax, so there is nothing to distil; choose another mixer")
        elif recipe.stage2.far_weight and not all(mixer.window for mixer in plan.mixers.values()):
            problems.append(
                f"stage2.far_weight is {recipe.stage2.far_weight}, but a mixer has window: 0, so there is no "
                "window-only control to compare the teacher with; set stage2.far_weight=0"
            )
        elif not plan.added_parameters:
            problems += _untrainable(recipe)
        else:
            problems += _short_rows(recipe, plan) + _key_problems(recipe, plan) + _score_problems(recipe, plan)
    if problems:
        listed = "\n".join(f"  {line}" for line in problems)
        raise ConfigError(f"recipe {recipe.name} does not fit {recipe.model.source}:\n{listed}")
    _warn_idle_far_part(recipe)


def _trained_stages(recipe: Recipe) -> list[str]:
    return [stage for stage in TRAINING_STAGES if getattr(recipe, stage).tokens]


def _row_lengths(recipe: Recipe) -> dict[str, int]:
    """Return the lengths of training rows that are in use, by the key that sets them."""
    own = {f"{stage}.seq_len": getattr(recipe, stage).seq_len for stage in _trained_stages(recipe)}
    return {"data.seq_len": recipe.data.seq_len, **{name: length for name, length in own.items() if length}}


def _short_rows(recipe: Recipe, plan: ConversionPlan) -> list[str]:
    """Find stages that train the mixers alone on rows that end before anything leaves a window."""
    window = max(mixer.window for mixer in plan.mixers.values())
    alone = [
        stage
        for stage in _trained_stages(recipe)
        if stage == "stage1" or (recipe.stage2.lora is None and not recipe.stage2.full)
    ]
    return [
        f"{stage} trains the mixers on rows of {recipe.stage_seq_len(stage)} tokens, which do not leave the window of "
        f"{window}, so there is nothing to learn; raise {stage}.seq_len or data.seq_len, lower the window, or set "
        f"{stage}.tokens=0"
        for stage in alone
        if recipe.stage_seq_len(stage) <= window
    ]


def _key_problems(recipe: Recipe, plan: ConversionPlan) -> list[str]:
    """Find what keeps the scores of kept keys from being fitted."""
    keeping = [mixer for mixer in plan.mixers.values() if mixer.kept_keys]
    section, seq_len = recipe.calibrate, recipe.data.seq_len
    if not keeping or not section.enabled:
        return []
    problems = []
    if section.key_tokens < seq_len:
        problems.append(
            f"calibrate.key_tokens is {section.key_tokens}, less than one row of {seq_len} tokens; raise it or lower "
            "seq_len"
        )
    if section.key_recall and seq_len < SHORTEST_ROW:
        problems.append(
            f"data.seq_len {seq_len} is too short for the recall rows that kept keys are fitted on; they need "
            f"{SHORTEST_ROW} tokens; raise it, or set calibrate.key_recall=0"
        )
    shortest = max(mixer.window + mixer.sinks for mixer in keeping) + MIN_FAR_QUERIES
    if seq_len <= shortest:
        problems.append(
            f"data.seq_len is {seq_len}, but scores of kept keys are fitted to tokens that have {MIN_FAR_QUERIES} "
            f"queries beyond the window, in rows of more than {shortest} tokens; raise it, or set "
            "calibrate.enabled=false"
        )
    return problems


def _score_problems(recipe: Recipe, plan: ConversionPlan) -> list[str]:
    """Find settings of the far part's score that nothing would act on."""
    section, mixers, problems = recipe.calibrate, plan.mixers.values(), []
    if section.fit_maps and not section.enabled:
        problems.append("calibrate.fit_maps: true with calibrate.enabled: false: nothing is fitted; change one of them")
    elif section.fit_maps and not any(mixer.feature_map == "learned" for mixer in mixers):
        problems.append(
            "calibrate.fit_maps: true, but no layer has a learned feature map to fit; set feature_map: learned and "
            "feature_dim in convert.mixer, or fit_maps: false"
        )
    if not section.enabled and any(mixer.center_keys for mixer in mixers):
        problems.append(
            "center_keys: true with calibrate.enabled: false: calibration sets the mean keys, which would stay 0; "
            "change one of them"
        )
    return problems


def _untrainable(recipe: Recipe) -> list[str]:
    """Return the stages that would train the mixers alone, for mixers without parameters of their own."""
    problems = []
    if recipe.stage1.tokens:
        problems.append(
            f"stage1.tokens is {recipe.stage1.tokens}, but this mixer has no parameters of its own, so matching layer "
            "by layer has nothing to train; set stage1.tokens=0"
        )
    if recipe.stage2.tokens and recipe.stage2.lora is None and not recipe.stage2.full:
        problems.append(
            "stage2.lora is null, but this mixer has no parameters of its own, so stage 2 has nothing to train; give "
            "stage2.lora, or set stage2.tokens=0"
        )
    return problems


def _length_problems(recipe: Recipe, context_length: int) -> list[str]:
    lengths = {**_row_lengths(recipe), "eval.seq_len": recipe.eval_seq_len}
    return [
        f"{name} is {seq_len}, beyond the model's context of {context_length}; lower it"
        for name, seq_len in lengths.items()
        if seq_len > context_length
    ]


def _budget_problems(section: ExactHeadsSection, plan: ConversionPlan) -> list[str]:
    try:
        count_exact_heads(section, plan)
    except ConfigError as error:
        return [str(error)]
    return []


def _missing_files(recipe: Recipe) -> list[str]:
    named = {
        f"data.{part}.paths": source.paths
        for part, source in (("train", recipe.data.train), ("eval", recipe.data.eval))
        if isinstance(source, TextFiles)
    }
    return [
        f"{key}: no file matches {pattern!r}; give paths relative to the current folder"
        for key, patterns in named.items()
        for pattern in patterns
        if not glob.glob(pattern, recursive=True)
    ]


def _shared_files(recipe: Recipe) -> list[str]:
    """Find files that are trained on and measured on, however their paths are spelled."""
    train, held_out = recipe.data.train, recipe.data.eval
    if not (isinstance(train, TextFiles) and isinstance(held_out, TextFiles)):
        return []
    shared = sorted(_real_files(train) & _real_files(held_out))
    # documents are assigned to a part by their text, so both sides must read the same text
    same_text = (train.kind, train.text_field) == (held_out.kind, held_out.text_field)
    if not shared or (same_text and {train.part, held_out.part} == {"train", "eval"}):
        return []
    return [
        f"data: {', '.join(shared[:3])}: trained on and measured on ({len(shared)} in all), so the loss would not "
        "be a held-out one; give other files, or set train.part: train and eval.part: eval"
    ]


def _real_files(source: TextFiles) -> set[str]:
    return {os.path.realpath(path) for pattern in source.paths for path in glob.glob(pattern, recursive=True)}


def _warn_idle_far_part(recipe: Recipe) -> None:
    length_name, shortest = min(_row_lengths(recipe).items(), key=lambda item: item[1])
    mixers = {"mixer": recipe.convert.mixer, **{f"layers.{spec}": m for spec, m in recipe.convert.layers.items()}}
    for where, mixer in mixers.items():
        exact = mixer.window + mixer.sinks + mixer.kept_keys
        if mixer.score != "softmax" and mixer.window and exact >= shortest:
            logger.warning(
                "convert.%s: window, sinks and kept keys, %d tokens, cover whole rows (%s is %d), so its far part "
                "learns nothing from them; keep fewer or raise seq_len",
                where,
                exact,
                length_name,
                shortest,
            )
