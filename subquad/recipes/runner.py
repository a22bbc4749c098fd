"""Run a recipe from the teacher to the report, one resumable stage after the other."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.console import Console
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from subquad.console import open_console
from subquad.convert.export import export_student
from subquad.convert.families import require_decoder
from subquad.errors import ConfigError, FolderInUseError, OutputError
from subquad.eval.results import Results
from subquad.eval.storage import load_results
from subquad.recipes.checks import check_recipe_against
from subquad.recipes.run_folder import LOCK_FILE, RECIPE_FILE, STAGES, RunFolder
from subquad.recipes.schema import Recipe
from subquad.recipes.steps import MAIN_PROCESS_STEPS, STEPS, bare_card
from subquad.recipes.workshop import Workshop

# processes wait for the main one while it measures, which takes longer than the half hour that is the default
_PROCESS_TIMEOUT = timedelta(hours=6)
_RUN_DIRS = ("student", "stages", "checkpoints", "plots")
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def run_recipe(
    recipe: Recipe, *, resume: bool = True, last_stage: str = "report", command: str | None = None
) -> Results | None:
    """Run a recipe, or continue it: stages that are finished are not run again, training goes on from its checkpoint.

    Started by `accelerate launch` in several processes, all of them train; the main one measures and writes.

    Args:
        recipe: the recipe.
        resume: False removes an earlier run in the recipe's folder first.
        last_stage: where to stop: `plan`, `convert`, `calibrate`, `baseline`, `stage1`, `stage2`, `keys`, `export`,
            `evaluate`, `suite` or `report`.
        command: command that repeats the run, for the report; None names the recipe in the run's folder.

    Returns:
        What was measured; None where `last_stage` comes before `evaluate`, and in all processes but the main one.

    Raises:
        ConfigError: `last_stage` is unknown, the recipe does not fit the model, or an encoder would be distilled.
        SourceError: the teacher is missing, damaged or cannot be converted.
        DataError: text is missing, empty or too short.
        OutputError: the folder holds another run, is in use by another process, or cannot be written (full disk).
        TrainingError: training diverged; the last good checkpoint was kept.
        TaskError: a task of `eval.suite` could not be measured; everything else is kept.
    """
    if last_stage not in STAGES:
        raise ConfigError(f"last_stage {last_stage!r} is unknown; it is one of {', '.join(STAGES)}")
    shop = _open_workshop(recipe, command)
    folder, state, console = shop.folder, shop.state, shop.console
    with only_run(folder, state), explained_write_errors(folder):
        if not folder.claimed:
            # a recipe that does not fit the model leaves no run behind that would be in the way of the mended one
            check_recipe_against(recipe, shop.info.hf_config)
            _check_stages(recipe, shop.info.hf_config.model_type, last_stage)
        if state.is_main_process:
            folder.claim(recipe, fresh=not resume)
        state.wait_for_everyone()
        stages = STAGES[: STAGES.index(last_stage) + 1]
        waiting = [stage for stage in stages if not folder.finished(stage)]
        if not waiting:
            console.print(f"{folder.path} is finished up to {last_stage}; nothing to do (--fresh runs it again).")
        elif waiting[0] != STAGES[0]:
            console.print(f"Continuing {folder.path} with {waiting[0]}.")
        for stage in waiting:
            _run_stage(shop, stage)
        finished = state.is_main_process and folder.finished("evaluate")
        return load_results(folder.path) if finished else None


def convert_recipe(recipe: Recipe, directory: Path, *, command: str | None = None) -> Path:
    """Write the converted and calibrated, but untrained, model of a recipe as a checkpoint.

    Runs the recipe up to the calibration, in its own folder, so that `run_recipe` continues from there.

    Args:
        recipe: the recipe.
        directory: where to write the checkpoint.
        command: command that repeats this, for the model card.

    Returns:
        The directory.

    Raises:
        ConfigError: as for `run_recipe`, like the others.
        SourceError: the teacher.
        DataError: the text.
        OutputError: the run's folder, or a directory that holds something else.
    """
    _refuse_run_files(directory)
    run_recipe(recipe, last_stage="calibrate", command=command)
    shop = _open_workshop(recipe, command)
    if not shop.state.is_main_process:
        return directory
    with only_run(shop.folder, shop.state), explained_write_errors(shop.folder):
        return export_student(shop.converted(), shop.tokenizer, directory, bare_card(shop))


def _check_stages(recipe: Recipe, model_type: str, last_stage: str) -> None:
    """Refuse the stages that an encoder has no use for, before anything is written."""
    if recipe.calibrate.enabled and STAGES.index(last_stage) >= STAGES.index("calibrate"):
        require_decoder(model_type, "calibration (calibrate.enabled=false leaves it out)")
    if STAGES.index(last_stage) > STAGES.index("calibrate"):
        require_decoder(model_type, "distillation")


def _refuse_run_files(directory: Path) -> None:
    """Refuse to write an untrained checkpoint over what a run made: its results would speak of another model."""
    path = directory.resolve()
    for place in (path, *path.parents):
        run_dir = place.parent
        if place.name in _RUN_DIRS and (run_dir / RECIPE_FILE).is_file() and (run_dir / "stages").is_dir():
            raise OutputError(
                f"{directory} belongs to the run in {run_dir}; an untrained checkpoint would take the place of what "
                f"that run made. Name another directory, such as {run_dir / 'converted'}"
            )


def _open_workshop(recipe: Recipe, command: str | None) -> Workshop:
    state, console = open_process()
    return Workshop(recipe, state, console, command or f"subquad run {recipe.run_dir / RECIPE_FILE} output_dir=FOLDER")


def open_process() -> tuple[PartialState, Console]:
    """Return which process of the run this is, and where it reports: nowhere in all processes but the main one."""
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=_PROCESS_TIMEOUT)
    console = open_console(quiet=not state.is_main_process)
    if not console.is_terminal:
        # the bars of transformers would fill a log file with carriage returns
        disable_progress_bar()
    return state, console


def _run_stage(shop: Workshop, stage: str) -> None:
    main = shop.state.is_main_process
    if stage in MAIN_PROCESS_STEPS:
        if not main:
            return
    else:
        shop.state.wait_for_everyone()
    start = time.monotonic()
    outcome = STEPS[stage](shop)
    if main:
        seconds = time.monotonic() - start if outcome.seconds is None else outcome.seconds
        shop.folder.finish(stage, outcome.result, seconds, outcome.files)
    if stage not in MAIN_PROCESS_STEPS:
        shop.state.wait_for_everyone()


@contextmanager
def only_run(folder: RunFolder, state: PartialState) -> Iterator[None]:
    """Hold a run's folder, so that a second run of it started by mistake is refused. Released by any kind of end.

    Args:
        folder: the folder of the run.
        state: which process this is; only the main one holds it.

    Yields:
        Nothing.

    Raises:
        FolderInUseError: another run holds the folder.
        OutputError: it cannot be written.
    """
    if not state.is_main_process:
        yield
        return
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.path / LOCK_FILE)
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderInUseError(
            f"{folder.path} is in use by another run; wait for it to end, or name another folder: output_dir=FOLDER."
        ) from None
    except OSError as error:
        raise OutputError(f"{folder.path} cannot be used as the folder of a run: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def explained_write_errors(folder: RunFolder) -> Iterator[None]:
    """Turn a full or read-only disk into an error that says how to go on; libraries raise it in their own ways.

    Args:
        folder: the folder of the run.

    Yields:
        Nothing.

    Raises:
        OutputError: the folder could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        full = "No space left" in str(error) or "PytorchStreamWriter failed" in str(error)
        if isinstance(error, OutputError) or not (full or getattr(error, "errno", None) in _WRITE_ERRORS):
            raise
        raise OutputError(
            f"{folder.path} cannot be written: {error}. Free space, or name a folder on another disk "
            "(output_dir=FOLDER); running the same command again continues with the last finished stage or checkpoint."
        ) from error
