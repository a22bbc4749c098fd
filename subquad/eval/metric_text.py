"""A metric as text: with its standard error, or the interval that says more at 0 and at 1."""

from __future__ import annotations

from subquad.eval.niah.stats import wilson_interval
from subquad.eval.records import Metric
from subquad.eval.style import with_error

# Metrics that are shares of examples; a name may end in a filter of lm-eval's, such as `exact_match,strict-match`.
_SHARES = frozenset({"accuracy", "key_rank1", "acc", "acc_norm", "exact_match"})


def extreme_interval(name: str, metric: Metric) -> tuple[float, float] | None:
    """Return the 95 % Wilson interval of a share that is 0 or 1, whose own standard error is 0 or none.

    Args:
        name: Name of the metric.
        metric: The metric.

    Returns:
        Lower and upper end; None for any other metric.
    """
    if metric.standard_error or metric.value not in (0, 1) or name.split(",")[0] not in _SHARES:
        return None
    return wilson_interval(round(metric.value * metric.num), metric.num)


def metric_text(name: str, metric: Metric, decimals: int = 4) -> str:
    """Return a metric as text.

    Args:
        name: Its name.
        metric: The metric.
        decimals: Decimals of value, error and interval.

    Returns:
        `0.560 ± 0.035`; `0.000 [0.000, 0.176]` for a share at 0 or 1; the value alone where there is no error.
    """
    interval = extreme_interval(name, metric)
    if interval is None:
        return with_error(metric.value, metric.standard_error, decimals)
    low, high = (f"{end:.{decimals}f}" for end in interval)
    return f"{metric.value:.{decimals}f} [{low}, {high}]"


def known_error(value: float, standard_error: float | None) -> float | None:
    """Return a mean's standard error for a record: none where it is 0 because every example is 0, or every one is 1.

    That no example differs from the others says how few there are, not that the mean is exact.

    Args:
        value: The mean.
        standard_error: Its standard error by the usual formula.

    Returns:
        The standard error, or None.
    """
    return None if standard_error == 0 and value in (0, 1) else standard_error


def no_error_note(name: str, metric: Metric) -> str:
    """Say in a note of a record why a metric has no standard error, see `known_error`."""
    return f"{name} has no standard error: all {metric.num:,} examples score {metric.value:.0f}."
