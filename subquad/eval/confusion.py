"""Scores of confusion counts: of one table, or of many resampled ones at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def matthews(counts: Array) -> Array:
    """Return the Matthews correlation of confusion counts.

    Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient", eq. 8; 0 where gold
    or prediction has one class only, as in scikit-learn.

    Args:
        counts: `[..., classes, classes]`, gold by prediction.

    Returns:
        `[...]`.
    """
    total = counts.sum((-2, -1))
    gold, predicted = counts.sum(-1), counts.sum(-2)
    covariance = np.trace(counts, axis1=-2, axis2=-1) * total - (gold * predicted).sum(-1)
    scale = np.sqrt((total**2 - (gold**2).sum(-1)) * (total**2 - (predicted**2).sum(-1)))
    return np.divide(covariance, scale, out=np.zeros_like(total), where=scale > 0)


def f1(counts: Array) -> Array:
    """Return the F1 score of the second of two classes; 0 where it is neither gold nor predicted.

    Args:
        counts: `[..., 2, 2]`, gold by prediction.

    Returns:
        `[...]`.
    """
    found = 2 * counts[..., 1, 1]
    scale = found + counts[..., 0, 1] + counts[..., 1, 0]
    return np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)
