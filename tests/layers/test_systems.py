"""Every system against its own formula: values, gradients, all forms; and mutants of the parts, which must differ."""

from __future__ import annotations

import functools

import pytest
import torch

from subquad.convert.plan import plan_conversion
from subquad.convert.surgery import apply_plan
from subquad.kernels import exp_attention, poly_attention
from subquad.layers import PRESETS, converted_layers, resolve_mixer
from tests.layers.reference_systems import SYSTEMS, Tokens
from tests.tiny_llama import relative_error, tiny_teacher

LENGTH = 13
TOLERANCE = 1e-4
all_systems = pytest.mark.parametrize("name", SYSTEMS)


def make_layer(name):
    """Return a converted layer with random parameters, whose decays forget within the sequence."""
    teacher = tiny_teacher()
    model = apply_plan(teacher, plan_conversion(teacher.config, resolve_mixer(SYSTEMS[name][0])))
    layer = converted_layers(model)[0]
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in layer.mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if layer.mixer.decay is not None:
            layer.mixer.decay.set_timescale(torch.tensor([3.0, 9.0]))
        # Logits around the clamp of the gate variant.
        layer.q_proj.weight.mul_(2.0)
    rope = model.model.rotary_emb(torch.zeros(1, LENGTH, 36), torch.arange(LENGTH)[None])
    return layer, rope


def hidden_states():
    return torch.randn(1, LENGTH, 36, generator=torch.Generator().manual_seed(4))


def by_layer(layer, rope, x):
    """Return the heads before the output projection `[T, H, e]` and the leaves whose gradients are compared."""
    inputs = layer.inputs(x, rope)
    heads = inputs._replace(q=leaf(inputs.q), k=leaf(inputs.k), v=leaf(inputs.v), hidden_states=leaf(x))
    out = layer.student_heads(heads)[0]
    parameters = dict(layer.mixer.named_parameters())
    return out, {"q": heads.q, "k": heads.k, "v": heads.v, "x": heads.hidden_states, **parameters}


def by_definition(name, layer, rope, x):
    """Return the same from the reference, in float64."""
    inputs = layer.inputs(x, rope)
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "x": x, **dict(layer.mixer.named_parameters())}
    leaves = {key: leaf(value.double()) for key, value in leaves.items()}
    parameters = {key: value for key, value in leaves.items() if key not in "qkvx"}
    rows = [leaves[key][0] for key in "xqkv"]
    tokens = Tokens(*rows, *(table[0].double() for table in rope), parameters)
    return SYSTEMS[name][1](tokens), leaves


def leaf(x):
    return x.detach().clone().requires_grad_()


def error_of(name):
    """Return the relative error of the layer's heads."""
    layer, rope = make_layer(name)
    with torch.no_grad():
        return relative_error(
            by_layer(layer, rope, hidden_states())[0], by_definition(name, layer, rope, hidden_states())[0]
        )


def test_every_preset_has_a_reference():
    covered = {str(system if isinstance(system, str) else system["preset"]) for system, _ in SYSTEMS.values()}
    # These are their `-pure` forms with parts that a window needs, which test_attention.py covers.
    assert covered | {"softmax", "taylor", "mamba2s", "2mamba"} == set(PRESETS)


@all_systems
def test_values_and_gradients_are_those_of_the_formula(name):
    layer, rope = make_layer(name)
    actual, leaves = by_layer(layer, rope, hidden_states())
    expected, reference_leaves = by_definition(name, layer, rope, hidden_states())
    assert relative_error(actual, expected) < TOLERANCE
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5)).double()
    gradients = torch.autograd.grad((actual * direction).sum(), list(leaves.values()), allow_unused=True)
    references = torch.autograd.grad((expected * direction).sum(), list(reference_leaves.values()), allow_unused=True)
    compared = 0
    for key, gradient, reference in zip(leaves, gradients, references, strict=True):
        assert (gradient is None) == (reference is None), key
        if reference is not None and reference.abs().max() > 1e-9:
            assert relative_error(gradient, reference) < 10 * TOLERANCE, key
            compared += 1
    assert compared >= (1 if name == "taylor-0" else 3)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in SYSTEMS if resolve_mixer(SYSTEMS[name][0]).linear])
@pytest.mark.parametrize(
    "options", [{"form": "quadratic"}, {"form": "chunked", "chunk_size": 4}], ids=["quadratic", "chunked"]
)
def test_other_forms_agree(name, options, monkeypatch):
    monkeypatch.setattr("subquad.layers.mixer.poly_attention", functools.partial(poly_attention, **options))
    assert error_of(name) < TOLERANCE


MUTANTS = {
    "the features are not rectified": ("linear-relu", "score.FEATURE_MAPS", {"relu": lambda x: x}),
    "elu without the one": ("linear-elu", "score.FEATURE_MAPS", {"elu": torch.nn.functional.elu}),
    "no unit length": ("taylor-cosine", "score.FEATURE_MAPS", {"cosine": lambda x: x}),
    "positions from 0": (
        "cottention",
        "value_step.PositionValueStep.forward",
        lambda self, rank: (rank - 1).clamp_min(1)[..., None] ** -self.exponent.sigmoid(),
    ),
    "exponent without sigmoid": (
        "cottention",
        "value_step.PositionValueStep.forward",
        lambda self, rank: rank[..., None] ** -self.exponent,
    ),
    "a forget gate of the wrong sign": (
        "fox",
        "decay.LogSigmoidDecay.forward",
        lambda self, x: torch.nn.functional.logsigmoid(-torch.nn.functional.linear(x, self.weight, self.bias)),
    ),
    "nothing is forgotten": ("2mamba-e", "decay.SoftplusDecay.forward", lambda self, x: torch.zeros(1, LENGTH, 2)),
    "a decay without dt": (
        "mamba2",
        "decay.Mamba2Decay.of_step",
        lambda self, step: -self.log_rate.exp().expand_as(step),
    ),
    "base 2 for e": (
        "fox",
        "decay.LogSigmoidDecay.forward",
        lambda self, x: torch.nn.functional.linear(x, self.weight, self.bias).sigmoid().log2(),
    ),
    "everything written": ("2mamba-write", "gates.WriteGate.forward", lambda self, x: torch.ones(1, LENGTH, 2)),
    "no skip": ("mamba2", "mixer.Mixer._skipped", lambda self, v: None),
    "skip from the wrong head": (
        "mamba2",
        "mixer.Mixer._skipped",
        lambda self, v: v.repeat(1, 1, 3, 1) * self.skip[:, None],
    ),
    "a sigmoid for silu": ("mamba2", "gates.GATES", {"silu": torch.sigmoid}),
    "no gate": ("fox-pro", "gates.OutputGate.forward", lambda self, x: torch.ones(1, LENGTH, 48)),
    "no clamp": (
        "softmax-gate",
        "mixer.exp_attention",
        lambda *args, **options: exp_attention(*args, **(options | {"clamp": 60.0})),
    ),
    "divided by the sum, not the count": (
        "softmax-gate",
        "mixer.exp_attention",
        lambda *args, **options: exp_attention(*args, **(options | {"normalize": True})),
    ),
    "no shift": ("fox-pro", "gates.TokenShift.forward", lambda self, kv, past, x, documents: kv),
    "no norm of q and k": ("fox-pro", "norms.QKNorm.forward", lambda self, q, k: (q, k)),
    "RMS for L2": (
        "softmax-l2",
        "mixer.head_norm",
        lambda kind, out, weight, bias: out * out.square().mean(-1, keepdim=True).rsqrt() * weight.view(6, 8),
    ),
    "layer norm without its bias": (
        "softmax-layer",
        "mixer.head_norm",
        lambda kind, out, weight, bias: torch.nn.functional.layer_norm(out, (8,)) * weight.view(6, 8),
    ),
    "a norm per head for one over all": (
        "linear-identity",
        "mixer.rms_over_heads",
        lambda out, weight: torch.nn.functional.rms_norm(out, (8,)) * weight.view(6, 8),
    ),
    "a norm of no gate": ("mamba2", "mixer.rms_over_heads", lambda out, weight: out),
    "another pair of learned features": ("based", "feature_maps.LearnedFeatures.keys", lambda self, k: k[..., :5]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_parts_are_noticed(mutant, monkeypatch):
    name, target, change = MUTANTS[mutant]
    assert error_of(name) < TOLERANCE
    target = f"subquad.layers.{target}"
    if isinstance(change, dict):
        for key, value in change.items():
            monkeypatch.setitem(_resolve(target), key, value)
    else:
        monkeypatch.setattr(target, change)
    assert error_of(name) > 100 * TOLERANCE


def _resolve(target):
    module, name = target.rsplit(".", 1)
    return getattr(__import__(module, fromlist=[name]), name)
