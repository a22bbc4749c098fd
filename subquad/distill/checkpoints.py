"""Checkpoints that are either whole or not there: staged, listed with their digests, then renamed into place."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from subquad.convert.atomic import atomic_file
from subquad.errors import OutputError

logger = logging.getLogger(__name__)

STAGING_DIR = "incomplete"
MANIFEST_NAME = "manifest.json"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the optimizer step a checkpoint folder was written after."""
    return int(checkpoint.name.rpartition("-")[2])


def list_checkpoints(work_dir: Path) -> list[Path]:
    """Return the checkpoint folders in a stage's folder, newest first, damaged ones included."""
    found = [
        path
        for path in work_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and path.name.rpartition("-")[2].isdigit()
    ]
    return sorted(found, key=checkpoint_step, reverse=True)


def publish_checkpoint(staged: Path, work_dir: Path) -> Path:
    """Make a staged checkpoint visible in one step.

    The manifest is written last and the folder is renamed only then, so a process killed at any moment leaves either
    no folder of that name or a whole one.

    Args:
        staged: Folder under `work_dir/incomplete` with all files of the checkpoint.
        work_dir: Folder of the stage, on the same file system.

    Returns:
        The checkpoint's final folder.
    """
    files = {str(path.relative_to(staged)): _digest(path) for path in sorted(staged.rglob("*")) if path.is_file()}
    manifest = staged / MANIFEST_NAME
    manifest.write_text(json.dumps(files, indent=1), encoding="utf-8")
    for path in [staged / name for name in files] + [manifest]:
        _flush(path)
    final = work_dir / staged.name
    if final.exists():
        # only a damaged checkpoint that resuming went behind can be in the way
        shutil.rmtree(final)
    staged.rename(final)
    return final


def newest_valid_checkpoint(work_dir: Path) -> Path | None:
    """Return the newest checkpoint that is whole; each newer one that is not gets a warning.

    Args:
        work_dir: Folder of the stage; need not exist.

    Returns:
        A checkpoint folder, or None.
    """
    for checkpoint in list_checkpoints(work_dir):
        problem = _problem(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning("checkpoint %s is damaged (%s); falling back to the one before it", checkpoint, problem)
    return None


def discard_staged(work_dir: Path) -> None:
    """Remove what an interrupted save left behind."""
    shutil.rmtree(work_dir / STAGING_DIR, ignore_errors=True)


def remove_old_checkpoints(work_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints.

    Args:
        work_dir: Folder of the stage.
        keep: How many stay, at least 1.
    """
    for checkpoint in list_checkpoints(work_dir)[max(keep, 1) :]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def save_trainable(model: nn.Module, folder: Path, gathered: dict[str, Tensor] | None = None) -> None:
    """Write the parameters that require gradients to `model.safetensors`.

    Args:
        model: The model being trained, not wrapped.
        folder: Created if it is not there.
        gathered: Values by name where the model's own parameters are sharded; None takes the model's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = parameters if gathered is None else {name: gathered[name] for name in parameters}
    tensors = {name: value.contiguous() for name, value in values.items()}
    save_file(tensors, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def load_trainable(model: nn.Module, folder: Path) -> None:
    """Load what `save_trainable` wrote; the model must have exactly the same trainable parameters.

    Args:
        model: The model, set up for the same stage.
        folder: A checkpoint folder.

    Raises:
        OutputError: The file cannot be read, or names or shapes differ; the model is unchanged then.
    """
    path = folder / SAFE_WEIGHTS_NAME
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot read {path}: {error}. Delete {folder} to resume from an older checkpoint") from error
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    differing = sorted(tensors.keys() ^ parameters.keys()) + [
        f"{name}: {tuple(tensors[name].shape)} in the file, {tuple(parameters[name].shape)} in the model"
        for name in sorted(tensors.keys() & parameters.keys())
        if tensors[name].shape != parameters[name].shape
    ]
    if differing:
        raise OutputError(
            f"{path} does not fit the model: {len(differing)} trainable parameters differ, first {differing[:3]}. "
            "It was written for other mixers or adapters: use another work folder, or delete this one to start again"
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


def save_part(model: nn.Module, path: Path, mark: str) -> Path:
    """Write the parameters and buffers whose names hold a mark to one file, atomically.

    Args:
        model: The model, whole.
        path: A `.safetensors` file.
        mark: Such as `.mixer.`.

    Returns:
        The path.
    """
    part = {name: value.contiguous().cpu() for name, value in model.state_dict().items() if mark in name}
    atomic_file(path, save(part))
    return path


def load_part(model: nn.Module, path: Path, mark: str, advice: str) -> None:
    """Load what `save_part` wrote.

    Args:
        model: A model with the same parts.
        path: The file.
        mark: As for `save_part`.
        advice: What to do about a file that is missing, damaged or of another model.

    Raises:
        OutputError: The file cannot be read, or names or shapes differ; the model is unchanged then.
    """
    try:
        part = load_file(path)
    except FileNotFoundError:
        raise OutputError(f"{path} is missing. {advice}") from None
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path} is damaged: {error}. {advice}") from error
    own = {name: tuple(value.shape) for name, value in model.state_dict().items() if mark in name}
    found = {name: tuple(value.shape) for name, value in part.items()}
    wrong = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise OutputError(
            f"{path} does not fit the model: {len(wrong)} tensors differ, first {first} ({found.get(first)} in the "
            f"file, {own.get(first)} in the model). {advice}"
        )
    model.load_state_dict(part, strict=False)


def _problem(checkpoint: Path) -> str | None:
    manifest = checkpoint / MANIFEST_NAME
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {MANIFEST_NAME}"
    except (OSError, ValueError) as error:
        return f"{MANIFEST_NAME} cannot be read: {error}"
    if TRAINER_STATE_NAME not in files:
        return f"{MANIFEST_NAME} does not list {TRAINER_STATE_NAME}"
    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"{name} is not what was written"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
