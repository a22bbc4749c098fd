"""The folder of a study: refused before anything is written, trained or removed where it holds something else."""

from pathlib import Path

import pytest
from filelock import FileLock

import subquad.pretrain.study.run as study_run
from subquad.convert.atomic import atomic_file
from subquad.errors import FolderInUseError, OutputError
from subquad.pretrain.study.folder import STUDY_FILE, run_folder
from subquad.pretrain.study.run import run_study
from subquad.pretrain.study.schema import study_recipes
from subquad.pretrain.tokenizer import provide_tokenizer
from subquad.recipes.loader import recipe_to_yaml
from subquad.recipes.run_folder import LOCK_FILE, RECIPE_FILE
from subquad.recipes.settings import text_source

from .tiny import base_content


class TrainedError(Exception):
    """Raised where a run would start."""


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    def run(recipe, **kwargs):
        raise TrainedError(recipe.name)

    monkeypatch.setattr(study_run, "run_pretrain", run)


def record(study, arm: str, seed: int = 0) -> Path:
    """Leave the folder of a run that has trained something."""
    recipe = next(each for each in study_recipes(study, [arm])[arm] if each.seed == seed)
    atomic_file(study.run_dir / STUDY_FILE, recipe_to_yaml(study).encode())
    run_folder(recipe).claim(recipe)
    (recipe.run_dir / "log.jsonl").write_text("{}\n")
    return recipe.run_dir


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("fresh", [False, True])
def test_runs_of_another_recipe_are_refused_even_if_their_arm_is_not_chosen(make_study, texts, fresh):
    record(make_study(), "softmax", seed=1)
    longer = base_content(texts)
    longer["training"]["tokens"] = 1280
    before = content(make_study().run_dir)
    with pytest.raises(OutputError, match=r"softmax, seed 1: training\.tokens: 640 there, 1280 here"):
        run_study(make_study(base=longer), arms=["plain"], resume=not fresh)
    assert content(make_study().run_dir) == before


def test_a_finished_arm_that_the_study_no_longer_allows_is_refused(make_study):
    record(make_study(), "plain")
    arms = {"softmax": {"mixer": "softmax"}, "plain": {"mixer": "2mmba"}}
    with pytest.raises(OutputError, match=r"plain: mixer: mixer '2mmba' is unknown"):
        run_study(make_study(arms=arms), arms=["softmax"])


def test_fresh_refuses_a_run_at_work_before_anything_is_removed(make_study):
    study = make_study()
    for arm in ("softmax", "plain"):
        held = record(study, arm)
    before = content(study.run_dir)
    with FileLock(held / LOCK_FILE), pytest.raises(FolderInUseError, match="seed-0 is in use by another run"):
        run_study(study, resume=False)
    assert {path: text for path, text in content(study.run_dir).items() if not path.endswith(LOCK_FILE)} == before


def test_fresh_removes_the_chosen_arms_alone(make_study, texts):
    study = make_study()
    kept, removed = record(study, "softmax"), record(study, "plain")
    with pytest.raises(TrainedError, match="little-plain"):
        run_study(study, arms=["plain"], resume=False)
    assert (kept / "log.jsonl").is_file()
    assert not (removed / RECIPE_FILE).exists()
    assert not (removed / "log.jsonl").exists()


def test_fresh_replaces_runs_of_another_recipe(make_study, texts):
    record(make_study(), "plain")
    longer = base_content(texts)
    longer["training"]["tokens"] = 1280
    with pytest.raises(TrainedError):
        run_study(make_study(base=longer), resume=False)


@pytest.mark.parametrize("name", ["thesis.tex", "arms/plain/notes.txt", "tokenizer/vocab.txt", "recipe.yaml"])
def test_a_folder_that_is_no_studys_is_left_as_it_is(make_study, name):
    study = make_study()
    file = study.run_dir / name
    file.parent.mkdir(parents=True)
    file.write_text("words")
    for resume in (True, False):
        with pytest.raises(OutputError, match="holds files that are not a study's"):
            run_study(study, resume=resume)
    assert content(study.run_dir) == {str(file): b"words"}


def test_the_folder_of_a_run_is_left_as_it_is(make_study, make_recipe):
    recipe = make_recipe()
    run_folder(recipe).claim(recipe)
    before = content(recipe.run_dir)
    with pytest.raises(OutputError, match="not a study's"):
        run_study(make_study(output_dir=str(recipe.run_dir)))
    assert content(recipe.run_dir) == before


def test_the_folder_of_another_study_is_left_as_it_is(make_study):
    with pytest.raises(TrainedError):
        run_study(make_study())
    before = content(make_study().run_dir)
    with pytest.raises(OutputError, match=r"holds the study 'little', this one is 'other'"):
        run_study(make_study(name="other"))
    assert content(make_study().run_dir) == before


def test_files_of_the_user_in_the_folder_of_a_run_are_found_first(make_study):
    with pytest.raises(TrainedError):
        run_study(make_study())
    folder = make_study().run_dir / "arms" / "plain" / "seed-1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"seed-1 holds files that are not a run's"):
        run_study(make_study())


def test_a_study_stopped_at_its_very_start_goes_on(make_study):
    study = make_study()
    recipe = study_recipes(study, ["plain"])["plain"][0]
    provide_tokenizer(recipe.tokenizer, text_source(recipe.data.train), study.run_dir / "tokenizer")
    recipe.run_dir.mkdir(parents=True)
    for leftover in (recipe.run_dir / LOCK_FILE, study.run_dir / ".study.yaml.12.part"):
        leftover.touch()
    with pytest.raises(TrainedError):
        run_study(study)


def test_a_file_in_the_way_is_an_output_error(make_study):
    study = make_study()
    study.run_dir.write_text("a file")
    with pytest.raises(OutputError, match="cannot be used as the folder of a study"):
        run_study(study)
