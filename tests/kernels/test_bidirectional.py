"""Every query sees every key: forms against a double loop, padding, packing, gradients, exp scores, refusals."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace

import pytest
import torch

from subquad.errors import ConfigError
from subquad.kernels import backend, bidirectional, exp_attention, poly_attention
from tests.kernels.oracle import TOLERANCE, make_case, relative_rms, with_gradients, worst

SCORES = ("square", "linear", "constant", "taylor", "even", "offset")
FORMS = ("quadratic", "chunked", "auto")
NUM_TOKENS = 7
SHAPES = {"one token": (1, 1, 1, 1), "GQA": (2, NUM_TOKENS, 2, 3), "several blocks": (1, 11, 2, 2)}


def case_of(shape="GQA", **changes):
    """A case without decay, with zeros among its key weights."""
    batch, tokens, kv_heads, groups = SHAPES[shape]
    values = {"batch": batch, "tokens": tokens, "kv_heads": kv_heads, "groups": groups, "decay": "none"}
    case = make_case(**(values | changes))
    return replace(case, log_decay=None)


def double_loop(case):
    """The formula, pair by pair and head by head, without a state, a mask or a reshape."""
    heads, group = case.q.shape[2], case.q.shape[2] // case.k.shape[2]
    outs, sums = [], []
    for h in range(heads):
        kv_head = h // group
        numerators, normalisers = [], []
        for t in range(case.q.shape[1]):
            numerator = normaliser = 0.0
            for s in range(case.k.shape[1]):
                x = (case.q[:, t, h] * case.k[:, s, kv_head]).sum(-1) / math.sqrt(case.q.shape[-1])
                coefs = [coef[h] if isinstance(coef, torch.Tensor) else coef for coef in case.coefs]
                weight = sum(coef * x**n for n, coef in enumerate(coefs)) * case.key_weight[:, s, kv_head]
                numerator = numerator + weight[:, None] * case.v[:, s, kv_head]
                normaliser = normaliser + weight
            numerators.append(numerator / normaliser[:, None] if case.normalize else numerator)
            normalisers.append(normaliser)
        outs.append(torch.stack(numerators, 1))
        sums.append(torch.stack(normalisers, 1))
    return {"out": torch.stack(outs, 2), "normaliser": torch.stack(sums, 2)}


@functools.cache
def expected_with_gradients(shape, score, normalize=False):
    case = case_of(shape, score=score, normalize=normalize)
    case = replace(case, key_weight=case.key_weight + 0.1) if normalize else case
    return case, with_gradients(case, double_loop)


def run(case, form="auto", **options):
    result = poly_attention(
        case.q,
        case.k,
        case.v,
        coefs=case.coefs,
        key_weight=case.key_weight,
        causal=False,
        normalize=case.normalize,
        form=form,
        **options,
    )
    assert result.final_state is None
    return {"out": result.out, "normaliser": result.normaliser}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forms_and_their_gradients_agree_with_the_formula(shape, score, form, dtype):
    case, expected = expected_with_gradients(shape, score)
    error, where = worst(with_gradients(case, functools.partial(run, form=form, chunk_size=4), dtype), expected)
    assert error < TOLERANCE[dtype], where


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", ["square", "taylor", "even"])
def test_normalised_output_and_its_gradients(score, form):
    case, expected = expected_with_gradients("GQA", score, normalize=True)
    error, where = worst(with_gradients(case, functools.partial(run, form=form)), expected)
    assert error < TOLERANCE[torch.float64], where


@pytest.mark.parametrize("form", ["quadratic", "auto"])
@pytest.mark.parametrize("score", ["taylor3", "taylor10"])
def test_powers_above_two(score, form):
    case, expected = expected_with_gradients("several blocks", score, normalize=True)
    error, where = worst(with_gradients(case, functools.partial(run, form=form, chunk_size=4)), expected)
    assert error < TOLERANCE[torch.float64], where


def test_fewer_queries_than_keys_see_all_keys():
    case = case_of(queries=3)
    for form in FORMS:
        assert worst(run(case, form), double_loop(case))[0] < TOLERANCE[torch.float64]


@pytest.mark.parametrize("form", FORMS)
def test_padding_on_either_side_changes_nothing(form):
    case = case_of(score="taylor", normalize=True)
    alone = run(replace(case, key_weight=torch.ones_like(case.key_weight)), form)
    for before, after in ((4, 0), (0, 6), (3, 2)):
        # What stands on padding must not matter.
        pad = lambda x: torch.cat([5 + x[:, :before], x, 7 * x[:, :after]], dim=1)  # noqa: E731, B023
        padded = replace(case, q=pad(case.q), k=pad(case.k), v=pad(case.v))
        weight = torch.ones_like(case.key_weight)
        weight = torch.cat([0 * weight[:, :before], weight, 0 * weight[:, :after]], dim=1)
        found = run(replace(padded, key_weight=weight), form)["out"][:, before : before + NUM_TOKENS]
        assert relative_rms(found, alone["out"]) < TOLERANCE[torch.float64]


def test_a_row_of_padding_alone_gives_zero_with_gradient_zero():
    case = case_of(score="taylor", normalize=True)
    weight = case.key_weight.clone()
    weight[1] = 0
    result = with_gradients(replace(case, key_weight=weight), run)
    assert torch.equal(result["out"][1], torch.zeros_like(result["out"][1]))
    assert all(tensor.isfinite().all() for tensor in result.values())


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_are_those_alone(form):
    case = case_of("several blocks", score="offset")
    bounds = [0, 4, 4, 5, 11]
    packed = run(case, form, cu_seqlens=torch.tensor(bounds))
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        cut = {name: getattr(case, name)[:, start:stop] for name in ("q", "k", "v", "key_weight")}
        alone = run(replace(case, **cut), form)
        part = {name: tensor[:, start:stop] for name, tensor in packed.items()}
        assert worst(part, alone)[0] < TOLERANCE[torch.float64]
    # One sequence is another result, so the comparison says something.
    assert relative_rms(packed["out"], run(case, form)["out"]) > 0.1


MUTANTS = {
    "zeros": lambda case: {"out": torch.zeros_like(run(case)["out"])},
    "causal": lambda case: {
        "out": poly_attention(
            case.q, case.k, case.v, coefs=case.coefs, key_weight=case.key_weight, normalize=case.normalize
        ).out
    },
    "keys off by one": lambda case: run(replace(case, k=case.k.roll(1, 1)), "chunked"),
    "GQA by rows": lambda case: run(_heads_by_rows(case), "chunked"),
    "scale forgotten": lambda case: run(replace(case, q=case.q * case.q.shape[-1] ** 0.5), "chunked"),
    "key weight ignored": lambda case: run(replace(case, key_weight=torch.ones_like(case.key_weight)), "chunked"),
    "last key left out": lambda case: run(
        replace(case, k=case.k[:, :-1], v=case.v[:, :-1], key_weight=case.key_weight[:, :-1], q=case.q[:, :-1])
    ),
    "coefficients of another head": lambda case: run(
        replace(case, coefs=tuple(c.roll(1) for c in case.coefs)), "chunked"
    ),
}


def _heads_by_rows(case):
    kv_heads, heads = case.k.shape[2], case.q.shape[2]
    rows = [h % kv_heads for h in range(heads)]
    return replace(case, **{name: getattr(case, name)[:, :, rows] for name in ("k", "v", "key_weight")})


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_op_is_noticed(mutant):
    case = case_of(score="offset", normalize=True)
    case = replace(case, key_weight=case.key_weight + 0.1)
    wrong, right = (
        MUTANTS[mutant](case)["out"],
        run(case, "chunked")["out"][:, : NUM_TOKENS - (mutant == "last key left out")],
    )
    assert not relative_rms(wrong, right) < 100 * TOLERANCE[torch.float32]


def test_auto_takes_pairs_while_those_are_cheaper(monkeypatch):
    forms = []
    pairs, read = bidirectional._pairs, bidirectional._read
    monkeypatch.setattr(bidirectional, "_pairs", lambda *args: forms.append("pairs") or pairs(*args))
    monkeypatch.setattr(bidirectional, "_read", lambda *args: forms.append("state") or read(*args))
    for tokens in (8, 64):
        q = torch.randn(1, tokens, 1, 16)
        poly_attention(q, q, q, coefs=(0.0, 1.0), causal=False)
    assert forms == ["pairs", "state"]


def test_backward_keeps_neither_pairs_nor_products():
    kept = []
    q = torch.randn(1, 300, 2, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        for coefs, form in (((0.0, 0.0, 1.0), "chunked"), ((1.0, 1.0, 0.5, 1 / 6), "auto")):
            poly_attention(q, q, q, coefs=coefs, causal=False, form=form)
    # Larger than q, k, [v; 1] of all tokens is neither a block's products (128 * 36) nor its pairs (128 * 300).
    assert max(kept) <= 2 * 300 * 9 < 2 * 128 * 36


def test_what_makes_no_sense_is_refused_with_the_reason():
    case = case_of()
    decay = torch.zeros_like(case.key_weight)
    for options, words in {
        (("form", "recurrent"),): "a token sees those after it",
        (("output_final_state", True),): "nothing comes after a sum over all tokens",
        (("log_decay", decay),): "a decay says how much of the past is left",
    }.items():
        with pytest.raises(ConfigError, match=words):
            poly_attention(case.q, case.k, case.v, coefs=case.coefs, causal=False, **dict(options))
    with pytest.raises(ConfigError, match="as many queries as keys"):
        poly_attention(
            case.q[:1, 3:], case.k[:1], case.v[:1], coefs=(1.0,), causal=False, cu_seqlens=torch.tensor([0, NUM_TOKENS])
        )


def test_triton_falls_back_once_and_is_refused_when_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(backend, "device_problem", lambda device: None)
    monkeypatch.setenv(backend.BACKEND_VARIABLE, "")
    monkeypatch.setattr(backend, "_said", set())
    x = torch.ones(1, 3, 2, 4)
    assert backend.choose_backend("triton", x, x, x, (1,)).backend == "triton"
    with pytest.raises(ConfigError, match=r"causal=False .* is computed in PyTorch"):
        poly_attention(x, x, x, coefs=(0.0, 1.0), causal=False, backend="triton")
    on_gpu = type("Stub", (), {"device": torch.device("cuda"), "dtype": torch.float32, "shape": (1, 3, 2, 4)})()
    with caplog.at_level(logging.WARNING):
        choices = [backend.choose_backend("auto", on_gpu, on_gpu, on_gpu, (1,), causal=False) for _ in range(2)]
    assert [choice.backend for choice in choices] == ["torch", "torch"]
    assert caplog.text.count("causal=False (every query sees every key) is computed in PyTorch") == 1


@pytest.mark.parametrize("clamp, normalize", [(None, True), (0.5, True), (0.5, False)])
def test_exp_scores_see_every_key(clamp, normalize):
    case = case_of()
    valid = case.key_weight[..., 0] > 0
    documents = (torch.arange(NUM_TOKENS) >= 3).long().expand(2, -1)
    options = {"clamp": clamp, "normalize": normalize, "causal": False}
    k, v = (x.repeat_interleave(3, 2) for x in (case.k, case.v))
    score = torch.einsum("bthd,bshd->bhts", case.q, k) * case.q.shape[-1] ** -0.5
    weight = (score if clamp is None else score.clamp(max=clamp)).exp()
    for mask, extra in (
        (torch.ones(2, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool), {}),
        (
            valid[:, None] & (documents[:, :, None] == documents[:, None]),
            {"valid": valid, "documents": documents},
        ),
    ):
        seen = weight * mask[:, None]
        expected = torch.einsum("bhts,bshe->bthe", seen, v)
        if normalize:
            expected = expected / seen.sum(-1).transpose(1, 2)[..., None]
        found = exp_attention(case.q, case.k, case.v, **options, **extra)
        assert relative_rms(found, expected) < TOLERANCE[torch.float64]
    with pytest.raises(ConfigError, match="log_decay with causal=False"):
        exp_attention(case.q, case.k, case.v, torch.zeros_like(case.key_weight), causal=False)
    with pytest.raises(ConfigError, match="its mask is causal"):
        exp_attention(case.q, case.k, case.v, causal=False, backend="flex")
