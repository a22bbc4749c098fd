"""The folder of a study: it belongs to one study, and every run in it to that study's recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import yaml
from accelerate import PartialState

from subquad.convert.atomic import atomic_file
from subquad.errors import ConfigError, OutputError
from subquad.pretrain.run import STAGES
from subquad.pretrain.schema import PretrainRecipe, load_pretrain_recipe
from subquad.pretrain.study.schema import StudyRecipe, arm_folder, study_recipes
from subquad.pretrain.tokenizer import holds_trained_tokenizer
from subquad.recipes.loader import recipe_to_yaml
from subquad.recipes.run_folder import LOCK_FILE, RECIPE_FILE, RunFolder, recipe_differences
from subquad.recipes.runner import only_run

STUDY_FILE = "study.yaml"
_MOST_PROBLEMS = 10


def run_folder(recipe: PretrainRecipe) -> RunFolder:
    """Return the folder of a run from random weights."""
    return RunFolder(recipe.run_dir, STAGES, load_pretrain_recipe)


def prepare_folder(
    study: StudyRecipe, recipes: Mapping[str, Sequence[PretrainRecipe]], state: PartialState, *, fresh: bool
) -> None:
    """Make the folder the study's: a new one, or the one in which the same study was started before.

    Args:
        study: the study.
        recipes: the arms to run, with a recipe per seed.
        state: which process this is.
        fresh: remove earlier runs of these arms and seeds.

    Raises:
        FolderInUseError: a run that is to be removed is still worked on; nothing was removed.
        OutputError: the folder holds something else than this study, or a run of another recipe (both are left as they
            are), or cannot be written.
    """
    _refuse_other_files(study)
    replaced = set(recipes) if fresh else set()
    _refuse_other_runs(study, recipes, replaced)
    if fresh:
        _remove_runs([run_folder(recipe) for of_seeds in recipes.values() for recipe in of_seeds], state)
    for of_seeds in recipes.values():
        for recipe in of_seeds:
            run_folder(recipe).refuse_other_files()
    atomic_file(study.run_dir / STUDY_FILE, recipe_to_yaml(study).encode())


def _refuse_other_files(study: StudyRecipe) -> None:
    folder = study.run_dir
    try:
        recorded = _recorded_name(folder / STUDY_FILE)
        foreign = recorded is None and folder.exists() and not all(map(_is_leftover, folder.iterdir()))
    except (OSError, yaml.YAMLError) as error:
        raise OutputError(f"{folder} cannot be used as the folder of a study: {error}") from error
    if foreign:
        raise OutputError(
            f"{folder} holds files that are not a study's, and is left as it is. Name another folder: "
            "output_dir=FOLDER."
        )
    if recorded is not None and recorded != study.name:
        raise OutputError(
            f"{folder} holds the study {recorded!r}, this one is {study.name!r}. Name another folder: "
            "output_dir=FOLDER."
        )


def _recorded_name(path: Path) -> object:
    """Return the name of the study that a folder belongs to; None where it belongs to none."""
    if not path.is_file():
        return None
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content.get("name") if isinstance(content, dict) else content


def _is_leftover(entry: Path) -> bool:
    """Return whether a study that was stopped at its very start can have left this behind."""
    if entry.name == "tokenizer":
        return holds_trained_tokenizer(entry)
    if entry.name == "arms":
        return all(path.is_dir() or path.name == LOCK_FILE for path in entry.rglob("*"))
    return entry.name in (LOCK_FILE, ".tokenizer.lock") or (entry.name.startswith(".") and entry.suffix == ".part")


def _refuse_other_runs(study: StudyRecipe, recipes: Mapping[str, Sequence[PretrainRecipe]], replaced: set[str]) -> None:
    """Refuse a study with runs of other recipes, arms that are not chosen among them: the table shows all."""
    problems = [line for arm in study.arms if arm not in replaced for line in _other_runs(study, arm, recipes.get(arm))]
    if problems:
        listed = "\n".join(f"  {line}" for line in problems[:_MOST_PROBLEMS])
        more = len(problems) - _MOST_PROBLEMS
        listed += f"\n  and {more} more" if more > 0 else ""
        raise OutputError(
            f"the study's folder holds runs of other recipes:\n{listed}\n"
            "Name another folder (output_dir=FOLDER), or train these arms again with --fresh."
        )


def _other_runs(study: StudyRecipe, arm: str, recipes: Sequence[PretrainRecipe] | None) -> Iterator[str]:
    recorded = [seed for seed in study.seeds if (arm_folder(study, arm, seed) / RECIPE_FILE).is_file()]
    if not recorded:
        return
    try:
        wanted = {recipe.seed: recipe for recipe in recipes or study_recipes(study, [arm])[arm]}
    except ConfigError as error:
        yield from (line.strip() for line in str(error).splitlines()[1:])
        return
    for seed in recorded:
        recipe = wanted[seed]
        try:
            found = recipe_differences(load_pretrain_recipe(recipe.run_dir / RECIPE_FILE), recipe)
        except ConfigError as error:
            found = [f"{recipe.run_dir / RECIPE_FILE} cannot be read: {error}"]
        yield from (f"{arm}, seed {seed}: {line}" for line in found)


def _remove_runs(folders: Sequence[RunFolder], state: PartialState) -> None:
    with ExitStack() as held:
        # all of them before the first is removed, so that a refusal loses nothing
        claimed = [folder for folder in folders if folder.claimed]
        for folder in claimed:
            held.enter_context(only_run(folder, state))
        for folder in claimed:
            folder.clear()
