"""Run a study: every arm with every seed, each resumable, then the table, the plot and the JSON."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from subquad.convert.atomic import atomic_file
from subquad.errors import FolderInUseError, OutputError, TrainingError
from subquad.eval.plots import Plot
from subquad.eval.storage import RESULTS_FILE
from subquad.pretrain.results import PretrainResults, load_pretrain_results
from subquad.pretrain.run import RowStore, run_pretrain
from subquad.pretrain.schema import PretrainRecipe
from subquad.pretrain.study.folder import prepare_folder, run_folder
from subquad.pretrain.study.plots import plot_losses, plot_recall
from subquad.pretrain.study.schema import StudyRecipe, arm_folder, choose_arms, study_recipes
from subquad.pretrain.study.summary import ArmSummary, OrderStep, compare_order, summarise_arms
from subquad.pretrain.study.table import render_study
from subquad.pretrain.training import STAGE
from subquad.recipes.run_folder import RECIPE_FILE
from subquad.recipes.runner import open_process

TABLE_FILE = "table.md"


@dataclass(frozen=True)
class StudyResult:
    """What a study found so far.

    Attributes:
        folder: Folder of the study.
        table: The Markdown file.
        results: The JSON file.
        plot: The plot.
        arms: One summary per arm with a finished run.
        steps: The papers' order, step by step.
        waiting: Runs that another process works on, as `arm, seed n`.
    """

    folder: Path
    table: Path
    results: Path
    plot: Plot
    arms: list[ArmSummary]
    steps: list[OrderStep]
    waiting: list[str]


def run_study(
    study: StudyRecipe, *, arms: Sequence[str] = (), command: str = "subquad study", resume: bool = True
) -> StudyResult | None:
    """Train every arm with every seed that is not finished, then write the table, the plot and the JSON.

    Several processes may work on one study at the same time: each takes the next run nobody works on.

    Args:
        study: the study.
        arms: arms to run; empty is all. Table and plot show every finished run of the study.
        command: command that repeats the study.
        resume: False removes earlier runs of the arms, with the study's seeds, first.

    Returns:
        What was found; None in all processes but the main one of a distributed run.

    Raises:
        ConfigError: the study cannot run, with every problem of every arm; nothing was trained.
        DataError: text or tokenizer are missing or too short.
        FolderInUseError: a run that is to be removed is still worked on; nothing was removed.
        OutputError: the folder is not this study's, a run's folder holds another run, or cannot be written, or other
            processes still work on every run that is left and none is finished.
        TrainingError: trainings diverged, with their arms and causes; the others were run, table and plot show them.
    """
    state, console = open_process()
    chosen = choose_arms(study, arms)
    recipes = study_recipes(study, chosen)
    if state.is_main_process:
        prepare_folder(study, recipes, state, fresh=not resume)
    state.wait_for_everyone()
    store = RowStore()

    def run(recipe: PretrainRecipe) -> object:
        return run_pretrain(recipe, command=command, tokenizer_dir=study.run_dir / "tokenizer", store=store)

    waiting: list[str] = []
    failed: dict[str, str] = {}
    # seed by seed, so that an interrupted study has compared all arms at least once
    for index, seed in enumerate(study.seeds):
        for arm in chosen:
            name = f"{study.label(arm)}, seed {seed}"
            try:
                if not _run_arm(recipes[arm][index], name, run, state, console):
                    waiting.append(name)
            except TrainingError as error:
                # the text alone: the error's frames would keep the model in memory while the other arms train
                failed[name] = str(error)
                console.print(f"{name}: {error}", markup=False)
    result = None
    if state.is_main_process and (not failed or finished_rows(study)):
        result = write_study(study, waiting, list(failed))
    if failed:
        raise TrainingError(_describe_failures(study, failed, result))
    return result


def write_study(study: StudyRecipe, waiting: Sequence[str] = (), failed: Sequence[str] = ()) -> StudyResult:
    """Write table, plot and JSON from the finished runs of a study.

    Args:
        study: the study.
        waiting: runs that another process works on.
        failed: runs whose training failed, as `arm, seed n`.

    Returns:
        What was found.

    Raises:
        OutputError: no run is finished, or a file cannot be written.
    """
    rows = finished_rows(study)
    summaries = summarise_arms(study, rows)
    if not summaries:
        raise OutputError(f"{study.run_dir} has no finished run yet" + (f"; at work: {waiting[0]}" if waiting else "."))
    steps = compare_order(study, summaries)
    first = next(iter(next(iter(rows.values())).values()))
    table = study.run_dir / TABLE_FILE
    atomic_file(table, render_study(study, summaries, steps, first.chance, failed).encode())
    results = study.run_dir / RESULTS_FILE
    atomic_file(results, json.dumps(_as_json(study, rows, summaries, steps), indent=1).encode())
    return StudyResult(study.run_dir, table, results, _plot(study, summaries, first), summaries, steps, list(waiting))


def finished_rows(study: StudyRecipe) -> dict[str, dict[int, PretrainResults]]:
    """Return the results of every finished run of a study.

    Args:
        study: the study.

    Returns:
        Arm to seed to results.

    Raises:
        OutputError: a results file is damaged.
    """
    rows: dict[str, dict[int, PretrainResults]] = {}
    for arm in study.arms:
        for seed in study.seeds:
            folder = arm_folder(study, arm, seed)
            if (folder / RECIPE_FILE).is_file() and (folder / RESULTS_FILE).is_file():
                rows.setdefault(arm, {})[seed] = load_pretrain_results(folder)
    return rows


def _run_arm(
    recipe: PretrainRecipe, name: str, run: Callable[[PretrainRecipe], object], state: PartialState, console: Console
) -> bool:
    """Run one arm with one seed unless it is finished; returns False where another process works on it."""
    folder = run_folder(recipe)
    if folder.claimed and folder.finished("evaluate"):
        console.print(f"{name}: finished before.", markup=False)
        return True
    console.print(f"{name}:", markup=False)
    try:
        run(recipe)
    except FolderInUseError:
        if state.num_processes > 1:
            raise
        console.print(f"{name}: another process works on it.", markup=False)
        return False
    if state.is_main_process:
        # the exported model has the weights; optimizer states of every run would fill the disk
        shutil.rmtree(folder.work_dir(STAGE), ignore_errors=True)
    return True


def _describe_failures(study: StudyRecipe, failed: Mapping[str, str], result: StudyResult | None) -> str:
    listed = "\n".join(f"  {name}: {cause}" for name, cause in failed.items())
    written = "" if result is None else f"\nThe others are in {result.table}."
    return f"study {study.name}: {len(failed)} of its trainings failed:\n{listed}{written}"


def _plot(study: StudyRecipe, arms: Sequence[ArmSummary], first: PretrainResults) -> Plot:
    if any(arm.loss is not None for arm in arms):
        return plot_losses(study, [arm for arm in arms if arm.loss is not None], study.run_dir / "losses.png")
    recipe = next(iter(study_recipes(study, [arms[0].arm]).values()))[0]
    return plot_recall(study, arms, recipe.data.seq_len, first.chance, study.run_dir / "recall.png")


def _as_json(
    study: StudyRecipe,
    rows: Mapping[str, Mapping[int, PretrainResults]],
    arms: Sequence[ArmSummary],
    steps: Sequence[OrderStep],
) -> dict[str, Any]:
    return {
        "study": study.name,
        "arms": [dataclasses.asdict(arm) for arm in arms],
        "order": [dataclasses.asdict(step) for step in steps],
        "rows": [
            {"arm": arm, **results.model_dump(mode="json")} for arm, runs in rows.items() for results in runs.values()
        ],
    }
