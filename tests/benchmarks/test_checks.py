"""The checks of the suite must fail where a kernel is wrong, and only there."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.suite import op_check, window_check
from benchmarks.suite.cases import Session
from benchmarks.suite.llamas import MIXERS, random_student, stir_mixers
from benchmarks.suite.model_check import _TOY_SHAPE, relative_rms
from benchmarks.suite.op_cases import BF16, FP32, OpCase, op_cases
from benchmarks.suite.op_check import check_op, limits_for, poisoned_memory, relative_errors
from benchmarks.suite.op_inputs import draw_inputs
from subquad.kernels import poly_attention, window_attention
from subquad.layers import attention_mode
from tests.benchmarks.fakes import FakeHardware

CASE = OpCase(
    name="case", score="offset", dtype=FP32, tokens=41, kv_heads=2, groups=2, head_dim=8, chunk_size=16, state=True
)


def check(case: OpCase, monkeypatch, kernel=poly_attention):
    """Run a check whose backend under test is `kernel`, on the CPU."""

    def choose(*arguments, backend, **options):
        call = kernel if backend == "triton" else poly_attention
        return call(*arguments, backend="torch", **options)

    monkeypatch.setattr(op_check, "poly_attention", choose)
    settings = SimpleNamespace(seed=0, backend="triton")
    (row,) = check_op(case, Session(settings, FakeHardware()))
    return row


def no_decay(q, k, v, log_decay, **options):
    return poly_attention(q, k, v, None, **options)


def log2_decay(q, k, v, log_decay, **options):
    return poly_attention(q, k, v, log_decay * math.log(2), **options)


def heads_in_wrong_order(q, k, v, log_decay, **options):
    result = poly_attention(q, k, v, log_decay, **options)
    order = torch.arange(q.shape[2]).view(2, 2).T.flatten()
    return result._replace(out=result.out[:, :, order])


def zeros(q, k, v, log_decay, **options):
    result = poly_attention(q, k, v, log_decay, **options)
    return result._replace(out=result.out * 0)


def state_not_decayed(q, k, v, log_decay, *, initial_state, **options):
    result = poly_attention(q, k, v, log_decay, initial_state=initial_state, **options)
    final = result.final_state
    return result._replace(final_state=final._replace(values=final.values + 0.01 * initial_state.values))


def wrong_gradient_of_k(q, k, v, log_decay, **options):
    return poly_attention(q, k * 0.99 + k.detach() * 0.01, v, log_decay, **options)


def unwritten_row(q, k, v, log_decay, **options):
    result = poly_attention(q, k, v, log_decay, **options)
    out = torch.empty_like(result.out)
    written = torch.ones((*out.shape[:3], 1), dtype=torch.bool)
    written[:, -1] = False
    return result._replace(out=torch.where(written, result.out, out))


MUTANTS = [no_decay, log2_decay, heads_in_wrong_order, zeros, state_not_decayed, wrong_gradient_of_k, unwritten_row]


def test_the_right_op_passes(monkeypatch):
    row = check(CASE, monkeypatch)
    assert (row.status, row.reason) == ("ok", "")
    names = {"out", "normaliser", "state.values", "state.normaliser"}
    names |= {f"d {name}" for name in ("q", "k", "v", "log_decay", "key_weight", "values", "normaliser")}
    names |= {f"d coefs[{power}]" for power in range(3)}
    assert set(row.metrics["errors"]) == names
    assert row.metrics["deterministic"]
    assert row.config["chunk_size"] == 16


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_wrong_op_fails(mutant, dtype, monkeypatch):
    row = check(replace(CASE, dtype=dtype), monkeypatch, mutant)
    assert row.status == "failed"
    assert row.metrics["worst"] > 1


@pytest.mark.parametrize("decay", ["strong", "resets", "mixed"])
@pytest.mark.parametrize("part", ["q", "k"])
def test_no_gradient_at_all_fails_where_few_keys_are_seen(decay, part, monkeypatch):
    def detached(q, k, v, log_decay, **options):
        q, k = (x.detach() if name == part else x for name, x in (("q", q), ("k", k)))
        return poly_attention(q, k, v, log_decay, **options)

    case = replace(CASE, decay=decay, dtype=BF16, tokens=400, batch=2, state=False)
    assert check(case, monkeypatch).status == "ok"
    assert check(case, monkeypatch, detached).status == "failed"


def test_an_op_that_is_not_deterministic_fails(monkeypatch):
    calls = iter(range(10))

    def drifting(q, k, v, log_decay, **options):
        result = poly_attention(q, k, v, log_decay, **options)
        return result._replace(out=result.out * (1 + 1e-6 * next(calls)))

    row = check(CASE, monkeypatch, drifting)
    assert not row.metrics["deterministic"]
    assert "out: two runs differ" in row.reason


def test_a_nan_is_an_infinite_error():
    expected = {"out": torch.ones(3)}
    actual = {"out": torch.tensor([1.0, float("nan"), 1.0])}
    assert relative_errors(actual, expected, {}) == {"out": math.inf}


def test_a_gradient_that_cancelled_is_measured_against_its_natural_size():
    noise, nothing = {"d q": torch.full((4,), 1e-3)}, {"d q": torch.zeros(4)}
    assert relative_errors(noise, nothing, {"d q": 1.0})["d q"] == pytest.approx(1e-3)
    half = {"d q": torch.full((4,), 0.5)}
    assert relative_errors({"d q": half["d q"] + 0.1}, half, {"d q": 10.0})["d q"] == pytest.approx(0.2)
    assert relative_errors({"d q": half["d q"] + 0.1}, half, {"d q": 10.0}, few_keys=True)["d q"] == pytest.approx(0.01)


def test_limits_are_those_of_the_dtype_or_twice_the_error_of_pytorch():
    limits = limits_for(replace(CASE, dtype=BF16), {"out": 1e-3, "d q": 4e-3, "d log_decay": 0.0})
    assert limits == {"out": 5e-3, "d q": 8e-3, "d log_decay": 1e-2}


@pytest.mark.parametrize("precision, dtype, factor", [("default", BF16, 10), ("high", BF16, 1), ("default", FP32, 1)])
def test_only_default_precision_has_a_weak_spot(precision, dtype, factor):
    case = replace(CASE, dtype=dtype, precision=precision)
    plain = limits_for(case, {"out": 0.0})["out"]
    assert limits_for(replace(case, weak_spot="why"), {"out": 0.0})["out"] == pytest.approx(factor * plain)


def test_new_memory_is_poisoned_inside_the_block_only():
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
        assert torch.empty_like(torch.ones(1000)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_table_covers_what_it_must():
    cases = list(op_cases(toy=False, quick=False))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {case.head_dim for case in cases} == {16, 64, 96, 128}
    assert {case.groups for case in cases} >= {1, 3, 4, 8}
    assert {(case.score, case.dtype) for case in cases} == {
        (score, dtype)
        for score in ("linear", "square", "offset", "taylor")
        for dtype in ("bfloat16", "float16", "float32")
    }
    assert {case.decay for case in cases} == {"none", "gentle", "strong", "resets", "mixed"}
    assert any(case.value_dim not in (None, case.head_dim) for case in cases)
    assert any(case.tokens == 1 and case.state and not case.gradients for case in cases)
    assert any(case.queries == 1 and case.tokens == 64 and case.state for case in cases)
    assert any(case.inputs == "common_mean" and case.precision == "high" for case in cases)
    assert any(case.score == "taylor" and not case.normalize for case in cases)
    quick = {case.name for case in op_cases(toy=False, quick=True)}
    assert quick < set(names)


def test_every_query_scores_with_its_own_key():
    inputs = draw_inputs(replace(CASE, queries=20), 0, torch.device("cpu"))
    own = inputs.k[:, -20:].repeat_interleave(2, dim=2)
    assert torch.allclose((inputs.q * own).sum(-1) * 8**-0.5, torch.tensor(2.0), atol=1e-4)


def test_queries_of_the_mean_case_are_orthogonal_to_the_mean():
    inputs = draw_inputs(replace(CASE, inputs="common_mean", tokens=500), 0, torch.device("cpu"))
    mean = inputs.k.mean((0, 1))
    assert (inputs.k - mean).std() < 0.3 * mean.norm() / 8**0.5
    score = torch.einsum("bthd,hd->bth", inputs.q, mean.repeat_interleave(2, dim=0))
    assert score.abs().mean() < 0.1 * mean.norm() * inputs.q.norm(dim=-1).mean()


@pytest.mark.parametrize("wider, status", [(0, "ok"), (1, "failed")])
def test_a_wrong_window_fails(wider, status, monkeypatch):
    def choose(*arguments, backend, window, **options):
        window += wider if backend == "flex" else 0
        return window_attention(*arguments, backend="torch", window=window, **options)

    monkeypatch.setattr(window_check, "window_attention", choose)
    case = window_check.WindowCase(name="w", tokens=41, head_dim=8, window=8, groups=2, packed=True)
    (row,) = window_check.check_window(case, Session(SimpleNamespace(seed=0, toy=False), FakeHardware()))
    assert row.status == status


@pytest.mark.parametrize("mixer", MIXERS)
def test_stirred_mixers_have_a_far_part_that_matters(mixer):
    model = random_student(_TOY_SHAPE, mixer, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    stir_mixers(model, 0)
    tokens = torch.randint(_TOY_SHAPE.vocab_size, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        student = model(tokens).logits
        if mixer.endswith("pure"):
            with attention_mode(model, "teacher"):
                other = model(tokens).logits
        else:
            with attention_mode(model, "window_only"):
                other = model(tokens).logits
    assert relative_rms(student, other) > 0.1
