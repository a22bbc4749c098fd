"""A converted model computes the same on the kernels as in PyTorch: prefill, cached decoding, training."""

from __future__ import annotations

import pytest
import torch

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.kernels.triton import autograd
from subquad.layers.presets import resolve_mixer
from tests.tiny_llama import relative_error, tiny_teacher, tiny_tokens

MIXERS = {
    "2mamba": {"preset": "2mamba", "window": 4, "sinks": 1},
    "2mamba-pure": {"preset": "2mamba", "window": 0, "sinks": 0},
    "mamba2s-pure": {"preset": "mamba2s", "window": 0, "sinks": 0},
    "taylor": {"preset": "taylor", "window": 4, "sinks": 1},
}


@pytest.fixture(params=MIXERS, ids=str)
def model(request):
    teacher = tiny_teacher(num_hidden_layers=1, head_dim=16)
    return apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer(MIXERS[request.param]), layers=None))


def _both(monkeypatch, compute):
    """Return what `compute` gives in PyTorch and on the kernels, and how often the kernels were called."""
    calls = []
    for name in ("_poly_forward", "_poly_decode"):
        monkeypatch.setattr(autograd, name, _counted(getattr(autograd, name), calls))
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("SUBQUAD_BACKEND", backend)
        results.append(compute())
        assert (len(calls) > 0) == (backend == "triton")
    return results


def _counted(operator, calls):
    def call(*args):
        calls.append(operator)
        return operator(*args)

    return call


def test_logits_and_gradients(monkeypatch, model):
    tokens = tiny_tokens(seq_len=24)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0

    def compute():
        model.zero_grad()
        result = model(tokens, attention_mask=mask, labels=tokens)
        result.loss.backward()
        return result.logits, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (logits, grads), (found, found_grads) = _both(monkeypatch, compute)
    assert relative_error(found, logits) < 1e-5
    assert len(grads) == len(found_grads)
    assert all(relative_error(left, right) < 1e-3 for left, right in zip(found_grads, grads, strict=True))


def test_generation(monkeypatch, model):
    tokens = tiny_tokens(seq_len=7)

    def compute():
        return model.generate(
            tokens,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )

    expected, found = _both(monkeypatch, compute)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-4
