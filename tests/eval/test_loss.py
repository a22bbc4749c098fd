"""Held-out loss: against the library's own, by position, and its statistics."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from subquad.errors import ConfigError, DataError, TrainingError
from subquad.eval.loss import (
    LossResult,
    compare_losses,
    compare_losses_by_position,
    evaluate_loss,
    perplexity,
)

from .conftest import SIZES


def library_loss(model, row):
    """Mean loss of one row by transformers' own forward, with labels."""
    with torch.no_grad():
        out = model(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None],
            labels=row["labels"][None],
            use_cache=False,
        )
    return float(out.loss)


def test_loss_equals_the_librarys(llama, packed_rows):
    result = evaluate_loss(llama, packed_rows, mode=None, batch_size=2, tokens_per_chunk=7)
    for index, row in enumerate(packed_rows):
        tokens = int((row["labels"] != -100).sum())
        assert int(result.row_tokens[index].sum()) == tokens
        assert float(result.row_sums[index].sum()) / tokens == pytest.approx(library_loss(llama, row), rel=1e-5)


def test_packed_documents_do_not_see_each_other(llama, packed_rows):
    row = packed_rows[0]
    alone = [{"input_ids": row["input_ids"][:30]}, {"input_ids": row["input_ids"][30:]}]
    together = evaluate_loss(llama, [row], mode=None)
    apart = evaluate_loss(llama, alone, mode=None)
    assert together.num_tokens == apart.num_tokens == 29 + 9
    assert together.loss == pytest.approx(apart.loss, rel=1e-5)


def test_batch_and_chunk_size_do_not_matter(llama, packed_rows):
    results = [
        evaluate_loss(llama, packed_rows, mode=None, batch_size=batch_size, tokens_per_chunk=chunk)
        for batch_size, chunk in ((1, 1000), (2, 5), (5, 1))
    ]
    for result in results[1:]:
        assert torch.equal(result.row_tokens, results[0].row_tokens)
        torch.testing.assert_close(result.row_sums, results[0].row_sums, rtol=1e-5, atol=1e-5)


def test_same_call_gives_the_same_bits(converted, packed_rows):
    first, second = (evaluate_loss(converted, packed_rows, batch_size=2) for _ in range(2))
    assert torch.equal(first.row_sums, second.row_sums)


def test_buckets_hold_each_token_once(llama, packed_rows):
    result = evaluate_loss(llama, packed_rows, mode=None, position_buckets=(4, 8, 16))
    buckets = result.by_position
    assert [(bucket.start, bucket.end) for bucket in buckets] == [(0, 4), (4, 8), (8, 16), (16, None)]
    assert sum(bucket.num_tokens for bucket in buckets) == result.num_tokens
    total = sum(bucket.loss * bucket.num_tokens for bucket in buckets)
    assert total / result.num_tokens == pytest.approx(result.loss, rel=1e-12)
    positions = torch.cat([row["position_ids"] for row in packed_rows])
    assert buckets[0].num_tokens == int(((positions > 0) & (positions < 4)).sum())
    assert buckets[2].num_tokens == int(((positions >= 8) & (positions < 16)).sum())


def test_loss_of_a_bucket_is_that_of_its_tokens(llama, packed_rows):
    row = packed_rows[2]
    labels = row["labels"].clone()
    labels[:8] = -100
    late = {**row, "labels": labels}
    bucket = evaluate_loss(llama, [row], mode=None, position_buckets=(8,)).by_position[1]
    assert bucket.num_tokens == 16
    assert bucket.loss == pytest.approx(library_loss(llama, late), rel=1e-5)


def test_dataset_rows_and_streams_are_accepted(llama, packed_rows):
    plain = [{name: column.tolist() for name, column in row.items()} for row in packed_rows]
    expected = evaluate_loss(llama, packed_rows, mode=None)
    for rows in (Dataset.from_list(plain), Dataset.from_list(plain).with_format("torch"), iter(plain)):
        assert torch.equal(evaluate_loss(llama, rows, mode=None).row_sums, expected.row_sums)


def test_missing_labels_and_positions_have_their_documented_meaning(llama, packed_rows):
    row = packed_rows[0]
    derived = {"input_ids": row["input_ids"], "position_ids": row["position_ids"]}
    assert evaluate_loss(llama, [derived], mode=None).loss == evaluate_loss(llama, [row], mode=None).loss
    whole = evaluate_loss(llama, [{"input_ids": row["input_ids"]}], mode=None)
    assert whole.num_tokens == 39


def test_progress_reaches_the_end(llama, packed_rows):
    calls = []
    evaluate_loss(llama, packed_rows, mode=None, batch_size=2, progress=lambda *call: calls.append(call))
    assert calls == [(2, 5), (4, 5), (5, 5)]


def test_logits_never_exist_for_more_than_a_chunk(llama, packed_rows):
    sizes = []
    hook = llama.lm_head.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.shape[:-1].numel()))
    try:
        evaluate_loss(llama, packed_rows, mode=None, tokens_per_chunk=6)
    finally:
        hook.remove()
    assert max(sizes) == 6


def test_dropout_is_off_and_training_mode_comes_back(packed_rows):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3, attention_dropout=0.5)).train()
    model.model.layers[0].eval()
    with torch.no_grad():
        before = [module.training for module in model.modules()]
        first, second = (evaluate_loss(model, packed_rows, mode=None) for _ in range(2))
    assert torch.equal(first.row_sums, second.row_sums)
    assert [module.training for module in model.modules()] == before


def result_of(sums, tokens):
    return LossResult(torch.tensor(sums, dtype=torch.float64)[:, None], torch.tensor(tokens)[:, None], ())


def test_standard_error_with_equal_rows_is_that_of_a_mean():
    rows = [1.0, 2.0, 4.0, 9.0]
    result = result_of([10 * row for row in rows], [10] * 4)
    expected = torch.tensor(rows).std(unbiased=True) / math.sqrt(4)
    assert result.standard_error == pytest.approx(float(expected), rel=1e-6)


def test_standard_error_with_unequal_rows_is_that_of_the_ratio():
    result = result_of([10.0, 60.0], [10, 30])
    # loss 70 / 40 = 1.75; residuals 10 - 17.5 and 60 - 52.5; sqrt(2 * 2 * 7.5^2) / 40
    assert result.standard_error == pytest.approx(math.sqrt(2 * 2 * 7.5**2) / 40)


def test_one_row_has_no_standard_error():
    assert result_of([10.0], [10]).standard_error is None
    assert result_of([10.0, 0.0], [10, 0]).standard_error is None


def test_paired_difference_removes_what_rows_share():
    hard = torch.tensor([10.0, 50.0, 90.0])
    first = result_of((hard - torch.tensor([1.0, 1.1, 0.9])).tolist(), [10] * 3)
    second = result_of(hard.tolist(), [10] * 3)
    pair = compare_losses(first, second)
    assert pair.difference == pytest.approx(-0.1)
    assert pair.standard_error == pytest.approx(0.01 / math.sqrt(3), rel=1e-4)
    assert pair.standard_error < first.standard_error / 100


def test_losses_on_different_tokens_are_not_compared():
    with pytest.raises(ConfigError, match="different tokens"):
        compare_losses(result_of([1.0, 2.0], [10, 10]), result_of([1.0, 2.0], [10, 11]))


def test_perplexity():
    assert result_of([20.0], [10]).perplexity == pytest.approx(math.e**2)
    assert perplexity(1e4) == math.inf


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "no rows"),
        ([{"tokens": [1, 2]}], "row 0 has no input_ids"),
        ([{"input_ids": [1, 2, 3], "position_ids": [0, 1]}], "different lengths"),
        ([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}], "token to predict"),
        ([{"input_ids": [1]}], "token to predict"),
    ],
)
def test_bad_rows_are_refused(llama, rows, message):
    with pytest.raises(DataError, match=message):
        evaluate_loss(llama, rows, mode=None)


def test_bad_arguments_are_refused_together(llama, packed_rows):
    with pytest.raises(ConfigError, match=r"position_buckets .*; batch_size .*; tokens_per_chunk"):
        evaluate_loss(llama, packed_rows, position_buckets=(8, 8), batch_size=0, tokens_per_chunk=0)


def test_a_loss_that_is_not_finite_stops_the_evaluation(packed_rows, converted):
    with torch.no_grad():
        converted.lm_head.weight[3] = torch.nan
    with pytest.raises(TrainingError, match="row 0 is not finite"):
        evaluate_loss(converted, packed_rows)


def test_paired_differences_by_position(converted, packed_rows):
    buckets = (8, 16, 64, 128)
    first = evaluate_loss(converted, packed_rows, mode="student", position_buckets=buckets)
    second = evaluate_loss(converted, packed_rows, mode="teacher", position_buckets=buckets)
    pairs = compare_losses_by_position(first, second)
    expected = [a.loss - b.loss for a, b in zip(first.by_position, second.by_position, strict=True)]
    assert [pair.difference for pair in pairs] == pytest.approx(expected)
    assert len(pairs) == 3
    assert all(pair.standard_error >= 0 for pair in pairs)
    other = evaluate_loss(converted, packed_rows, mode="teacher", position_buckets=(8,))
    with pytest.raises(ConfigError, match="buckets differ"):
        compare_losses_by_position(first, other)
