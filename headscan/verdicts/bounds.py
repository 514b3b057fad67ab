"""The bound on a mean that verdicts use: Gaffke's, for independent numbers with a limit (arXiv 1905.06208).

The lower end is a quantile of the Bayesian bootstrap of the numbers and of one added number, the worst possible; the
upper end adds the best one. Nothing is assumed of the distribution, so identical answers, rare losses and partial
credit need no rules of their own, and few numbers give a wide interval. For numbers that are 0 or 1 the ends are those
of Clopper and Pearson.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headscan.store.verdict_limits import TAIL, z_quantile

#: Distances of the tilted distribution from the lowest number, in units of the range.
_DISTANCES = np.logspace(-7, 4, 80)[:, None]
#: Numbers of comparisons for which ends are computed; those of other numbers are interpolated, and of more than the
#: last the last is used. In terms of normal quantiles an end is a straight line or bends outwards, so that what is
#: interpolated is too wide rather than too narrow.
LEVELS = (1, 2, 3, 5, 10, 20, 100, 10_000, 10_000_000)
_QUANTILES = [-z_quantile(TAIL / level) for level in LEVELS]


def lower_ends(values: np.ndarray, added: float, quantiles: Sequence[float]) -> np.ndarray:
    """Return the lower ends of the mean of independent numbers ``values`` (numbers,) that are at least ``added``, where
    ``quantiles`` are normal ones, below -1, of the probabilities that the mean is lower.

    A bootstrap mean is below c with the probability that a sum of exponential variables with the factors
    ``values - c`` is below 0. The saddlepoint approximation of that (Lugannani and Rice 1980; Barndorff-Nielsen 1986)
    is within 2 % of the end, where 4,000 draws are within 4 %. The saddlepoint s of each c is known in closed form in
    the other direction: a distance d of the tilted distribution below the lowest number gives s and c.
    """
    distinct, counts = np.unique(values, return_counts=True)
    chances = np.asarray(quantiles, dtype=float)
    if len(distinct) == 1:  # exact: the weight of the added number has a beta distribution
        from scipy.special import ndtr  # slow to import, and stored verdicts are read without it

        return np.asarray(distinct[0] + (added - distinct[0]) * (1 - ndtr(chances) ** (1 / len(values))))
    numbers, counts = np.append(distinct, added), np.append(counts, 1.0)
    lowest, distances = numbers.min(), _DISTANCES * np.ptp(numbers)
    gaps = numbers - lowest + distances
    slope = (counts / gaps).sum(1, keepdims=True) / counts.sum()  # minus s
    means = lowest - distances + 1 / slope
    tilted = gaps * slope
    root = -np.sqrt(np.maximum(0.0, 2 * (counts * np.log(tilted)).sum(1)))
    curved = -slope[:, 0] * np.sqrt((counts * ((numbers - means) / tilted) ** 2).sum(1))
    low = root < -1
    at = root[low] + np.log(curved[low] / root[low]) / root[low]
    order = np.argsort(at)
    return np.interp(chances, at[order], means[low, 0][order])


def mean_ends(values: np.ndarray, lowest: float, highest: float, comparisons: float | None = None) -> np.ndarray:
    """Return the lower and the upper ends (2, levels) of the 95 % interval of a mean, for `LEVELS`; with
    ``comparisons`` for this number alone, (2, 1). One added number is ``lowest`` or ``highest``.
    """
    quantiles = _QUANTILES if comparisons is None else [-z_quantile(TAIL / comparisons)]
    return np.stack([lower_ends(values, lowest, quantiles), -lower_ends(-values, -highest, quantiles)])


def end_for(ends: Sequence[float], comparisons: float) -> float:
    """Return the end for a number of comparisons, at least 1, from those for `LEVELS`."""
    return float(np.interp(z_quantile(TAIL / comparisons), [-quantile for quantile in _QUANTILES], ends))
