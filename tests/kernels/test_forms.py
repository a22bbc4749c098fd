"""All forms agree with the formula: outputs, normaliser, states and every gradient."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from subquad.kernels import chunked, ops, poly_attention
from tests.kernels.oracle import TOLERANCE, definition, make_case, relative_rms, run, with_gradients, worst

SCORES = ("square", "linear", "constant", "taylor", "even", "offset")
DECAYS = ("none", "gentle", "strong", "resets", "mixed")
FORMS = ("quadratic", "chunked", "auto", "steps")


def check(case, form, dtype=torch.float64, chunk_size=None):
    """Compare one form with the formula evaluated in float64."""
    expected = with_gradients(case, definition)
    actual = with_gradients(case, functools.partial(run, form=form, chunk_size=chunk_size), dtype)
    error, where = worst(actual, expected)
    assert error < TOLERANCE[dtype], f"{form} {dtype}: {where} is off by {error:.2e}"


@st.composite
def cases(draw, smallest_tokens=1, smallest_width=1):
    """Draw shapes, a score, a decay, a state or none."""
    tokens = draw(st.integers(smallest_tokens, 40))
    score = draw(st.sampled_from(SCORES))
    return make_case(
        seed=draw(st.integers(0, 10_000)),
        batch=draw(st.integers(1, 2)),
        tokens=tokens,
        queries=draw(st.integers(1, tokens)) if draw(st.booleans()) else tokens,
        kv_heads=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(smallest_width, 6)),
        value_dim=draw(st.integers(smallest_width, 5)),
        score=score,
        decay=draw(st.sampled_from(DECAYS)),
        with_state=draw(st.booleans()),
    )


drawn = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@drawn
@given(case=cases(), form=st.sampled_from(FORMS), chunk_size=st.integers(1, 16), tile_size=st.integers(1, 8))
def test_forms_agree_in_float64(set_tile_size, case, form, chunk_size, tile_size):
    set_tile_size(tile_size)
    check(case, form, chunk_size=chunk_size)


@drawn
@given(case=cases(8, 3), form=st.sampled_from(FORMS), chunk_size=st.integers(1, 16), tile_size=st.integers(1, 8))
def test_forms_agree_in_float32(set_tile_size, case, form, chunk_size, tile_size):
    set_tile_size(tile_size)
    check(case, form, torch.float32, chunk_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", ["taylor", "offset"])
def test_normalised_output_and_its_gradients(set_tile_size, score, form, dtype):
    set_tile_size(4)
    case = make_case(tokens=37, kv_heads=3, groups=3, head_dim=8, value_dim=6, score=score, normalize=True)
    check(replace(case, key_weight=case.key_weight + 0.1), form, dtype, chunk_size=16)


@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 23, 24], ids="{} tokens".format)
def test_lengths_around_the_chunk_size(tokens, with_state):
    check(make_case(tokens=tokens, score="offset", decay="mixed", with_state=with_state), "chunked", chunk_size=8)


def test_more_chunks_than_one_segment_of_recomputed_states():
    tokens = 2 * chunked._CHUNKS_PER_SEGMENT + 3
    check(make_case(batch=1, tokens=tokens, score="offset", with_state=True), "chunked", chunk_size=1)


@pytest.mark.parametrize("score", ["taylor3", "taylor10"])
@pytest.mark.parametrize("form", ["quadratic", "auto"])
def test_powers_above_two(set_tile_size, score, form):
    set_tile_size(8)
    check(make_case(score=score, decay="mixed", queries=20), form)


@pytest.mark.parametrize("form", ["quadratic", "chunked", "auto"])
def test_long_float32_sequence_keeps_its_precision(form):
    case = make_case(batch=1, tokens=700, kv_heads=1, groups=2, head_dim=8, value_dim=8, score="offset", decay="gentle")
    case = replace(case, log_decay=case.log_decay / 30)
    expected = with_gradients(case, functools.partial(run, form="quadratic"))
    actual = with_gradients(case, functools.partial(run, form=form, chunk_size=64), torch.float32)
    error, where = worst(actual, expected)
    assert error < TOLERANCE[torch.float32], f"{where} is off by {error:.2e}"


def test_gradcheck():
    case = make_case(batch=1, tokens=5, kv_heads=1, head_dim=2, value_dim=2, score="offset", with_state=True)
    case = replace(case, key_weight=case.key_weight + 0.5, normalize=True)
    inputs = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}

    def compute(*tensors):
        filled = dict(zip(inputs, tensors, strict=True))
        return tuple(run(case.mapped_to(filled), "chunked", 2).values())

    assert torch.autograd.gradcheck(compute, tuple(inputs.values()))


@pytest.mark.parametrize("with_decay", [False, True])
@pytest.mark.parametrize("form", ["quadratic", "chunked", "auto"])
def test_packed_sequences_are_those_alone(form, with_decay):
    case = make_case(batch=1, tokens=20, score="offset", decay="gentle")
    log_decay = case.log_decay if with_decay else None
    bounds = [0, 6, 6, 7, 20]

    def attend(part, **packed):
        decay = None if log_decay is None else log_decay[:, part]
        tokens = (x[:, part] for x in (case.q, case.k, case.v))
        return poly_attention(*tokens, decay, coefs=case.coefs, form=form, chunk_size=8, **packed).out

    together = attend(slice(None), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = [attend(slice(start, stop)) for start, stop in itertools.pairwise(bounds) if stop > start]
    assert relative_rms(together, torch.cat(alone, 1)) < TOLERANCE[torch.float64]


MUTANTS = {
    "zeros": lambda case: run(replace(case, v=case.v * 0), "chunked"),
    "no decay": lambda case: run(replace(case, log_decay=case.log_decay * 0), "chunked"),
    "log2 for ln": lambda case: run(replace(case, log_decay=case.log_decay * torch.tensor(2.0).log()), "chunked"),
    "decay off by one": lambda case: run(replace(case, log_decay=case.log_decay.roll(1, 1)), "chunked"),
    "keys off by one": lambda case: run(replace(case, k=case.k.roll(1, 1)), "chunked"),
    "GQA by rows": lambda case: run(_heads_by_rows(case), "chunked"),
    "scale forgotten": lambda case: run(replace(case, q=case.q * case.q.shape[-1] ** 0.5), "chunked"),
    "key weight ignored": lambda case: run(replace(case, key_weight=torch.ones_like(case.key_weight)), "chunked"),
    "products counted once": lambda case: run(_products_once(case), "chunked"),
    "coefficients of another head": lambda case: run(
        replace(case, coefs=tuple(c.roll(1) for c in case.coefs)), "chunked"
    ),
}


def _heads_by_rows(case):
    # Query head h reads key/value head h % Hkv instead of h // G.
    kv_heads, heads = case.k.shape[2], case.q.shape[2]
    rows = [h % kv_heads for h in range(heads)]
    spread = {name: getattr(case, name)[:, :, rows] for name in ("k", "v", "log_decay", "key_weight")}
    return replace(case, values=case.values[:, rows], normaliser=case.normaliser[:, rows], **spread)


def _products_once(case):
    dim = case.k.shape[-1]
    off_diagonal = torch.cat([torch.arange(dim - i) > 0 for i in range(dim)])
    many = torch.cat([torch.ones(1 + dim), torch.where(off_diagonal, 0.5, 1.0)]).double()
    return replace(case, values=case.values * many[:, None], normaliser=case.normaliser * many)


@pytest.mark.parametrize("shape", [(1, 6, 2, 2), (2, 23, 3, 3), (1, 64, 2, 4)], ids=str)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_op_is_noticed(mutant, shape):
    batch, tokens, kv_heads, groups = shape
    case = make_case(
        batch=batch, tokens=tokens, kv_heads=kv_heads, groups=groups, score="offset", with_state=True, normalize=True
    )
    expected = definition(case)
    right, wrong = run(case, "chunked"), MUTANTS[mutant](case)
    for dtype, tolerance in TOLERANCE.items():
        assert worst({"out": right["out"].to(dtype)}, {"out": expected["out"]})[0] < tolerance
        assert worst({"out": wrong["out"].to(dtype)}, {"out": expected["out"]})[0] > 100 * tolerance


def test_auto_takes_one_chunk_while_that_is_cheaper(monkeypatch):
    sizes = []

    def spy(inputs, chunk_size, output_final_state):
        sizes.append(chunk_size)
        return chunked.chunked_attention(inputs, chunk_size, output_final_state)

    monkeypatch.setattr(ops, "chunked_attention", spy)
    for tokens in (64, 2048):
        q = torch.randn(1, tokens, 2, 8)
        ops.poly_attention(q, q, q, coefs=(0.0, 0.0, 1.0))
    assert sizes == [64, 256]


def test_auto_takes_the_recurrent_form_for_one_token_with_a_state(monkeypatch):
    def refuse(*_):
        raise AssertionError("not the recurrent form")

    monkeypatch.setattr(ops, "chunked_attention", refuse)
    monkeypatch.setattr(ops, "quadratic_attention", refuse)
    case = make_case(tokens=1, with_state=True)
    assert worst(run(case, "auto"), definition(case))[0] < TOLERANCE[torch.float64]
