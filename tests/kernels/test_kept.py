"""A store of kept keys against a loop that keeps a list, and its attention against a softmax over that list."""

import pytest
import torch

from subquad.kernels import window_attention
from subquad.kernels.kept import choose_kept, join_exact, kept_attention, take_tokens

NONE = float("-inf")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def keep_by_hand(scores, size, documents=None):
    """Return, per row and head, the tokens held after every step and the one that leaves at it (None where none)."""
    batch, total, heads = scores.shape
    held, leaves = {}, {}
    for b in range(batch):
        for h in range(heads):
            value = scores[b, :, h].tolist()
            store = [token for token in range(size) if value[token] > NONE]
            for step in range(total - size):
                token, left = size + step, None
                if documents is not None and step and documents[b, step] != documents[b, step - 1]:
                    store = []
                if value[token] > NONE:
                    store.append(token)
                    if len(store) > size:
                        # of equal scores the youngest leaves
                        left = min(store, key=lambda entry: (value[entry], -entry))
                        store.remove(left)
                held[b, step, h], leaves[b, step, h] = list(store), left
    return held, leaves


def held_sets(kept, num_new):
    held = {}
    chunk = kept.members.shape[3]
    for b in range(kept.members.shape[0]):
        for h in range(kept.members.shape[1]):
            for step in range(num_new):
                seen = kept.members[b, h, step // chunk, step % chunk]
                held[b, step, h] = sorted(kept.entries[b, h, step // chunk][seen].tolist())
    return held


def make_scores(seed, batch=2, size=3, num_new=23, heads=2, empty=False):
    generator = torch.Generator().manual_seed(seed)
    # few values, so that there are ties
    scores = torch.randint(0, 9, (batch, size + num_new, heads), generator=generator).float()
    absent = torch.rand(batch, size + num_new, 1, generator=generator) < 0.2
    scores = scores.masked_fill(absent, NONE)
    if empty:
        scores[:, :size] = NONE
    else:
        # a store's slots are full from the front
        free = torch.arange(size)[None, :, None] >= torch.randint(0, size + 1, (batch, 1, heads), generator=generator)
        scores[:, :size] = torch.where(free, NONE, scores[:, :size].clamp_min(1.0))
    return scores


@pytest.mark.parametrize("chunk_size", [1, 4, 23, 128])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_store_is_that_of_a_loop(size, chunk_size):
    scores = make_scores(size, size=size)
    kept = choose_kept(scores, size, chunk_size=chunk_size)
    held, leaves = keep_by_hand(scores, size)
    assert held_sets(kept, 23) == {key: sorted(tokens) for key, tokens in held.items()}
    total = size + 23
    found = {key: kept.leaves[key].item() for key in leaves}
    assert found == {key: total if token is None else token for key, token in leaves.items()}
    for b in range(2):
        for h in range(2):
            last = held[b, 22, h]
            assert kept.final[b, :, h].tolist() == sorted(last) + [total] * (size - len(last))


@pytest.mark.parametrize("chunk_size", [1, 4, 128])
def test_documents_do_not_see_each_other(chunk_size):
    size = 3
    scores = make_scores(5, size=size, empty=True)
    documents = torch.tensor([[0] * 5 + [1] * 2 + [2] * 16, [0] * 9 + [3] * 14])
    kept = choose_kept(scores, size, documents=documents, chunk_size=chunk_size)
    held, leaves = keep_by_hand(scores, size, documents)
    assert held_sets(kept, 23) == {key: sorted(tokens) for key, tokens in held.items()}
    assert {key: kept.leaves[key].item() for key in leaves} == {
        key: size + 23 if token is None else token for key, token in leaves.items()
    }


def test_two_calls_are_one():
    scores, size = make_scores(7, num_new=20), 3
    whole = choose_kept(scores, size)
    first = choose_kept(scores[:, : size + 12], size)
    then = torch.cat([take_tokens(scores[:, : size + 12], first.final), scores[:, size + 12 :]], dim=1)
    then[:, :size] = then[:, :size].masked_fill(first.final == size + 12, NONE)
    second = choose_kept(then, size)
    names = torch.arange(size + 20)[None, :, None].expand_as(scores)
    carried = torch.cat([take_tokens(names[:, : size + 12], first.final), names[:, size + 12 :]], dim=1)
    for step in range(8):
        left = second.leaves[:, step]
        expected = whole.leaves[:, 12 + step]
        named = take_tokens(carried, left[:, None])[:, 0]
        assert torch.equal(torch.where(left == size + 8, size + 20, named), expected)


@pytest.mark.parametrize("chunk_size", [3, 128])
def test_attention_is_softmax_over_the_store(chunk_size):
    size, num_new, dim = 3, 10, 4
    scores = make_scores(9, size=size, num_new=num_new)
    kept = choose_kept(scores, size, chunk_size=chunk_size)
    held, _ = keep_by_hand(scores, size)
    q = randn(2, num_new, 6, dim).requires_grad_()
    k, v = (randn(2, size + num_new, 2, dim).requires_grad_() for _ in range(2))
    out = kept_attention(q, k, v, kept)
    rows = []
    for b in range(2):
        for step in range(num_new):
            for head in range(6):
                tokens = held[b, step, head // 3]
                if not tokens:
                    assert out.log_normaliser[b, step, head] == NONE
                    rows.append(torch.zeros(dim, dtype=torch.float64))
                    continue
                logits = k[b, tokens, head // 3] @ q[b, step, head] / dim**0.5
                torch.testing.assert_close(out.log_normaliser[b, step, head], logits.logsumexp(0))
                rows.append(logits.softmax(0) @ v[b, tokens, head // 3])
    expected = torch.stack(rows).view_as(out.out)
    torch.testing.assert_close(out.out, expected)
    upstream = randn(*expected.shape)
    for got, wanted in zip(
        torch.autograd.grad(out.out, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_joined_parts_are_one_softmax_with_gradients():
    q, k, v = (randn(1, 12, 2, 4).requires_grad_() for _ in range(3))
    valid = torch.ones(1, 12, dtype=torch.bool)
    valid[:, :3] = False
    near = window_attention(q, k, v, window=4, valid=valid)
    nothing = near._replace(out=torch.zeros_like(near.out), log_normaliser=torch.full_like(near.log_normaliser, NONE))
    joined = join_exact(near, nothing)
    torch.testing.assert_close(joined.out, near.out)
    assert torch.equal(joined.log_normaliser == NONE, near.log_normaliser == NONE)
    for gradient in torch.autograd.grad(joined.out.sum() + joined.log_normaliser[:, 3:].sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()
    # the same keys in two halves
    halves = [window_attention(q, k, v, window=12, valid=torch.arange(12)[None] % 2 == parity) for parity in (0, 1)]
    whole = window_attention(q, k, v, window=12)
    both = join_exact(*halves)
    torch.testing.assert_close(both.out, whole.out)
    torch.testing.assert_close(both.log_normaliser, whole.log_normaliser)
