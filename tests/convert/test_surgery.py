"""Applying and undoing a plan: what is shared, counted and refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan, undo_plan
from subquad.errors import ConfigError
from subquad.layers import resolve_mixer
from tests.tiny_llama import tiny_config, tiny_teacher, tiny_tokens

MIXER = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2})


def test_weights_are_shared_and_new_ones_counted():
    teacher = tiny_teacher()
    before = dict(teacher.named_parameters())
    plan = plan_conversion(teacher.config, MIXER, layers=None)
    model = apply_plan(teacher, plan)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    new = sum(parameter.numel() for name, parameter in after.items() if name not in before)
    assert new == sum(layer.added_parameters for layer in plan.layers) > 0
    assert all(after[name].dtype == torch.float32 for name in after if name not in before)


def test_second_conversion_other_models_and_other_plans_are_refused():
    teacher = tiny_teacher()
    with pytest.raises(ConfigError, match="3 layers, the model has 2"):
        apply_plan(teacher, plan_conversion(tiny_config(num_hidden_layers=3), MIXER, layers=None))
    plan = plan_conversion(teacher.config, MIXER, layers=None)
    apply_plan(teacher, plan)
    with pytest.raises(ConfigError, match="converted already"):
        apply_plan(teacher, plan)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        apply_plan(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), plan)


@torch.no_grad()
def test_undo_of_a_reloaded_model_is_the_teacher(tmp_path):
    teacher = tiny_teacher()
    expected = teacher(tiny_tokens()).logits
    model = apply_plan(teacher, plan_conversion(teacher.config, MIXER, layers=None))
    model.save_pretrained(tmp_path)
    restored = undo_plan(type(model).from_pretrained(tmp_path))
    assert torch.equal(restored(tiny_tokens()).logits, expected)
    assert "mixers" not in restored.config.to_dict()
    generated = restored.generate(tiny_tokens(), max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 43)
    with pytest.raises(ConfigError, match="undo_plan takes"):
        undo_plan(restored)
