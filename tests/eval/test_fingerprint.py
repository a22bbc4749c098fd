"""A fingerprint tells apart models that compute something else, and nothing more."""

import pytest
import torch

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.eval.fingerprint import fingerprint
from subquad.layers import resolve_mixer
from subquad.models import SubquadLlamaForCausalLM
from tests.tiny_llama import tiny_teacher


@pytest.fixture
def model() -> SubquadLlamaForCausalLM:
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": "2mamba", "window": 8, "kept_keys": 4, "mix_by_mass": True})
    return apply_plan(teacher, plan_conversion(teacher.config, mixer))


def test_a_checkpoint_keeps_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert fingerprint(SubquadLlamaForCausalLM.from_pretrained(tmp_path)) == fingerprint(model)


@pytest.mark.parametrize("name", ["q_proj.weight", "mixer.decay.bias", "mixer.key_score.weight", "far_weight.means"])
def test_every_saved_tensor_counts(model, name):
    before, teacher = fingerprint(model), fingerprint(model, teacher=True)
    changed = [value for key, value in model.state_dict().items() if key.endswith(name)]
    with torch.no_grad():
        changed[0].view(-1)[0] += 1.0
    assert fingerprint(model) != before
    # the teacher has no mixers
    assert (fingerprint(model, teacher=True) == teacher) == ("mixer" in name or "far_weight" in name)
