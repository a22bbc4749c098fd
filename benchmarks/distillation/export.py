"""Export: the parameters that a run handed back become a checkpoint, where the libraries are."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.distillation.contents import read_prepared
from benchmarks.distillation.record import RESULT
from benchmarks.distillation.run import MIXERS, STUDENT, convert_teacher
from subquad.convert.export import export_student
from subquad.convert.modelcard import ModelCard
from subquad.convert.source import inspect_source
from subquad.distill import add_lora, load_trainable
from subquad.distill.adapters import ADAPTER_MARK
from subquad.distill.checkpoints import load_part
from subquad.distill.stages import MIXER_MARK, train_only
from subquad.errors import DataError
from subquad.recipes.schema import parse_recipe
from subquad.recipes.settings import stage2_config


def export(data: Path, result: Path, output: Path) -> Path:
    """Build the student of a run and write it as a checkpoint, in float32 or what the recipe says.

    Args:
        data: Folder of the loads that the run read.
        result: Folder that the run wrote.
        output: The checkpoint's folder.

    Returns:
        The checkpoint's folder.

    Raises:
        DataError: The folder of the result has none, or it ended before a stage was trained.
        OutputError: The parameters do not fit the model, or the output cannot be written.
    """
    try:
        row = dict(json.loads((result / RESULT).read_text(encoding="utf-8")))
        stages = dict(row["stages"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{result} has no {RESULT} of a run that trained a stage ({error})") from error
    prepared = read_prepared(data)
    content = {**row["recipe"], "model": {**row["recipe"]["model"], "source": prepared.model}}
    recipe = parse_recipe(content, origin=str(result / RESULT))
    model, tokenizer = convert_teacher(inspect_source(prepared.model), recipe)
    config = stage2_config(recipe) if "stage2" in stages else None
    if config is not None and config.lora_targets:
        add_lora(model, config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_targets)
    train_only(model, MIXER_MARK, ADAPTER_MARK)
    load_trainable(model, result / STUDENT)
    load_part(model, result / STUDENT / MIXERS, MIXER_MARK, "The run has to be made again with this version.")
    card = ModelCard(
        name=recipe.name,
        teacher=row["prepared"]["model"],
        mixers={},
        training_tokens={name: stage["tokens"] for name, stage in stages.items()},
        command=row["command"],
        versions=row["versions"],
        notes=tuple(row["notes"]),
    )
    return export_student(model, tokenizer, output, card)
