"""Load the models of an evaluation: a converted checkpoint, its teacher, the window-only control, and others."""

from __future__ import annotations

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
from subquad.layers import converted_layers, resolve_mixer
from subquad.models import ConvertedConfig
from subquad.recipes.checkpoint import Checkpoint, load_checkpoint
from subquad.recipes.loader import load_recipe
from subquad.recipes.run_folder import RECIPE_FILE


def load_contestants(
    source: str,
    *,
    teacher: str | None = None,
    others: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> list[Contestant]:
    """Load what an evaluation compares.

    The teacher and the window-only control share one set of weights; the control has the student's window and sinks,
    the teacher's weights and no far part.

    Args:
        source: A run's folder, a converted checkpoint, or a checkpoint that has not been converted.
        teacher: The teacher; None takes the one of the run the checkpoint lies in.
        others: Further checkpoints, converted or not, named by their last path component.
        dtype: Data type of the weights.

    Returns:
        `teacher`, `window_only` (where every converted layer has a window), `student`, and the others; a checkpoint
        that has not been converted is alone with the others, as `teacher`.

    Raises:
        ConfigError: Two of them would have one name, or the teacher has another shape than the student.
        SourceError: One of them cannot be loaded.
        DataError: One of them has no tokenizer.
        OutputError: No teacher is given, and the checkpoint lies in no run.
    """
    folder = Path(source)
    if run_folder_of(source) == folder and (folder / "student").is_dir():
        folder = folder / "student"
    loaded = load_checkpoint(str(folder) if folder.is_dir() else source, dtype)
    found = []
    if loaded.converted:
        found = _references(loaded.model, _teacher_of(folder) if teacher is None else teacher, dtype)
        found.append(_contestant("student", str(folder), loaded))
    else:
        found.append(_contestant("teacher", source, loaded))
    for other in others:
        found.append(_contestant(Path(other).name, other, load_checkpoint(other, dtype)))
    names = [contestant.name for contestant in found]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigError(f"two of the models are called {', '.join(double)}; rename one of the folders")
    return found


def run_folder_of(source: str) -> Path | None:
    """Return the run's folder that a source is or lies in, or None."""
    return next((folder for folder in (Path(source), Path(source).parent) if (folder / RECIPE_FILE).is_file()), None)


def _teacher_of(student: Path) -> str:
    run_folder = run_folder_of(str(student))
    if run_folder is None:
        raise OutputError(
            f"{student} was converted from a teacher that nothing here names (no {RECIPE_FILE} beside it): "
            "give it with --teacher, or evaluate the run's folder."
        )
    return load_recipe(str(run_folder / RECIPE_FILE)).model.source


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
