"""The state's layout and size."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels import crossover_length, num_rows, poly_attention, state_bytes, state_numel, zero_state
from subquad.kernels.products import products, products_backward
from subquad.kernels.state import active_orders, key_features, query_features
from tests.kernels.oracle import make_case, packed_products, run

COEFS = {(0,): (1.0,), (1,): (0.0, 1.0), (2,): (0.0, 0.0, 1.0), (0, 1): (1.0, 1.0), (0, 2): (1.0, 0.0, 1.0)}
COEFS[(0, 1, 2)] = (1.0, 1.0, 0.5)


@pytest.mark.parametrize("orders", COEFS)
@pytest.mark.parametrize("form", ["quadratic", "chunked", "recurrent"])
def test_bytes_equal_the_formula(orders, form):
    q, k, v = torch.randn(2, 1, 6, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 5)
    state = poly_attention(q, k, v, coefs=COEFS[orders], form=form, output_final_state=True).final_state
    rows = sum({0: 1, 1: 8, 2: 8 * 9 // 2}[order] for order in orders)
    held = sum(part.untyped_storage().nbytes() for part in state)
    assert (
        held == 2 * state_bytes(3, 8, 5, orders) == 2 * 4 * state_numel(3, 8, 5, orders) == 2 * 3 * rows * (5 + 1) * 4
    )
    assert all(part.dtype == torch.float32 for part in state)


def test_size_of_the_published_2mamba_state():
    # d (d + 1)**2 / 2 numbers per key/value head, and the crossover lengths of the paper for d = 64 and 128.
    assert state_numel(1, 64, 64, (2,)) == 64 * 65**2 // 2
    assert state_numel(3, 128, 128, (2,)) == 3 * 128 * 129**2 // 2
    assert num_rows(64, (2,)) == 2080
    assert (crossover_length(64, 64), crossover_length(128, 128)) == (1058, 4162)


@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (128, 128), (16, 48)])
def test_crossover_is_the_first_length_whose_cache_is_larger(head_dim, value_dim):
    held = state_numel(1, head_dim, value_dim, (2,)) + 2 * head_dim + value_dim
    length = crossover_length(head_dim, value_dim)
    assert (length - 1) * (head_dim + value_dim) <= held < length * (head_dim + value_dim)


def test_rows_are_constant_key_and_upper_triangle():
    case = make_case(batch=1, tokens=1, kv_heads=1, groups=1, head_dim=4, value_dim=3, score="taylor", decay="none")
    k, v, weight = case.k[0, 0, 0], case.v[0, 0, 0], case.key_weight[0, 0, 0]
    rows, cols = torch.triu_indices(4, 4)
    expected = torch.cat([torch.ones(1).double(), k, k[rows] * k[cols]]) * weight
    for form in ("quadratic", "chunked", "recurrent"):
        result = run(case, form)
        torch.testing.assert_close(result["state.normaliser"][0, 0], expected)
        torch.testing.assert_close(result["state.values"][0, 0], expected[:, None] * v)


def test_query_features_give_the_polynomial():
    q, k = torch.randn(7, 6).double(), torch.randn(5, 6).double()
    x = q @ k.T
    actual = query_features(q, torch.tensor([[2.0], [3.0], [4.0]]).double(), (0, 1, 2)) @ key_features(k, (0, 1, 2)).T
    torch.testing.assert_close(actual, 2 + 3 * x + 4 * x**2)


def test_an_exact_zero_coefficient_has_no_rows():
    assert active_orders((0.0, 1.0)) == (1,)
    assert active_orders((1, 0, 2.0)) == (0, 2)
    assert active_orders((torch.zeros(2), 0.0, 1.0)) == (0, 2)


@pytest.mark.parametrize("dim", [1, 2, 9])
def test_products_and_their_gradient(dim):
    x = torch.randn(2, 3, dim, 11).double().requires_grad_()
    expected = packed_products(x.mT).mT
    torch.testing.assert_close(products(x.detach()), expected.detach(), rtol=0, atol=0)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(products_backward(x.detach(), grad), *torch.autograd.grad(expected, x, grad))


def test_zero_state_is_the_state_before_the_first_token():
    case = make_case(score="taylor")
    start = zero_state(2, 2, 5, 4, (0, 1, 2), dtype=torch.float64)
    assert not any(part.any() for part in start)
    filled = poly_attention(case.q, case.k, case.v, coefs=case.coefs, initial_state=start).out
    torch.testing.assert_close(filled, poly_attention(case.q, case.k, case.v, coefs=case.coefs).out)
