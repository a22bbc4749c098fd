"""A converted model gives the same logits and gradients whichever form computes its window."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex
from transformers import DynamicCache

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.kernels import window, window_flex
from subquad.layers import resolve_mixer
from tests.tiny_llama import relative_error, tiny_teacher, tiny_tokens

LENGTH = 150


@pytest.fixture
def fused(monkeypatch):
    """Return a switch to FlexAttention's own PyTorch implementation, which returns the counter of its graphs."""

    def switch():
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(window, "_fuses", lambda backend, q, k, v: q.shape[1] >= window_flex.MIN_QUERIES)
        graphs = CompileCounter()
        traced = torch.compile(window_flex._attend, backend=graphs, dynamic=True, fullgraph=True)
        monkeypatch.setattr(window_flex, "_compiled", lambda: traced)
        return graphs

    return switch


def calls(ids):
    """Return the keyword arguments of a plain, a packed, a padded and a cached call."""
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    packed = torch.cat([torch.arange(60), torch.arange(LENGTH - 60)])[None].expand_as(ids)
    return {
        "plain": {"use_cache": False},
        "packed": {"use_cache": False, "position_ids": packed},
        "padded": {"use_cache": False, "attention_mask": mask},
        "cached": {"use_cache": True, "attention_mask": mask},
    }


@pytest.mark.parametrize("name", ["plain", "packed", "padded", "cached"])
def test_both_forms_of_the_window_agree(fused, name):
    torch.manual_seed(0)
    teacher = tiny_teacher()
    mixer = resolve_mixer({"preset": "2mamba", "window": 8, "sinks": 2, "mix_reference": "absolute"})
    model = apply_plan(teacher, plan_conversion(teacher.config, mixer))
    ids = tiny_tokens(2, LENGTH)
    options = calls(ids)[name]
    weights = dict(model.named_parameters())
    results = []
    for form in ("blocked", "fused"):
        graphs = fused() if form == "fused" else None
        cache = {"past_key_values": DynamicCache(config=model.config)} if options["use_cache"] else {}
        logits = model(ids, **options, **cache).logits
        gradients = torch.autograd.grad(logits.square().mean(), list(weights.values()), allow_unused=True)
        results.append([logits, *(gradient for gradient in gradients if gradient is not None)])
    assert graphs.frame_count == 1
    errors = [relative_error(actual, expected) for expected, actual in zip(*results, strict=True)]
    assert len(errors) > 10
    assert max(errors) < 1e-4
