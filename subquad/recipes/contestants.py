"""Load the models of an evaluation: a converted checkpoint, its teacher, the window-only control, and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from subquad.convert.plan import plan_conversion
from subquad.convert.source import load_teacher
from subquad.convert.surgery import apply_plan
from subquad.errors import ConfigError, DataError, OutputError
from subquad.eval.contestants import Contestant
from subquad.eval.modes import EvalMode
from subquad.eval.records import SAFE_NAME
from subquad.layers import converted_layers, resolve_mixer
from subquad.models import ConvertedConfig
from subquad.recipes.checkpoint import Checkpoint, load_checkpoint
from subquad.recipes.loader import load_recipe, recipe_kind
from subquad.recipes.run_folder import RECIPE_FILE

# of a conversion, and of a model from random weights
_CHECKPOINT_DIRS = ("student", "model")


def load_contestants(
    source: str,
    *,
    teacher: str | None = None,
    others: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> list[Contestant]:
    """Load what an evaluation compares.

    The teacher and the window-only control share one set of weights; the control has the teacher's weights and the
    student's window, sinks and softmax heads, no kept keys and no far part.

    Args:
        source: A run's folder, a converted checkpoint, or a checkpoint that has not been converted.
        teacher: The teacher; None takes the one of the run the checkpoint lies in.
        others: Further checkpoints or runs, converted or not, as `NAME=PATH`, or `PATH` alone: then a run's student is
            named by the run's folder, anything else by its last path component.
        dtype: Data type of the weights.

    Returns:
        `teacher`, `window_only` (where every converted layer has a window), `student`, and the others; a checkpoint
        that has not been converted is alone with the others, as `teacher`; one from random weights, as `student`.

    Raises:
        ConfigError: Two of them would have one name, or the teacher has another shape than the student.
        SourceError: One of them cannot be loaded.
        DataError: One of them has no tokenizer.
        OutputError: No teacher is given, and the checkpoint lies in no run.
    """
    folder = _checkpoint_of(source)
    loaded = load_checkpoint(str(folder) if folder.is_dir() else source, dtype)
    found = []
    if loaded.converted:
        reference = _teacher_of(folder) if teacher is None else teacher
        found = [] if reference is None else _references(loaded.model, reference, dtype)
        found.append(_contestant("student", str(folder), loaded))
    else:
        found.append(_contestant("teacher", source, loaded))
    named = [_named(other) for other in others]
    names = [contestant.name for contestant in found] + [name for name, _ in named]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigError(
            f"two of the models are called {', '.join(double)}; give one another name: --against NAME=PATH"
        )
    return found + [_contestant(name, path, load_checkpoint(path, dtype)) for name, path in named]


def _checkpoint_of(source: str) -> Path:
    """Return the checkpoint's folder of a run; any other path as it is."""
    folder = Path(source)
    if run_folder_of(source) != folder:
        return folder
    return next((folder / name for name in _CHECKPOINT_DIRS if (folder / name).is_dir()), folder)


def _named(other: str) -> tuple[str, str]:
    """Return the name and the path of a further checkpoint."""
    name, equals, path = other.partition("=")
    if not equals or Path(other).exists():
        name, path = "", other
    run_folder = run_folder_of(path)
    folder = _checkpoint_of(path)
    if not name:
        of_run = run_folder is not None and folder.name in _CHECKPOINT_DIRS
        name = (run_folder if of_run and run_folder is not None else folder).resolve().name
        # Names become files, so what a file's name had better not hold is replaced.
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("-._")
    if not re.fullmatch(SAFE_NAME, name):
        raise ConfigError(
            f"{name!r} cannot be the name of a model: letters, digits, dots, dashes and underscores, the first a "
            f"letter or digit; give one: --against NAME={path}"
        )
    return name, str(folder) if folder.is_dir() else path


def run_folder_of(source: str) -> Path | None:
    """Return the run's folder that a source is or lies in, or None."""
    return next((folder for folder in (Path(source), Path(source).parent) if (folder / RECIPE_FILE).is_file()), None)


def _teacher_of(student: Path) -> str | None:
    """Return the teacher of the run a checkpoint lies in; None for a model from random weights, which has none."""
    run_folder = run_folder_of(str(student))
    if run_folder is None:
        raise OutputError(
            f"{student} was converted from a teacher that nothing here names (no {RECIPE_FILE} beside it): "
            "give it with --teacher, or evaluate the run's folder."
        )
    recipe = run_folder / RECIPE_FILE
    return None if recipe_kind(recipe) == "pretrain" else load_recipe(str(recipe)).model.source


def _references(student: PreTrainedModel, source: str, dtype: torch.dtype) -> list[Contestant]:
    teacher = load_teacher(source, dtype)
    config = student.config
    assert isinstance(config, ConvertedConfig), "a converted checkpoint has this config"
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(config, name) != getattr(teacher.model.config, name):
            raise ConfigError(
                f"{source} cannot be the teacher: its {name} is {getattr(teacher.model.config, name)}, "
                f"the student's {getattr(config, name)}; give the checkpoint that was converted"
            )
    layers = {str(index): mixer for index, mixer in enumerate(config.layer_mixers()) if mixer is not None}
    plan = plan_conversion(teacher.model.config, resolve_mixer("softmax"), layers, dtype=dtype)
    model = apply_plan(teacher.model, plan)
    checkpoint = Checkpoint(model, teacher.tokenizer, converted=True)
    found = [_contestant("teacher", source, checkpoint, mode="teacher")]
    if all(layer.mixer is None or layer.mixer_config.window for layer in converted_layers(model)):
        found.append(_contestant("window_only", source, checkpoint, mode="window_only"))
    return found


def _contestant(name: str, source: str, checkpoint: Checkpoint, mode: EvalMode | None = None) -> Contestant:
    if checkpoint.tokenizer is None:
        raise DataError(f"{source} has no tokenizer, so it cannot read text; put its files beside the weights.")
    checkpoint.model.to(PartialState().device)
    return Contestant(name, source, checkpoint.model, checkpoint.tokenizer, mode)
