"""The folder of a run belongs to one recipe, and remembers what is finished."""

import pytest

from subquad.errors import OutputError
from subquad.recipes.loader import load_recipe
from subquad.recipes.run_folder import STAGES, RunFolder, recipe_differences


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_new_folder_gets_the_resolved_recipe(folder):
    recipe = load_recipe("demo", ["seed=7"])
    folder.claim(recipe)
    assert load_recipe(folder.path / "recipe.yaml") == recipe


def test_the_same_recipe_may_come_back_from_elsewhere(folder):
    folder.claim(load_recipe("demo", ["output_dir=a"]))
    folder.claim(load_recipe("demo", ["output_dir=b"]))


def test_another_recipe_is_refused_and_loses_nothing(folder):
    folder.claim(load_recipe("demo"))
    folder.finish("plan", {"layers": 3}, seconds=1.0)
    with pytest.raises(OutputError) as caught:
        folder.claim(load_recipe("demo", ["stage1.tokens=50000", "convert.mixer.window=32"]))
    message = str(caught.value)
    there = load_recipe("demo")
    assert f"stage1.tokens: {there.stage1.tokens} there, 50000 here" in message
    assert f"convert.mixer.window: {there.convert.mixer.window} there, 32 here" in message
    assert "output_dir=FOLDER" in message
    assert "--fresh" in message
    assert folder.result("plan") == {"layers": 3}


def test_foreign_files_are_left_alone(folder):
    folder.path.mkdir()
    (folder.path / "thesis.tex").write_text("words")
    for fresh in (False, True):
        with pytest.raises(OutputError, match="holds files that are not a run's"):
            folder.claim(load_recipe("demo"), fresh=fresh)
    assert (folder.path / "thesis.tex").read_text() == "words"


def test_fresh_removes_the_run_and_nothing_else(folder):
    folder.claim(load_recipe("demo"))
    folder.finish("plan", {}, seconds=1.0)
    folder.student_dir.mkdir()
    (folder.path / "recipe.yaml").write_text("damaged: [")
    with pytest.raises(OutputError, match="recipe this version cannot read"):
        folder.claim(load_recipe("demo"))
    folder.claim(load_recipe("demo", ["seed=3"]), fresh=True)
    assert not folder.finished("plan")
    assert not folder.student_dir.exists()
    assert load_recipe(folder.path / "recipe.yaml").seed == 3


def test_fresh_keeps_files_of_the_user(folder):
    folder.claim(load_recipe("demo"))
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="not a run's"):
        folder.claim(load_recipe("demo", ["seed=3"]), fresh=True)
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_an_output_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OutputError, match="cannot be used as the folder of a run"):
        RunFolder(tmp_path / "run").claim(load_recipe("demo"))


def test_a_stage_counts_only_with_all_before_it_and_its_files(folder):
    folder.claim(load_recipe("demo"))
    made = folder.stages_dir / "calibrated.safetensors"
    folder.finish("plan", {}, seconds=1.0)
    folder.finish("calibrate", {}, seconds=2.0, files=(made,))
    assert folder.finished("plan")
    assert not folder.finished("calibrate")
    folder.finish("convert", {}, seconds=1.5)
    assert not folder.finished("calibrate")
    made.touch()
    assert folder.finished("calibrate")
    assert folder.seconds() == {"plan": 1.0, "convert": 1.5, "calibrate": 2.0}


def test_markers_that_are_missing_or_damaged(folder):
    folder.claim(load_recipe("demo"))
    with pytest.raises(OutputError, match="has not finished the stage export"):
        folder.result("export")
    folder.stages_dir.mkdir()
    (folder.stages_dir / "plan.json").write_text("{")
    with pytest.raises(OutputError, match=r"plan.json is damaged.*Remove it"):
        folder.finished("plan")


@pytest.mark.parametrize(
    "text", ["[]", "{}", "3", '{"seconds": 1, "files": []}', '{"seconds": "1", "files": [], "result": {}}']
)
def test_markers_without_what_they_must_hold(folder, text):
    folder.claim(load_recipe("demo"))
    folder.stages_dir.mkdir()
    (folder.stages_dir / "plan.json").write_text(text)
    with pytest.raises(OutputError, match=r"plan.json is damaged: it must hold seconds, files, result\. Remove it"):
        folder.finished("plan")


def test_clearing_that_is_killed_can_be_repeated(folder, monkeypatch):
    folder.claim(load_recipe("demo"))
    folder.finish("plan", {}, seconds=1.0)
    folder.student_dir.mkdir()

    def kill(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("subquad.recipes.run_folder.shutil.rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            folder.clear()
    folder.claim(load_recipe("demo", ["seed=3"]), fresh=True)
    assert not folder.student_dir.exists()


def test_a_process_that_is_about_to_claim_the_folder_is_no_foreign_file(folder):
    folder.path.mkdir()
    (folder.path / ".recipe.yaml.12.part").touch()
    folder.refuse_other_files()


def test_every_stage_has_its_place():
    assert STAGES[0] == "plan"
    assert STAGES[-1] == "report"
    assert len(set(STAGES)) == len(STAGES)


def test_a_whole_mixer_is_one_difference():
    found = recipe_differences(load_recipe("demo"), load_recipe("demo", ["convert.layers.0-3=softmax"]))
    assert len(found) == 1
    assert found[0].startswith("convert.layers.0-3: nothing there, {'score': 'softmax'")


def test_differences_of_equal_recipes_are_none():
    assert recipe_differences(load_recipe("demo"), load_recipe("demo")) == []
