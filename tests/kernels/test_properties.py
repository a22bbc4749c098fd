"""What any correct op does, whatever the formula: documents, padding, composition, guards, precision, memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from subquad.kernels import poly_attention
from tests.kernels.oracle import TOLERANCE, make_case, relative_rms, run, with_gradients, worst

FORMS = ("quadratic", "chunked", "auto", "steps")
SQUARE = (0.0, 0.0, 1.0)


def part(case, start, stop, **changes):
    """Cut tokens out of a case."""
    cut = {name: getattr(case, name)[:, start:stop] for name in ("q", "k", "v", "log_decay", "key_weight")}
    return replace(case, **(cut | changes))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", ["square", "offset", "linear"])
def test_packed_documents_equal_separate_runs(form, score):
    starts = [0, 1, 6, 17, 23]
    case = make_case(score=score, with_state=True)
    log_decay = case.log_decay.clone()
    log_decay[:, starts[:-1]] = -torch.inf
    case = replace(case, log_decay=log_decay)
    packed = run(case, form, 7)
    for start, stop in itertools.pairwise(starts):
        alone = run(part(case, start, stop, values=None, normaliser=None), "quadratic")
        for name in ("out", "normaliser"):
            assert relative_rms(packed[name][:, start:stop], alone[name]) < TOLERANCE[torch.float64]
    assert relative_rms(packed["state.values"], alone["state.values"]) < TOLERANCE[torch.float64]


def test_no_gradient_crosses_a_reset():
    case = make_case(score="offset", with_state=True)
    log_decay = case.log_decay.clone()
    log_decay[:, 9] = -torch.inf
    case = replace(case, log_decay=log_decay).mapped(lambda tensor: tensor.requires_grad_())
    result = run(case, "chunked", 4)
    loss = result["out"][:, 9:].sum() + result["state.values"].sum()
    grads = torch.autograd.grad(loss, [case.k, case.v, case.log_decay, case.values])
    for grad in grads[:2]:
        assert not grad[:, :9].any()
        assert grad[:, 9:].any()
    assert not grads[2][:, :10].any()
    assert not grads[3].any()


@pytest.mark.parametrize("form", FORMS)
def test_key_weight_zero_equals_removing_the_token(form):
    case = make_case(score="offset", with_state=True)
    kept = torch.ones(23, dtype=torch.bool)
    kept[[0, 3, 4, 11, 22]] = False
    weight = case.key_weight * kept[:, None]
    # A token that is not written still decays what came before it.
    decay = case.log_decay.cumsum(1)[:, kept]
    decay = torch.cat([decay[:, :1], decay.diff(dim=1)], dim=1)
    short = replace(part(case, 0, 23), q=case.q[:, kept], k=case.k[:, kept], v=case.v[:, kept])
    short = replace(short, log_decay=decay, key_weight=weight[:, kept])
    full = run(replace(case, key_weight=weight), form, 8)
    expected = run(short, "quadratic")
    assert relative_rms(full["out"][:, kept], expected["out"]) < TOLERANCE[torch.float64]
    assert relative_rms(full["normaliser"][:, kept], expected["normaliser"]) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("score", ["square", "linear", "taylor", "even"])
@pytest.mark.parametrize("split", [1, 8, 15, 22])
def test_state_carries_over_from_one_call_to_the_next(score, split):
    case = make_case(score=score, decay="mixed", with_state=True, normalize=score != "linear")
    whole = run(case, "chunked", 8)
    first = run(part(case, 0, split), "chunked", 4)
    second = part(case, split, 23, values=first["state.values"], normaliser=first["state.normaliser"])
    for form in FORMS:
        rest = run(second, form, 8)
        for name in ("out", "normaliser"):
            joined = torch.cat([first[name], rest[name]], dim=1)
            assert relative_rms(joined, whole[name]) < TOLERANCE[torch.float64], form
        for name in ("state.values", "state.normaliser"):
            assert relative_rms(rest[name], whole[name]) < TOLERANCE[torch.float64], form


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("score", ["square", "offset", "taylor"])
def test_constant_values_come_out_constant(form, dtype, score):
    case = make_case(score=score, decay="gentle", head_dim=16, normalize=True)
    case = replace(case, v=torch.full_like(case.v, 3.0), key_weight=case.key_weight + 0.1)
    out = run(case.mapped(lambda tensor: tensor.to(dtype)), form, 8)["out"]
    assert (out - 3).abs().max() < 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("kv_heads, groups", [(1, 1), (1, 4), (2, 2), (3, 3), (4, 1)])
def test_shared_heads_equal_repeated_heads(kv_heads, groups):
    case = make_case(kv_heads=kv_heads, groups=groups, score="offset")
    spread = {
        name: getattr(case, name).repeat_interleave(groups, dim=2) for name in ("k", "v", "log_decay", "key_weight")
    }
    shared, repeated = run(case, "chunked", 8), run(replace(case, **spread), "chunked", 8)
    assert shared["state.values"].shape[1] == kv_heads
    for name in ("out", "normaliser"):
        assert relative_rms(shared[name], repeated[name]) < TOLERANCE[torch.float64]


def test_one_sequence_equals_its_row_of_a_batch():
    case = make_case(batch=3, score="offset", decay="mixed", with_state=True)
    together = run(case, "chunked", 8)
    for row in range(3):
        coefs = {name: tensor for name, tensor in case.tensors().items() if name.startswith("coefs")}
        cut = {name: tensor[row : row + 1] for name, tensor in case.tensors().items() if name not in coefs}
        alone = run(case.mapped_to(cut | coefs), "chunked", 8)
        for name, tensor in alone.items():
            assert relative_rms(tensor, together[name][row : row + 1]) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", ["square", "linear", "offset"])
def test_rows_that_see_no_key_give_zero_and_no_nan(form, score):
    case = make_case(score=score, normalize=True)
    weight = torch.ones_like(case.key_weight)
    weight[:, :9] = 0
    log_decay = case.log_decay.clone()
    log_decay[:, 5] = -torch.inf
    result = with_gradients(replace(case, key_weight=weight, log_decay=log_decay), lambda case: run(case, form, 4))
    assert not result["out"][:, :9].any()
    assert not result["normaliser"][:, :9].any()
    assert result["out"][:, 9:].all()
    for name, tensor in result.items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("form", FORMS)
def test_underflow_of_all_weights_gives_zero_and_no_nan(form):
    case = make_case(score="offset", decay="gentle", normalize=True)
    weight = torch.ones_like(case.key_weight)
    weight[:, 4:20] = 0
    case = replace(case, key_weight=weight, log_decay=torch.full_like(case.log_decay, -11.0))
    result = with_gradients(case, lambda case: run(case, form, 8), torch.float32)
    for name, tensor in result.items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("form", FORMS)
def test_a_huge_finite_decay_is_a_reset_and_spares_its_neighbours(form):
    case = make_case(score="offset")
    huge, reset = case.log_decay.clone(), case.log_decay.clone()
    huge[:, 7], reset[:, 7] = -1e30, -torch.inf
    first, second = (run(replace(case, log_decay=log_decay), form, 16) for log_decay in (huge, reset))
    assert worst(first, second)[0] < TOLERANCE[torch.float64]


def common_mean_case():
    """Keys with a strong common mean and queries almost orthogonal to it: the scores are far below |q| |k|."""
    case = make_case(batch=1, tokens=200, kv_heads=1, groups=2, head_dim=16, value_dim=8, score="square")
    mean = torch.nn.functional.normalize(torch.randn(16, generator=torch.Generator().manual_seed(3)).double(), dim=0)
    k = case.k * 0.3 + 10 * mean
    q = case.q - (case.q @ mean)[..., None] * mean
    return replace(case, q=q, k=k, log_decay=case.log_decay / 30, key_weight=torch.ones_like(case.key_weight))


def test_common_mean_of_keys_costs_only_what_the_conditioning_says():
    case = replace(common_mean_case(), normalize=True)
    exact = run(case, "quadratic")
    bound = case.q.square().sum(-1) / 16 * _decayed_squares(case)
    amplification = bound / exact["normaliser"]
    assert amplification.median() > 100, "the case is not hard enough to test anything"
    for form in FORMS:
        result = run(case, form, 16)
        assert relative_rms(result["out"], exact["out"]) < TOLERANCE[torch.float64]
        result = with_gradients(case, lambda case, form=form: run(case, form, 16), torch.float32)
        error = (result["out"].double() - exact["out"]).abs().amax(-1)
        rounding = torch.finfo(torch.float32).eps * case.v.abs().max()
        assert (error <= 50 * rounding * amplification + 50 * rounding).all(), form
        assert all(tensor.isfinite().all() for tensor in result.values()), form


def _decayed_squares(case):
    squares = case.k.square().sum(-1)
    total, sums = torch.zeros_like(squares[:, 0]), []
    for t in range(squares.shape[1]):
        total = total * case.log_decay[:, t].exp() + squares[:, t]
        sums.append(total)
    return torch.stack(sums, dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_queries_orthogonal_to_all_keys(dtype):
    case = replace(make_case(tokens=40, head_dim=6, score="square"), normalize=True)
    halves = torch.arange(6) < 3
    case = replace(case, q=case.q * halves, k=case.k * ~halves, key_weight=case.key_weight + 0.1)
    for form in FORMS:
        result = with_gradients(case, lambda case, form=form: run(case, form, 16), dtype)
        assert not result["out"].any(), form
        assert all(tensor.isfinite().all() for tensor in result.values()), form


def test_sums_near_zero_are_held_at_the_same_floor_in_every_form():
    case = make_case(tokens=40, head_dim=6, score="square")
    mean = torch.tensor([1.0, 0, 0, 0, 0, 0]).double()
    q = torch.tensor([1e-5, 1.0, 0, 0, 0, 0]).double().expand_as(case.q)
    case = replace(case, q=q, k=mean.expand_as(case.k), key_weight=case.key_weight + 0.1, normalize=True)
    results = {form: run(case, form, 16) for form in FORMS}
    for form, result in results.items():
        assert relative_rms(result["out"], results["quadratic"]["out"]) < 1e-6, form
    # All weights are (1e-5)**2 of their bound, a tenth of a thousandth of the floor 1e-6.
    unguarded = run(replace(case, normalize=False), "quadratic")
    ratio = results["auto"]["out"] / (unguarded["out"] / unguarded["normaliser"][..., None])
    assert ((ratio - 1e-4).abs() < 1e-8).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["quadratic", "chunked", "auto"])
def test_half_precision_inputs_are_computed_in_float32(form, dtype):
    case = make_case(tokens=37, head_dim=8, value_dim=6, score="taylor", normalize=True)
    case = replace(case, key_weight=case.key_weight + 0.1).mapped(lambda tensor: tensor.to(dtype))
    result = with_gradients(case, lambda case: run(case, form, 8), dtype)
    assert result["out"].dtype == dtype
    assert {result[name].dtype for name in ("normaliser", "state.values", "state.normaliser")} == {torch.float32}
    assert result["d k"].dtype == dtype
    exact = run(case.mapped(lambda tensor: tensor.double()), "quadratic")
    for name in ("normaliser", "state.values", "state.normaliser"):
        assert relative_rms(result[name], exact[name]) < TOLERANCE[torch.float32]
    assert relative_rms(result["out"], exact["out"].to(dtype)) < torch.finfo(dtype).eps


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_lower_the_forward_pass(form):
    case = make_case(score="offset").mapped(lambda tensor: tensor.float())
    expected = run(case, form, 8)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(case, form, 8)
    assert worst(actual, expected)[0] == 0


def test_autocast_does_not_lower_the_backward_pass():
    case = make_case(score="offset", with_state=True)
    expected = with_gradients(case, lambda case: run(case, "chunked", 8), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = with_gradients(case, lambda case: run(case, "chunked", 8), torch.float32)
    assert worst(actual, expected)[0] == 0


def test_a_call_in_inference_mode_leaves_later_training_alone():
    case = make_case(head_dim=7, score="offset")
    with torch.inference_mode():
        run(case, "quadratic")
    assert with_gradients(case, lambda case: run(case, "quadratic"))["d k"].any()


def test_no_grad_builds_no_graph():
    case = make_case(score="offset").mapped(lambda tensor: tensor.requires_grad_())
    for form in FORMS:
        with torch.no_grad():
            assert not any(tensor.requires_grad for tensor in run(case, form, 8).values())


def test_gradient_checkpointing_changes_nothing():
    case = make_case(score="offset", with_state=True)
    plain = with_gradients(case, lambda case: run(case, "chunked", 8))
    recomputed = with_gradients(case, lambda case: checkpoint(run, case, "chunked", 8, use_reentrant=False))
    assert worst(recomputed, plain)[0] == 0


def test_no_result_depends_on_uninitialised_memory():
    case = make_case(score="offset", decay="mixed", with_state=True)
    plain = with_gradients(case, lambda case: run(case, "chunked", 8))
    # In this mode torch fills every torch.empty with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = with_gradients(case, lambda case: run(case, "chunked", 8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert worst(poisoned, plain)[0] == 0


@pytest.mark.parametrize("coefs", [SQUARE, (1.0, 1.0, 0.5, 1 / 6)], ids=["square", "taylor3"])
def test_memory_kept_for_backward_is_linear_in_the_length(coefs):
    def kept(tokens):
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        q = torch.randn(1, tokens, 2, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            poly_attention(q, q, q, -torch.rand(1, tokens, 2), coefs=coefs)
        return sum(sizes.values())

    assert kept(1024) < 2.2 * kept(512)


def test_inputs_and_initial_state_are_left_as_they_were():
    case = make_case(tokens=1, score="offset", with_state=True)
    before = {name: tensor.clone() for name, tensor in case.tensors().items()}
    for form in FORMS:
        run(case, form)
    assert all(torch.equal(before[name], tensor) for name, tensor in case.tensors().items())
