"""GLUE's metrics of labelled predictions, with standard errors over examples and over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.eval.confusion import f1, matthews

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_DRAWS = 10_000
_DRAWS_AT_ONCE = 500
_BOOTSTRAP_SEED = 20_180_420


@dataclass(frozen=True)
class Score:
    """A metric, or a paired difference of one, as the mean over seeds.

    Attributes:
        value: Mean over seeds.
        per_seed: The metric of each seed.
        error_examples: Standard error from the choice of examples.
        error_seeds: Standard error of the mean from the choice of seeds; None with one seed.
    """

    value: float
    per_seed: tuple[float, ...]
    error_examples: float
    error_seeds: float | None

    @property
    def standard_error(self) -> float:
        """Both errors together; on the safe side, for what varies with both is counted in both."""
        return math.hypot(self.error_examples, self.error_seeds or 0.0)


def score_predictions(metric: str, labels: Ints, predictions: Ints) -> Score:
    """Score the predictions of several seeds on the same examples.

    Args:
        metric: `acc`; `f1` of class 1; or `mcc`, Matthews' correlation, for two classes. 0 where a quotient is 0 / 0,
            such as the correlation of a constant answer.
        labels: `[num_examples]`, at least two.
        predictions: `[num_seeds, num_examples]`.

    Returns:
        The score. The error of `acc` is exact, the others are bootstrapped over examples.
    """
    return _score(metric, labels, predictions, np.ones(len(predictions)) / len(predictions))


def score_difference(metric: str, labels: Ints, first: Ints, second: Ints) -> Score:
    """Score the paired difference first - second of two models on the same examples and seeds.

    Args:
        metric: See `score_predictions`.
        labels: `[num_examples]`.
        first: `[num_seeds, num_examples]`, predictions of one model.
        second: The same of the other.

    Returns:
        The difference; its errors are far below those of its parts where the models err on the same examples.
    """
    num_seeds = len(first)
    weights = np.repeat([1.0, -1.0], num_seeds) / num_seeds
    return _score(metric, labels, np.concatenate([first, second]), weights)


def constant_baseline(metric: str, labels: Ints) -> float:
    """Return the best score of one and the same answer to every example: for `acc` that of the majority class."""
    answers = [np.full((1, len(labels)), answer) for answer in np.unique(labels)]
    return max(score_predictions(metric, labels, answer).value for answer in answers)


def _score(metric: str, labels: Ints, predictions: Ints, weights: Floats) -> Score:
    """Score the weighted sum over rows of `predictions`; `weights` are 1/S, or 1/S and -1/S for a difference."""
    # All examples with the same label and predictions are one pattern, and a resample is a draw of pattern counts.
    table, counts = np.unique(np.concatenate([labels[None], predictions]).T, axis=0, return_counts=True)
    patterns = _Patterns(table[:, 0], table[:, 1:], counts)
    rows = _values(metric, patterns, counts[None].astype(float))[0]
    num_seeds = round(1 / abs(weights[0]))
    per_seed = (rows * weights * num_seeds).reshape(-1, num_seeds).sum(0)
    errors = _accuracy_error(patterns, weights) if metric == "acc" else _bootstrap_error(metric, patterns, weights)
    return Score(
        value=float(per_seed.mean()),
        per_seed=tuple(map(float, per_seed)),
        error_examples=errors,
        error_seeds=float(per_seed.std(ddof=1) / math.sqrt(num_seeds)) if num_seeds > 1 else None,
    )


@dataclass(frozen=True)
class _Patterns:
    """`labels [P]`, `predictions [P, S]` and how many examples have each."""

    labels: Ints
    predictions: Ints
    counts: Ints


def _values(metric: str, patterns: _Patterns, counts: Floats) -> Floats:
    """Return the metric of each column of predictions for each row of pattern counts `[R, P]`: `[R, S]`."""
    truth, said = patterns.labels[:, None], patterns.predictions
    if metric == "acc":
        return counts @ (said == truth) / counts.sum(1, keepdims=True)
    cells = [[counts @ (((truth == 1) == gold) & ((said == 1) == answer)) for answer in (0, 1)] for gold in (0, 1)]
    confusion = np.moveaxis(np.array(cells), (0, 1), (-2, -1))
    return f1(confusion) if metric == "f1" else matthews(confusion)


def _accuracy_error(patterns: _Patterns, weights: Floats) -> float:
    """Return the standard error of a mean over examples."""
    correct = (patterns.predictions == patterns.labels[:, None]) @ weights
    num = patterns.counts.sum()
    mean = patterns.counts @ correct / num
    return float(math.sqrt(patterns.counts @ (correct - mean) ** 2 / (num - 1) / num))


def _bootstrap_error(metric: str, patterns: _Patterns, weights: Floats) -> float:
    """Return the standard deviation over resamples of the examples (Efron 1979); the same draws every time."""
    generator = np.random.default_rng(_BOOTSTRAP_SEED)
    num = int(patterns.counts.sum())
    shares = patterns.counts / num
    values = [
        _values(metric, patterns, generator.multinomial(num, shares, size=_DRAWS_AT_ONCE).astype(float)) @ weights
        for _ in range(NUM_DRAWS // _DRAWS_AT_ONCE)
    ]
    return float(np.concatenate(values).std())


def to_digits(classes: Sequence[int]) -> str:
    """Write class numbers below 10 as one string, a digit each: small enough to keep every prediction in a record."""
    return "".join(map(str, classes))


def from_digits(digits: str) -> Ints:
    """Read class numbers back."""
    return np.array(list(digits), dtype=np.int64)
