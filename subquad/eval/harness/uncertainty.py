"""Standard errors of lm-eval's metrics, cheap enough for every task.

lm-eval bootstraps Matthews correlation, F1 and perplexity with 100,000 resamples in Python: minutes of CPU time for 200
documents. Here the first two are resampled as confusion counts, and perplexities take the delta method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 1000
# Any other aggregation is called once per resample.
NUM_RESAMPLES_OF_OTHERS = 100
Array = NDArray[np.float64]
Aggregation = Callable[[Sequence[Any]], float]


class Uncertainty(NamedTuple):
    """A standard error and where it comes from.

    Attributes:
        standard_error: None where there is none.
        method: In words; the reason where there is none.
    """

    standard_error: float | None
    method: str


def estimate(aggregation: Aggregation, items: Sequence[Any], seed: int) -> Uncertainty:
    """Return the standard error of a metric over documents.

    Args:
        aggregation: lm-eval's function from the documents' values to the metric.
        items: The documents' values.
        seed: Seed of the resamples.

    Returns:
        The standard error with its method.
    """
    from lm_eval.api import metrics

    if len(items) < 2:
        return Uncertainty(None, "none: one document")
    own: dict[Aggregation, Callable[[Sequence[Any]], float]] = {
        metrics.mean: metrics.mean_stderr,
        metrics.acc_all: metrics.acc_all_stderr,
    }
    if aggregation in own:
        return Uncertainty(float(own[aggregation](items)), "lm-eval's, of a mean")
    counted = {metrics.matthews_corrcoef: matthews, metrics.f1_score: f1}
    if aggregation in counted:
        return _of_counts(counted[aggregation], items, seed)
    if aggregation is metrics.perplexity:
        value = math.exp(-float(np.mean(items)))
        return Uncertainty(value * float(metrics.mean_stderr(items)), "delta method")
    if aggregation in (metrics.weighted_perplexity, metrics.bits_per_byte):
        rate, error = _ratio(items)
        scale = math.exp(-rate) if aggregation is metrics.weighted_perplexity else 1 / math.log(2)
        return Uncertainty(scale * error, "delta method, the document as the sampling unit")
    return _of_others(aggregation, items, seed)


def matthews(counts: Array) -> Array:
    """Return the Matthews correlation of confusion counts.

    Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient", eq. 8; 0 where gold
    or prediction has one class only, as in scikit-learn.

    Args:
        counts: `[resamples, classes, classes]`, gold by prediction.

    Returns:
        `[resamples]`.
    """
    total = counts.sum((1, 2))
    gold, predicted = counts.sum(2), counts.sum(1)
    covariance = np.trace(counts, axis1=1, axis2=2) * total - (gold * predicted).sum(1)
    scale = np.sqrt((total**2 - (gold**2).sum(1)) * (total**2 - (predicted**2).sum(1)))
    return np.divide(covariance, scale, out=np.zeros_like(total), where=scale > 0)


def f1(counts: Array) -> Array:
    """Return the F1 score of the second of two classes; 0 where it is neither gold nor predicted.

    Args:
        counts: `[resamples, 2, 2]`, gold by prediction.

    Returns:
        `[resamples]`.
    """
    found = 2 * counts[:, 1, 1]
    scale = found + counts[:, 0, 1] + counts[:, 1, 0]
    return np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)


def _of_counts(score: Callable[[Array], Array], items: Sequence[Any], seed: int) -> Uncertainty:
    """Bootstrap a score of confusion counts: resampling documents is a multinomial draw of the counts."""
    pairs = np.asarray(items, dtype=np.int64)
    # At least the classes 0 and 1, so that F1 finds its own where a sample lacks one.
    classes = np.union1d(np.unique(pairs), [0, 1])
    cells = np.searchsorted(classes, pairs)
    counts = np.zeros((len(classes), len(classes)))
    np.add.at(counts, (cells[:, 0], cells[:, 1]), 1)
    draws = np.random.default_rng(seed).multinomial(len(pairs), counts.ravel() / len(pairs), size=NUM_RESAMPLES)
    values = score(draws.reshape(NUM_RESAMPLES, *counts.shape).astype(np.float64))
    return Uncertainty(float(values.std(ddof=1)), f"bootstrap of the confusion counts, {NUM_RESAMPLES:,} resamples")


def _ratio(items: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a ratio of sums over documents, and its standard error."""
    tops, bottoms = np.asarray(items, dtype=np.float64).T
    rate = tops.sum() / bottoms.sum()
    num = len(tops)
    error = math.sqrt(num / (num - 1) * float(((tops - rate * bottoms) ** 2).sum())) / bottoms.sum()
    return float(rate), float(error)


def _of_others(aggregation: Aggregation, items: Sequence[Any], seed: int) -> Uncertainty:
    generator = np.random.default_rng(seed)
    try:
        values = [
            aggregation([items[index] for index in generator.integers(0, len(items), len(items))])
            for _ in range(NUM_RESAMPLES_OF_OTHERS)
        ]
        error = float(np.std(np.asarray(values, dtype=np.float64), ddof=1))
    # A task brings its own aggregation, which may fail in any way on documents drawn twice.
    except Exception as problem:
        return Uncertainty(None, f"none: the bootstrap failed ({problem!r})")
    if not math.isfinite(error):
        return Uncertainty(None, "none: the bootstrap is not finite")
    return Uncertainty(error, f"bootstrap over documents, {NUM_RESAMPLES_OF_OTHERS} resamples")
