"""The difference of two models on the same documents: its error is far below that of either score."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from subquad.errors import ConfigError, OutputError
from subquad.eval.confusion import Array, f1, matthews
from subquad.eval.harness.uncertainty import NUM_RESAMPLES
from subquad.eval.records import RECORDS_FOLDER, EvalRecord

SAMPLES_FILE = "samples_file"
_RESAMPLES_AT_ONCE = 100
_SEED = 1234
_RATIOS: dict[str, Callable[[Array], Array]] = {
    "word_perplexity": lambda rate: np.exp(-rate),
    "byte_perplexity": lambda rate: np.exp(-rate),
    "bits_per_byte": lambda rate: -rate / np.log(2),
}


class MetricDifference(NamedTuple):
    """A paired difference of one metric.

    Attributes:
        difference: First model less second.
        standard_error: Of the difference, by a bootstrap that draws documents for both models at once; None with one
            document.
        num: Documents.
    """

    difference: float
    standard_error: float | None
    num: int


def paired_difference(folder: Path, first: EvalRecord, second: EvalRecord, metric: str) -> MetricDifference:
    """Compare two models on the documents of one task.

    Args:
        folder: The evaluation folder both records are from; the documents' scores lie in lm-eval's sample files.
        first: Record of a model.
        second: Record of another model on the same task.
        metric: Name of a metric of both, without a filter: a mean over documents, `mcc`, `f1` or a perplexity.

    Returns:
        The difference.

    Raises:
        ConfigError: The records are not of the same documents, or lack the metric.
        OutputError: The sample files cannot be read.
    """
    values, hashes = zip(*(_values(folder, record, metric) for record in (first, second)), strict=True)
    if first.task != second.task or hashes[0] != hashes[1]:
        raise ConfigError(
            f"{first.model} and {second.model} did not answer the same documents of {first.task}; evaluate both with "
            "the same settings"
        )
    # Both models have the same kinds of columns, side by side in the resamples.
    classes = sorted({0, 1, *(label for pair in values[0] + values[1] for label in pair)}) if _counted(metric) else []
    columns, score = zip(*(_statistic(metric, items, classes) for items in values), strict=True)
    num = len(values[0])

    def difference(weights: Array) -> Array:
        return score[0](weights @ columns[0]) - score[1](weights @ columns[1])

    value = float(difference(np.ones((1, num)))[0])
    if num < 2:
        return MetricDifference(value, None, num)
    generator = np.random.default_rng(_SEED)
    draws = [
        difference(generator.multinomial(num, np.full(num, 1 / num), size=_RESAMPLES_AT_ONCE).astype(np.float64))
        for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE)
    ]
    return MetricDifference(value, float(np.concatenate(draws).std(ddof=1)), num)


def _counted(metric: str) -> bool:
    return metric in ("mcc", "f1")


def _statistic(metric: str, items: Sequence[Any], classes: Sequence[int]) -> tuple[Array, Callable[[Array], Array]]:
    """Return `[documents, columns]` and the metric as a function of weighted sums of them, `[resamples, columns]`."""
    if _counted(metric):
        num_classes = len(classes)
        cells = np.searchsorted(np.asarray(classes), np.asarray(items))
        one_hot = np.eye(num_classes**2)[cells[:, 0] * num_classes + cells[:, 1]]
        of_counts = matthews if metric == "mcc" else f1
        return one_hot, lambda sums: of_counts(sums.reshape(-1, num_classes, num_classes))
    if metric in _RATIOS:
        of_rate = _RATIOS[metric]
        return np.asarray(items, dtype=np.float64), lambda sums: of_rate(sums[:, 0] / sums[:, 1])
    columns = np.stack([np.asarray(items, dtype=np.float64), np.ones(len(items))], axis=1)
    if metric == "perplexity":
        return columns, lambda sums: np.exp(-sums[:, 0] / sums[:, 1])
    return columns, lambda sums: sums[:, 0] / sums[:, 1]


def _values(folder: Path, record: EvalRecord, metric: str) -> tuple[list[Any], list[str]]:
    """Return the documents' values of a metric, and the documents' hashes."""
    name = record.details.get(SAMPLES_FILE)
    if name is None or metric not in record.metrics or "," in metric:
        raise ConfigError(f"{record.task} of {record.model} has no {metric} by document; it has {list(record.metrics)}")
    path = folder / RECORDS_FOLDER / name
    try:
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [sample[metric] for sample in samples], [sample["doc_hash"] for sample in samples]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} cannot be read: {error!r}. Remove the record and evaluate again.") from error
