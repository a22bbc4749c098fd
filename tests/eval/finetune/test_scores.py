"""GLUE's metrics and their errors against definitions written out."""

import math

import numpy as np
import pytest

from subquad.eval.finetune.scores import (
    constant_baseline,
    from_digits,
    score_difference,
    score_predictions,
    to_digits,
)


def noisy(labels: np.ndarray, share_wrong: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.where(generator.random(len(labels)) < share_wrong, 1 - labels, labels)


LABELS = (np.random.default_rng(0).random(120) < 0.7).astype(int)
FIRST = np.stack([noisy(LABELS, 0.2, 1), noisy(LABELS, 0.3, 2), noisy(LABELS, 0.25, 3)])
SECOND = np.stack([noisy(row, 0.1, 10 + index) for index, row in enumerate(FIRST)])


def plain(metric: str, labels: np.ndarray, said: np.ndarray) -> float:
    if metric == "acc":
        return float((labels == said).mean())
    if metric == "mcc":
        return float(np.corrcoef(labels, said)[0, 1])
    precision = (labels * said).sum() / said.sum()
    recall = (labels * said).sum() / labels.sum()
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize("metric", ["acc", "f1", "mcc"])
def test_values_follow_their_definitions(metric):
    score = score_predictions(metric, LABELS, FIRST)
    expected = [plain(metric, LABELS, row) for row in FIRST]
    assert score.per_seed == pytest.approx(expected)
    assert score.value == pytest.approx(np.mean(expected))
    assert score.error_seeds == pytest.approx(np.std(expected, ddof=1) / math.sqrt(3))
    assert score.standard_error == pytest.approx(math.hypot(score.error_examples, score.error_seeds))


@pytest.mark.parametrize("metric", ["acc", "f1", "mcc"])
def test_errors_over_examples_are_those_of_a_plain_bootstrap(metric):
    generator = np.random.default_rng(7)
    values, differences = [], []
    for _ in range(3000):
        rows = generator.integers(0, len(LABELS), len(LABELS))
        first = np.mean([plain(metric, LABELS[rows], said[rows]) for said in FIRST])
        second = np.mean([plain(metric, LABELS[rows], said[rows]) for said in SECOND])
        values.append(first)
        differences.append(first - second)
    assert score_predictions(metric, LABELS, FIRST).error_examples == pytest.approx(np.std(values), rel=0.06)
    difference = score_difference(metric, LABELS, FIRST, SECOND)
    assert difference.error_examples == pytest.approx(np.std(differences), rel=0.06)
    assert difference.error_examples < 0.8 * np.std(values)


def test_the_error_of_one_accuracy_is_binomial():
    score = score_predictions("acc", LABELS, FIRST[:1])
    assert score.error_examples == pytest.approx(math.sqrt(score.value * (1 - score.value) / (len(LABELS) - 1)))
    assert score.error_seeds is None
    assert score.standard_error == score.error_examples


def test_repeating_a_seed_adds_nothing():
    once, thrice = (score_predictions("mcc", LABELS, FIRST[[0] * num]) for num in (1, 3))
    assert thrice.value == pytest.approx(once.value)
    assert thrice.error_examples == pytest.approx(once.error_examples)
    assert thrice.error_seeds == pytest.approx(0.0, abs=1e-12)


def test_differences_are_paired_by_seed():
    difference = score_difference("acc", LABELS, FIRST, SECOND)
    gaps = [plain("acc", LABELS, a) - plain("acc", LABELS, b) for a, b in zip(FIRST, SECOND, strict=True)]
    assert difference.per_seed == pytest.approx(gaps)
    assert difference.error_seeds == pytest.approx(np.std(gaps, ddof=1) / math.sqrt(3))
    same = score_difference("mcc", LABELS, FIRST, FIRST)
    assert (same.value, same.standard_error) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_a_constant_answer_scores_zero_correlation_and_f1_without_a_hit():
    ones, zeros = np.ones((1, 120), int), np.zeros((1, 120), int)
    assert score_predictions("mcc", LABELS, ones).value == 0.0
    assert score_predictions("f1", LABELS, zeros).value == 0.0
    assert score_predictions("mcc", LABELS, LABELS[None]).value == pytest.approx(1.0)
    assert score_predictions("mcc", LABELS, 1 - LABELS[None]).value == pytest.approx(-1.0)


def test_the_baseline_is_the_best_constant_answer():
    share = LABELS.mean()
    assert constant_baseline("acc", LABELS) == pytest.approx(share)
    assert constant_baseline("acc", 1 - LABELS) == pytest.approx(share)
    assert constant_baseline("f1", LABELS) == pytest.approx(2 * share / (1 + share))
    assert constant_baseline("mcc", LABELS) == 0.0
    assert constant_baseline("acc", np.array([0, 2, 1, 2])) == 0.5


def test_accuracy_counts_more_than_two_classes():
    assert score_predictions("acc", np.array([0, 1, 2, 2]), np.array([[0, 2, 2, 1]])).value == 0.5


def test_classes_survive_writing_as_digits():
    assert to_digits([0, 2, 1]) == "021"
    assert from_digits("021").tolist() == [0, 2, 1]
