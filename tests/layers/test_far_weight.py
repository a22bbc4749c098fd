"""The far part's weight beside the window, against a double loop of its formula."""

import math

import pytest
import torch

from subquad.convert.calibrate import calibrate
from subquad.errors import ConfigError
from subquad.layers import converted_layers
from subquad.layers import resolve_mixer as mixer
from subquad.layers.far_weight import LENGTH_SCALE
from subquad.layers.inputs import HeadInputs
from subquad.layers.sequence import SequenceInfo
from tests.layers.students import convert
from tests.tiny_llama import relative_error, tiny_teacher, tiny_tokens

WINDOW, SINKS, OFFSET = 6, 2, 0.7
MIX = {"score": "power", "order": 2, "offset": True, "window": WINDOW, "sinks": SINKS}


def layer_and_inputs(**parts):
    model = convert(tiny_teacher(), {**MIX, **parts}, randomise=False)
    layer = converted_layers(model)[0]
    generator = torch.Generator().manual_seed(0)

    def heads(count):
        return torch.randn(1, 24, count, layer.geometry.head_dim, generator=generator, dtype=torch.float64)

    hidden = torch.randn(1, 24, layer.geometry.hidden_size, generator=generator, dtype=torch.float64)
    inputs = HeadInputs(hidden, heads(6), heads(2), heads(2), None, SequenceInfo())
    weight = layer.mixer.far_weight
    with torch.no_grad():
        layer.mixer.score.offset.fill_(OFFSET)
        for tensor in (weight.exponents, weight.means, weight.input_weight):
            if tensor is not None:
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        weight.log_mix.copy_(torch.linspace(-3, -1, 6))
    return layer.double(), inputs


def double_loop(layer, inputs, *, mix_reference="near", mix_by_mass=False, mix_by_input=False):
    q, k, v, x = inputs.q[0], inputs.k[0], inputs.v[0], inputs.hidden_states[0]
    weight, scale = layer.mixer.far_weight, layer.geometry.head_dim**-0.5
    out = torch.zeros_like(q)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            kv = h // layer.geometry.group_size
            near = [s for s in range(t + 1) if s > t - WINDOW or s < SINKS]
            far = [s for s in range(t + 1) if s not in near]
            logits = [scale * float(q[t, h] @ k[s, kv]) for s in range(t + 1)]
            window_mass = sum(math.exp(logits[s]) for s in near)
            total, mass = sum(math.exp(logits[s]) * v[s, kv] for s in near), window_mass
            if far:
                scores = {s: (logits[s] + OFFSET) ** 2 for s in far}
                far_mass = sum(scores.values())
                log_u = float(weight.log_mix[h])
                if mix_by_mass:
                    logs = (math.log(window_mass), math.log(far_mass), math.log(len(far) + LENGTH_SCALE))
                    for log, mean, power in zip(logs, weight.means[:, h], weight.exponents[:, h], strict=True):
                        log_u += float(power) * (log - float(mean))
                if mix_by_input:
                    log_u += float(weight.input_weight[h] @ x[t])
                u = math.exp(log_u) * (window_mass if mix_reference == "near" else 1.0)
                total = total + u * sum(scores[s] * v[s, kv] for s in far)
                mass += u * far_mass
            out[t, h] = total / mass
    return out


@torch.no_grad()
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"mix_by_mass": True},
        {"mix_by_input": True},
        {"mix_by_mass": True, "mix_by_input": True},
        {"mix_by_mass": True, "mix_reference": "absolute"},
    ],
)
def test_values(parts):
    layer, inputs = layer_and_inputs(**parts)
    expected = double_loop(layer, inputs, **parts)
    assert relative_error(layer.student_heads(inputs)[0], expected) < 1e-5
    if parts:
        other = double_loop(layer, inputs)
        assert relative_error(other, expected) > 1e-2


def test_every_part_has_a_gradient():
    layer, inputs = layer_and_inputs(mix_by_mass=True, mix_by_input=True)
    layer.student_heads(inputs).square().sum().backward()
    weight = layer.mixer.far_weight
    for parameter in (weight.log_mix, weight.exponents, weight.input_weight):
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).float().mean() > 0.9


def test_calibration_sets_the_means_of_the_logs(monkeypatch):
    # whether this tiny model gains is not the question here
    monkeypatch.setattr("subquad.convert.calibrate.mean_loss", lambda model, rows: 0.0)
    model = convert(tiny_teacher(), {**MIX, "temperature": True, "mix_by_mass": True}, randomise=False)
    rows = [{"input_ids": tiny_tokens(2, 40, seed)} for seed in (1, 2)]
    calibrate(model, rows)
    seen = {}

    def hook(layer, args, kwargs):
        inputs = layer.inputs(kwargs["hidden_states"], kwargs["position_embeddings"], kwargs.get("sequence"))
        parts = layer.mixer.parts(inputs)
        logs = layer.mixer.far_weight.logs(parts.near, parts.mass, parts.far_inputs)[:, :, WINDOW + SINKS :]
        seen.setdefault(layer, []).append(logs)

    first = converted_layers(model)[0]
    # the first layer's input is the same whatever the layers after it do
    handle = first.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        for row in rows:
            model.model(**row, use_cache=False)
    handle.remove()
    mean = torch.cat(seen[first], dim=1).mean((1, 2))
    torch.testing.assert_close(first.mixer.far_weight.means, mean, rtol=1e-4, atol=1e-4)
    assert (mean[2] - (torch.arange(1.0, 33.0) + LENGTH_SCALE).log().mean()).abs().max() < 1e-5


def test_refusals():
    with pytest.raises(ConfigError, match="mix_by_mass: true weighs the far part against a window; it needs"):
        mixer({"preset": "2mamba", "window": 0, "mix_by_mass": True})
    with pytest.raises(ConfigError, match="mix_by_input: true weighs the far part against a window"):
        mixer({"preset": "2mamba-pure", "mix_by_input": True})
    with pytest.raises(ConfigError, match="normaliser: rms does not keep; use normaliser: sum, or mix_by_input"):
        mixer({"preset": "mamba2s", "mix_by_mass": True})
    with pytest.raises(ConfigError, match="write_gate: true is for score: power and taylor"):
        mixer({"preset": "fox", "write_gate": True})


def test_rows_without_far_tokens_leave_the_means():
    model = convert(tiny_teacher(), {"preset": "2mamba", "window": 4, "kept_keys": 60, "mix_by_mass": True}, False)
    start = [layer.mixer.far_weight.means.clone() for layer in converted_layers(model)]
    calibrate(model, [{"input_ids": tiny_tokens(2, 50)}])
    for layer, means in zip(converted_layers(model), start, strict=True):
        assert torch.equal(layer.mixer.far_weight.means, means)
