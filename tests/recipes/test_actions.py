"""Single commands on a checkpoint: evaluate it, continue a prompt."""

import json

import pytest

from subquad.errors import ConfigError, DataError, SourceError
from subquad.recipes.actions import continue_prompt, evaluate_checkpoint, plan_recipe
from subquad.recipes.checkpoint import load_checkpoint
from subquad.recipes.runner import convert_recipe

from ..convert.tiny_checkpoints import write_hf


@pytest.fixture
def student_dir(make_recipe, tmp_path):
    return convert_recipe(make_recipe(calibrate={"enabled": False}), tmp_path / "student")


def test_student_is_measured_with_and_without_its_far_part(student_dir, text_files):
    measured = evaluate_checkpoint(str(student_dir), [str(text_files["eval"])], tokens=256, seq_len=32)
    content = json.loads(json.dumps(measured.to_dict()))
    assert content["loss"].keys() == {"as it is", "far part off"}
    assert content["num_tokens"] == 8 * 31
    assert measured.table().row_count == 2


def test_teacher_is_measured_as_it_is(teacher_dir, text_files):
    measured = evaluate_checkpoint(str(teacher_dir), [str(text_files["eval"])], tokens=256, seq_len=32)
    assert measured.losses.keys() == {"as it is"}


def test_rows_beyond_the_context_are_refused(teacher_dir, text_files):
    with pytest.raises(ConfigError, match="--seq-len is 129, beyond the model's context of 128"):
        evaluate_checkpoint(str(teacher_dir), [str(text_files["eval"])], tokens=256, seq_len=129)


def test_both_kinds_of_checkpoint_write(student_dir, teacher_dir):
    for source, converted in ((student_dir, True), (teacher_dir, False)):
        assert load_checkpoint(str(source)).converted is converted
        assert continue_prompt(str(source), "the heron", 3) == continue_prompt(str(source), "the heron", 3)


def test_damaged_or_missing_checkpoints(student_dir, tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        continue_prompt(str(tmp_path / "absent"), "a", 1)
    weights = student_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SourceError, match="cannot be loaded"):
        continue_prompt(str(student_dir), "a", 1)
    (student_dir / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json"):
        continue_prompt(str(student_dir), "a", 1)


def test_checkpoint_without_tokenizer_cannot_read(tmp_path):
    source = write_hf(tmp_path / "bare", tokenizer=False)
    with pytest.raises(DataError, match="has no tokenizer"):
        continue_prompt(str(source), "a", 1)


def test_plan_loads_no_weights(make_recipe, monkeypatch):
    monkeypatch.setattr("subquad.convert.source.load_teacher", None)
    plan = plan_recipe(make_recipe())
    assert len(plan.mixers) == 2
