"""Planned looks: how many questions a study has asked when it reads the answers, and how wide intervals are then.

Answers that are read several times err more often than those that are read once, so the looks are planned before the
first question, and their intervals are widened so that all of them together err in 2.5 %. Recall comes first, without
other questions. Up to the questions of the first hours the error is spent as by O'Brien and Fleming (Biometrics 1979;
spending function of Lan and DeMets, Biometrika 1983): hardly any of it early. If later hours may ask more, this takes
half of the error, and every doubling of the questions takes an equal part of the other half. A look that does not take
place costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from headscan.store.verdict_limits import TAIL, z_quantile

#: Looks at the questions of the first hours; and doublings up to all questions if the first hours ask none, so that no
#: error is spent on looks that are too small to show anything.
_LOOKS, _DOUBLINGS = 4, 2
#: Chance, 0 to 1, of being shown safe at the last look if the estimate is true, below which an arm is asked no more.
_HOPELESS = 0.01
#: Fewest questions that can end an arm so: of fewer, the estimate and its error vary too much.
_LEAST = 100
#: Step and half width of the grid of `spent_quantiles`, in standard errors of the last look.
_STEP, _REACH = 0.005, 9.0


class Look(NamedTuple):
    """A planned look.

    Attributes:
        questions: Benchmark questions that are asked by then.
        recall: Recall questions of each task that are asked by then.
        comparisons: Number of comparisons for which intervals are widened, so that all looks hold together; at least
            the number of kinds of savings.
        recall_comparisons: The same in recall, whose answers change at fewer looks.
    """

    questions: int
    recall: int
    comparisons: float
    recall_comparisons: float


def planned_looks(first: tuple[int, int], last: tuple[int, int], kinds: int = 1) -> tuple[Look, ...]:
    """Return the looks up to the numbers of benchmark and of recall questions of the first hours, and up to the largest
    ones, for several kinds of savings, which divide the error. All recall questions of the first hours are asked at the
    first look, and all others at the first one after the questions of the first hours.
    """
    alpha, later = TAIL / kinds, last[0] > first[0]
    counts, spent = list[int](), list[float]()
    if first[0]:
        counts = sorted({first[0] * look // _LOOKS for look in range(1, _LOOKS + 1)} - {0})
        spent = [_early(count / first[0], alpha / 2 if later else alpha) for count in counts]
    if later:
        start = first[0] or last[0] / 2 ** (_DOUBLINGS + 1)
        doubled = (start * 2**times for times in range(1, 40))
        more = [*sorted({int(count) for count in doubled if 1 <= count <= last[0] / 1.5}), last[0]]
        left = alpha - (spent[-1] if spent else 0.0)
        spent += [alpha - left * (1 - log(count / start) / log(last[0] / start)) for count in more]
        counts += more
    recall_comparisons = float(kinds * (2 if later and 0 < first[1] < last[1] else 1))
    looks = [Look(0, first[1], float(kinds), recall_comparisons)] if first[1] else []
    for count, quantile in zip(counts, spent_quantiles([count / last[0] for count in counts], spent), strict=True):
        comparisons = max(float(kinds), TAIL / (1 - NormalDist().cdf(quantile)))
        looks.append(Look(count, first[1] if count <= first[0] else last[1], comparisons, recall_comparisons))
    return tuple(looks)


def _early(share: float, alpha: float) -> float:
    """Return the error that is spent when a share of the questions, 0 to 1, is asked; ``alpha`` at the end."""
    return 2 * (1 - NormalDist().cdf(z_quantile(alpha / 2) / sqrt(share)))


def spent_quantiles(times: Sequence[float], spent: Sequence[float]) -> list[float]:
    """Return the normal quantile of each look with which the error ``spent`` (cumulative) is not exceeded, for sums
    whose variances are in proportion to ``times``, the last of which is 1.

    Armitage, McPherson and Rowe (1969): the density of sums that have not crossed a bound yet is carried from look to
    look on a grid.
    """
    half = round(_REACH / _STEP)
    sums = _STEP * np.arange(-half, half + 1)
    density, quantiles, before, then = np.zeros_like(sums), list[float](), 0.0, 0.0
    for time, error in zip(times, spent, strict=True):
        normal = np.exp(-(sums**2) / (2 * (time - then))) / sqrt(2 * np.pi * (time - then))
        density = normal if then == 0 else np.convolve(density, normal * _STEP, mode="same")
        above = (np.cumsum(density[::-1])[::-1] - density / 2) * _STEP
        bound = np.interp(-log(error - before), -np.log(np.maximum(above, 1e-300)), sums)
        density = np.where(sums < bound, density, 0.0)
        quantiles.append(float(bound) / sqrt(time))
        before, then = error, time
    return quantiles


def is_hopeless(difference: float, standard_error: float, looks: Sequence[Look], asked: int, max_points: float) -> bool:
    """Return True if an arm would hardly be shown safe at the last look, if its estimate is true.

    Args:
        difference: Estimate, in percentage points, on the first ``asked`` questions of the looks.
        standard_error: Its standard error, in percentage points.
    """
    last = looks[-1]
    left = 1 - asked / last.questions
    if left <= 0 or asked < _LEAST:
        return False
    at_the_end = standard_error * sqrt(asked / last.questions)
    spare = difference + max_points - z_quantile(TAIL / last.comparisons) * at_the_end
    return spare < -z_quantile(_HOPELESS) * at_the_end * sqrt(left)
