"""Checkpoints are whole or not there, and load into what they were written for or not at all."""

import pytest
import torch
from torch import nn

from subquad.distill.checkpoints import (
    MANIFEST_NAME,
    list_checkpoints,
    load_trainable,
    newest_valid_checkpoint,
    publish_checkpoint,
    remove_old_checkpoints,
    save_trainable,
)
from subquad.errors import OutputError


def make_model(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    model[0].requires_grad_(False)
    return model


def stage(work_dir, step: int, text: str = "state"):
    staged = work_dir / "incomplete" / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "trainer_state.json").write_text(text)
    save_trainable(make_model(), staged)
    return staged


def test_nothing_is_visible_before_it_is_published(tmp_path):
    staged = stage(tmp_path, 5)
    assert newest_valid_checkpoint(tmp_path) is None
    assert publish_checkpoint(staged, tmp_path) == newest_valid_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    assert not staged.exists()


def damage_manifest_missing(checkpoint):
    (checkpoint / MANIFEST_NAME).unlink()


def damage_manifest_cut(checkpoint):
    path = checkpoint / MANIFEST_NAME
    path.write_text(path.read_text()[:-5])


def damage_file_missing(checkpoint):
    (checkpoint / "model.safetensors").unlink()


def damage_file_cut(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_empty(checkpoint):
    for path in checkpoint.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_manifest_missing, damage_manifest_cut, damage_file_missing, damage_file_cut, damage_empty],
)
def test_damaged_checkpoint_is_passed_over_with_a_warning(damage, tmp_path, caplog):
    # 9 < 10 < 100 as numbers, not as text
    for step in (9, 10, 100):
        publish_checkpoint(stage(tmp_path, step), tmp_path)
    damage(tmp_path / "checkpoint-100")
    assert newest_valid_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert "checkpoint-100 is damaged" in caplog.text


def test_published_again_after_damage(tmp_path):
    publish_checkpoint(stage(tmp_path, 5, "old"), tmp_path)
    publish_checkpoint(stage(tmp_path, 5, "new"), tmp_path)
    assert (newest_valid_checkpoint(tmp_path) / "trainer_state.json").read_text() == "new"


def test_old_checkpoints_are_removed_by_step(tmp_path):
    for step in (100, 9, 10):
        publish_checkpoint(stage(tmp_path, step), tmp_path)
    remove_old_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10"]


def test_only_trainable_parameters_are_saved_and_loaded(tmp_path):
    model = make_model()
    save_trainable(model, tmp_path)
    expected = {name: p.clone() for name, p in model[1].named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_trainable(model, tmp_path)
    assert all(torch.equal(p, expected[name]) for name, p in model[1].named_parameters())
    assert model[0].weight.abs().sum() == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: model[0].requires_grad_(True), r"2 trainable parameters differ, first \['0\.bias', '0\.weight'"),
        (lambda model: model[1].bias.requires_grad_(False), r"1 trainable parameters differ, first \['1\.bias'"),
    ],
)
def test_other_set_of_parameters_is_refused(change, message, tmp_path):
    save_trainable(make_model(), tmp_path)
    model = make_model()
    change(model)
    with pytest.raises(OutputError, match=message):
        load_trainable(model, tmp_path)


def test_other_shapes_are_refused_and_nothing_is_loaded(tmp_path):
    save_trainable(make_model(), tmp_path)
    model = make_model(width=4)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(OutputError, match=r"1\.weight: \(2, 3\) in the file, \(2, 4\) in the model"):
        load_trainable(model, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_unreadable_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(OutputError, match=r"cannot read .*model\.safetensors"):
        load_trainable(make_model(), tmp_path)
