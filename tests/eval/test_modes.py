"""Evaluation modes: attention and adapters together."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaForCausalLM

from subquad.errors import ConfigError
from subquad.eval.loss import evaluate_loss
from subquad.eval.modes import evaluation_mode

from .conftest import make_converted


def add_adapters(model):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), model)


@pytest.fixture
def rows():
    tokens = torch.randint(97, (3, 60), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row} for row in tokens]


def test_teacher_is_the_softmax_model_with_the_same_weights(converted, rows):
    teacher = LlamaForCausalLM(converted.config).eval()
    teacher.load_state_dict({k: v for k, v in converted.state_dict().items() if ".mixer." not in k})
    expected = evaluate_loss(teacher, rows, mode=None)
    got = evaluate_loss(converted, rows, mode="teacher")
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    assert evaluate_loss(converted, rows, mode="student").loss != pytest.approx(expected.loss, rel=1e-3)


def test_control_agrees_with_the_teacher_inside_the_window_only(converted, rows):
    buckets = (9, 1000)
    teacher, control = (
        evaluate_loss(converted, rows, mode=mode, position_buckets=buckets).by_position
        for mode in ("teacher", "window_only")
    )
    assert control[0].loss == pytest.approx(teacher[0].loss, rel=1e-5)
    assert control[1].loss != pytest.approx(teacher[1].loss, rel=1e-3)


def test_adapters_count_for_the_student_and_for_nobody_untrained(converted, rows):
    modes = ("student", "teacher", "window_only", "student_without_far")
    before = {mode: evaluate_loss(converted, rows, mode=mode).loss for mode in modes}
    assert before["window_only"] == before["student_without_far"]
    add_adapters(converted)
    trainable = {name for name, parameter in converted.named_parameters() if parameter.requires_grad}
    after = {mode: evaluate_loss(converted, rows, mode=mode).loss for mode in modes}
    assert after["teacher"] == before["teacher"]
    assert after["window_only"] == before["window_only"]
    assert after["student"] != pytest.approx(before["student"], rel=1e-3)
    assert after["student_without_far"] != pytest.approx(before["student_without_far"], rel=1e-3)
    assert trainable == {name for name, parameter in converted.named_parameters() if parameter.requires_grad}


def test_modes_are_restored_after_an_error(converted):
    add_adapters(converted)
    converted.train()
    with pytest.raises(RuntimeError, match="inside"), evaluation_mode(converted, "teacher"):
        raise RuntimeError("inside")
    attention = converted.model.layers[0].self_attn
    assert attention.mode == "student"
    assert not attention.q_proj.disable_adapters
    assert converted.training


def test_unknown_mode_and_missing_window_are_refused(converted):
    with pytest.raises(ConfigError, match="techer"), evaluation_mode(converted, "techer"):
        pass
    pure = make_converted({"preset": "2mamba", "window": 0})
    with pytest.raises(ConfigError, match="window: 0"), evaluation_mode(pure, "window_only"):
        pass
