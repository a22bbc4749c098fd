"""Softmax with decay, clamp or without its denominator: both backends against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from subquad.errors import ConfigError
from subquad.kernels import exp_attention, exp_flex
from subquad.kernels.exp_attention import ExpInputs
from tests.kernels.oracle import relative_rms

# Gradients of decays are differences of sums over rows and over columns of the weights.
TOLERANCE = 5e-5
CASES = {
    "plain": {},
    "decay": {"decay": "gentle"},
    "strong decay": {"decay": "strong"},
    "clamp": {"clamp": 0.5},
    "clamp and decay": {"clamp": 0.5, "decay": "gentle"},
    "numerator": {"clamp": 0.5, "normalize": False},
    "numerator with decay": {"clamp": 0.5, "normalize": False, "decay": "gentle"},
    "padding": {"padded": True},
    "padding and decay": {"padded": True, "decay": "gentle"},
    "documents": {"packed": True},
    "documents and decay": {"packed": True, "decay": "gentle"},
    "documents, padding, decay, clamp, numerator": {
        "packed": True,
        "padded": True,
        "decay": "gentle",
        "clamp": 0.5,
        "normalize": False,
    },
    "a few last queries": {"num_queries": 3, "decay": "gentle", "padded": True},
    "one query": {"num_queries": 1},
    "one token": {"num_queries": 1, "seq_len": 1, "decay": "gentle"},
    "no groups": {"heads": (2, 2), "decay": "gentle"},
    "scale": {"scale": 0.9, "decay": "gentle"},
}


def make_case(
    num_queries=23,
    seq_len=23,
    heads=(4, 2),
    width=16,
    decay="none",
    padded=False,
    packed=False,
    clamp=None,
    scale=None,
    normalize=True,
    dtype=torch.float32,
    seed=0,
):
    """Return leaves (q, k, v, log_decay or None) and the other arguments."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(dtype).requires_grad_()

    leaves = {
        "q": normal(2, num_queries, heads[0], width),
        "k": normal(2, seq_len, heads[1], width),
        "v": normal(2, seq_len, heads[1], width + 8),
    }
    if decay != "none":
        size = {"gentle": 0.3, "strong": 200.0}[decay]
        log_decay = -size * torch.rand((2, seq_len, heads[1]), generator=random)
        leaves["log_decay"] = log_decay.requires_grad_()
    options = {"clamp": clamp, "scale": scale, "normalize": normalize, "valid": None, "documents": None}
    if padded:
        valid = torch.ones(2, seq_len, dtype=torch.bool)
        valid[0, : seq_len // 3] = False
        valid[1, -2:] = False
        options["valid"] = valid
    if packed:
        steps = torch.arange(seq_len)
        options["documents"] = torch.stack([steps // 7, steps // 11])
    return leaves, options


def by_definition(q, k, v, log_decay=None, *, clamp, scale, normalize, valid, documents):
    """Loop over queries and keys."""
    q, k, v = q.double(), k.double(), v.double()
    num_queries, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rows = []
    for query in range(num_queries):
        t = num_keys - num_queries + query
        numerator = torch.zeros(q.shape[0], q.shape[2], v.shape[3], dtype=torch.float64)
        total = torch.zeros(q.shape[0], q.shape[2], 1, dtype=torch.float64)
        for s in range(t + 1):
            key, value = (x[:, s].repeat_interleave(group, 1) for x in (k, v))
            exponent = scale * (q[:, query] * key).sum(-1)
            if clamp is not None:
                exponent = exponent.clamp(max=clamp)
            if log_decay is not None:
                exponent = exponent + log_decay.double()[:, s + 1 : t + 1].sum(1).repeat_interleave(group, 1)
            seen = torch.ones(q.shape[0], dtype=torch.bool)
            if valid is not None:
                seen = seen & valid[:, s]
            if documents is not None:
                seen = seen & (documents[:, s] == documents[:, t])
            weight = exponent.exp()[..., None] * seen[:, None, None]
            numerator, total = numerator + weight * value, total + weight
        rows.append(numerator / (total + (total == 0)) if normalize else numerator)
    return torch.stack(rows, dim=1)


def with_gradients(function, leaves, options):
    out = function(**leaves, **options)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out, *torch.autograd.grad((out * direction).sum(), list(leaves.values()), allow_unused=True)]


def worst(actual, expected):
    """Return the worst error; a gradient that is 0 by definition (nothing is forgotten at one token) may be missing."""
    errors = []
    for got, wanted in zip(actual, expected, strict=True):
        if wanted is None or wanted.abs().max() < 1e-12:
            assert got is None or got.abs().max() < 1e-6
        else:
            errors.append(relative_rms(got, wanted))
    return max(errors)


@pytest.fixture(scope="module")
def flex():
    """Trace FlexAttention as on a GPU, run by its own PyTorch implementation; return the counter of graphs."""
    counter = CompileCounter()
    traced = torch.compile(exp_flex._attend, backend=counter, dynamic=True, fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exp_flex, "_compiled", lambda: traced)
        patch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
        yield counter


def fused(q, k, v, log_decay=None, *, clamp, scale, normalize, valid, documents):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return exp_flex.flex_exp_attention(ExpInputs(q, k, v, log_decay, scale, clamp, valid, documents, normalize))


@pytest.mark.parametrize("name", CASES)
def test_pytorch_is_the_definition(name):
    leaves, options = make_case(**CASES[name])
    expected = with_gradients(by_definition, leaves, options)
    assert worst(with_gradients(exp_attention, leaves, options), expected) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_fused_is_the_definition(flex, name):
    leaves, options = make_case(**CASES[name])
    expected = with_gradients(by_definition, leaves, options)
    assert worst(with_gradients(fused, leaves, options), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["decay", "numerator with decay", "documents and decay"])
def test_gradients_by_finite_differences(name):
    leaves, options = make_case(**CASES[name] | {"num_queries": 5, "seq_len": 6, "width": 2})
    doubles = {key: value.detach().double().requires_grad_() for key, value in leaves.items()}
    assert torch.autograd.gradcheck(lambda *tensors: exp_attention(*tensors, **options), tuple(doubles.values()))


def test_lengths_and_clamps_share_a_graph(flex):
    torch._dynamo.reset()
    before = flex.frame_count
    for length, clamp in [(300, None), (512, 5.0), (150, 0.5)]:
        leaves, options = make_case(length, length, decay="gentle", clamp=clamp)
        fused(**leaves, **options)
    assert flex.frame_count == before + 1


def test_long_sums_of_decays_stay_exact(flex):
    # The running sum reaches 30,000, where float32 steps are 0.002: two of them in one difference would show.
    leaves, options = make_case(600, 600, heads=(1, 1))
    leaves["log_decay"] = -(50 + torch.rand(2, 600, 1))
    leaves["log_decay"][:, 590:] = -1e-3 * torch.rand(2, 10, 1)
    doubles = {key: value.double() for key, value in leaves.items()}
    expected = exp_attention(**doubles, **options)
    for function in (exp_attention, fused):
        assert relative_rms(function(**leaves, **options), expected) < 1e-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype, tolerance):
    leaves, options = make_case(decay="gentle", dtype=dtype)
    out = exp_attention(**leaves, **options)
    assert out.dtype == dtype
    assert relative_rms(out, by_definition(**leaves, **options)) < tolerance
    leaves, options = make_case(clamp=0.5, normalize=False, dtype=dtype)
    assert exp_attention(**leaves, **options).dtype == torch.float32


def test_queries_that_see_nothing_give_zeros_without_gradients(flex):
    leaves, options = make_case(padded=True, decay="gentle")
    for function in (exp_attention, fused):
        out, grad_q, *others = with_gradients(function, leaves, options)
        assert not out[0, :7].any()
        assert not grad_q[0, :7].any()
        assert all(gradient.isfinite().all() for gradient in others)


MUTANTS = {
    "no decay": lambda leaves, options: leaves.pop("log_decay"),
    "the key's own decay": lambda leaves, options: leaves.update(log_decay=leaves["log_decay"].roll(1, 1)),
    "base 2": lambda leaves, options: leaves.update(log_decay=leaves["log_decay"] / 0.6931),
    "heads in the wrong order": lambda leaves, options: leaves.update(q=leaves["q"].roll(1, 2)),
    "padding is seen": lambda leaves, options: options.update(valid=None),
    "documents are joined": lambda leaves, options: options.update(documents=None),
    "no clamp": lambda leaves, options: options.update(clamp=40.0),
    "zeros": lambda leaves, options: leaves.update(v=0 * leaves["v"]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant):
    leaves, options = make_case(padded=True, packed=True, decay="gentle", clamp=0.5)
    expected = by_definition(**leaves, **options)
    assert relative_rms(exp_attention(**leaves, **options), expected) < 1e-5
    MUTANTS[mutant](leaves, options)
    assert relative_rms(exp_attention(**leaves, **options), expected) > 1e-2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"form": "recurrent"}, "no state of fixed size"),
        ({"form": "chunked"}, "form 'chunked' does not exist"),
        ({"normalize": False}, "without a clamp"),
        ({"backend": "triton"}, "must be one of auto, torch, flex"),
        ({"backend": "flex"}, "needs an NVIDIA GPU"),
    ],
)
def test_what_does_not_exist_is_refused(changes, message):
    leaves, options = make_case()
    with pytest.raises(ConfigError, match=message):
        exp_attention(**leaves, **(options | changes))
