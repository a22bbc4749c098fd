"""Means with standard errors, and Wilson's interval for shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95


def wilson_interval(successes: int, num: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the confidence interval of a binomial share (Wilson 1927; recommended by Brown, Cai & DasGupta 2001).

    Unlike `p ± z * se` it stays within 0 and 1 and has a width at 0 and at 1.

    Args:
        successes: Number of successes, 0 to `num`.
        num: Number of trials, at least 1.
        confidence: Its coverage, between 0 and 1.

    Returns:
        Lower and upper end.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / num
    scale = 1 / (1 + z * z / num)
    centre = scale * (share + z * z / (2 * num))
    half = scale * z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    # At the ends the formula gives 0 and 1 exactly, which rounding would miss.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == num else centre + half


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error over samples; no error for fewer than two."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), stdev(values) / math.sqrt(len(values))
