"""Outputs, states and every gradient, for every score, group size, packing and state."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreted.common import check, small_case


@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
@pytest.mark.parametrize("decay", ["gentle", "mixed"], ids=["one document", "packed"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("score", ["square", "linear", "taylor", "offset"])
def test_kernels_equal_the_formula(score, groups, decay, with_state):
    # The sum of weights of an odd score passes through 0, where no precision is enough.
    normalize = groups == 3 and score != "linear"
    check(small_case(score=score, groups=groups, decay=decay, with_state=with_state, normalize=normalize))


@pytest.mark.parametrize("score", ["constant", "even"])
def test_other_sets_of_powers(score):
    check(small_case(score=score, groups=2, with_state=True, normalize=True))


@pytest.mark.parametrize("decay", ["none", "strong"])
def test_decays_from_none_to_hundreds_per_token(decay):
    check(small_case(score="offset", decay=decay, with_state=True, tokens=40), chunk_size=32)


def test_several_sequences_and_heads():
    check(small_case(batch=2, kv_heads=2, groups=2, tokens=20, with_state=True))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32])
def test_lengths_around_the_tile(tokens):
    check(small_case(score="offset", tokens=tokens, with_state=True))


@pytest.mark.parametrize("head_dim, value_dim", [(48, 20), (20, 16), (5, 4)])
def test_widths_that_fill_no_tile(head_dim, value_dim):
    check(small_case(score="taylor", head_dim=head_dim, value_dim=value_dim, with_state=True, tokens=20))


@pytest.mark.parametrize("queries", [35, 7])
def test_one_chunk_over_all_tokens(queries):
    case = small_case(score="taylor", decay="mixed", groups=2, queries=queries, normalize=True)
    check(case, form="auto", chunk_size=None)


def test_fewer_queries_than_keys_in_many_chunks():
    check(small_case(score="offset", queries=20, with_state=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_float16(normalize):
    check(small_case(score="taylor", groups=2, with_state=True, normalize=normalize), torch.float16)


def test_head_dim_64():
    check(small_case(head_dim=64, value_dim=64, tokens=18, normalize=True))
