"""Standard errors of lm-eval's metrics, cheap enough for every task.

lm-eval bootstraps Matthews correlation, F1 and perplexity with 100,000 resamples in Python: minutes of CPU time for 200
documents. Here the first two are resampled as confusion counts, and perplexities take the delta method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from subquad.eval.confusion import Array, f1, matthews

NUM_RESAMPLES = 1000
# Any other aggregation is called once per resample.
NUM_RESAMPLES_OF_OTHERS = 100
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
