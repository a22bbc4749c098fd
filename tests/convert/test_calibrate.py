"""Calibration brings the start nearer to the teacher and touches nothing else."""

import pytest
import torch

from subquad.convert.calibrate import calibrate, cautious_choice
from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan, undo_plan
from subquad.errors import ConfigError
from subquad.layers import attention_mode, converted_layers, resolve_mixer
from tests.tiny_llama import tiny_teacher, tiny_tokens


@pytest.mark.parametrize("preset", ["2mamba", "mamba2s", "taylor"])
def test_errors_go_down_and_the_teacher_stays(preset):
    teacher = tiny_teacher()
    ids = tiny_tokens(2, 120)
    expected = teacher(ids).logits
    mixer = resolve_mixer({"preset": preset, "window": 8, "sinks": 2, "exact_kv_heads": [1]})
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer, layers=None))
    seen = []
    result = calibrate(model, [{"input_ids": ids}], on_batch=seen.append)
    assert (result.tokens, sum(seen)) == (240, 480)
    if not result.kept:
        assert result.loss_after > result.loss_before
        return
    assert all(result.error_after[layer] < result.error_before[layer] for layer in (0, 1))
    # What was measured is what the calibrated layer does.
    again = calibrate(model, [{"input_ids": ids}])
    for layer in (0, 1):
        assert again.error_before[layer] == pytest.approx(result.error_after[layer], rel=1e-4)
    with attention_mode(model, "teacher"), torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    assert {layer.mode for layer in converted_layers(model)} == {"student"}


def test_pure_mixer_and_packed_rows():
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": "2mamba", "window": 0})
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer, layers=None))
    positions = torch.cat([torch.arange(50), torch.arange(70)])[None].expand(2, -1)
    result = calibrate(model, [{"input_ids": tiny_tokens(2, 120), "position_ids": positions}])
    assert all(result.error_after[layer] <= result.error_before[layer] for layer in (0, 1))


@pytest.mark.parametrize(
    "preset", ["linear-identity", "cottention", "softmax-l2", "softmax-layer", "mamba2", "fox-pro", "taylor-elu"]
)
def test_pure_systems_find_the_size_of_their_output(preset):
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": preset, **({"temperature": True} if preset == "taylor-elu" else {})})
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer))
    result = calibrate(model, [{"input_ids": tiny_tokens(2, 60)}])
    assert all(result.error_after[layer] < result.error_before[layer] for layer in (0, 1))


def test_a_layer_with_nothing_to_search_is_named_and_left(caplog):
    teacher = tiny_teacher()
    model = apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer("fox")))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level("INFO"):
        result = calibrate(model, [{"input_ids": tiny_tokens(2, 60)}])
    assert "layers [0, 1] have nothing to search" in caplog.text
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    # An exp score starts as its teacher: nothing is forgotten.
    assert all(result.error_after[layer] < 1e-3 for layer in (0, 1))


def test_nothing_to_calibrate_is_refused():
    teacher = tiny_teacher()
    model = apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer("2mamba"), layers=None))
    with pytest.raises(ConfigError, match="no rows"):
        calibrate(model, [])
    with pytest.raises(ConfigError, match="no converted layer"):
        calibrate(undo_plan(model), [{"input_ids": tiny_tokens()}])


def test_settings_that_raise_the_loss_are_undone(monkeypatch):
    teacher = tiny_teacher()
    model = apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer("2mamba"), layers=None))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses = iter([2.0, 2.5])
    monkeypatch.setattr("subquad.convert.calibrate.mean_loss", lambda model, rows: next(losses))
    with pytest.warns(UserWarning, match=r"2\.0000 to 2\.5000 and was undone"):
        result = calibrate(model, [{"input_ids": tiny_tokens(2, 120)}])
    assert not result.kept
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_the_smallest_weight_with_most_of_the_gain():
    errors = torch.tensor([[1.0, 0.9, 0.3, 0.0, 0.5], [1.0, 1.0, 1.2, 1.5, 2.0], [1.0, 0.2, 0.1, 0.0, 0.0]]).T[None]
    assert cautious_choice(errors).tolist() == [[2, 0, 1]]
    assert cautious_choice(errors[:, :1]).tolist() == [[0, 0, 0]]
