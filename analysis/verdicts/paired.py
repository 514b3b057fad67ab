"""The difference of two arms on the same questions, with its interval and its test.

The difference is taken per question: far sharper than two accuracies with their own errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from headscan.analysis.errors import VerdictError
from headscan.analysis.verdict_limits import LEAST_BASELINE, LEAST_QUESTIONS, TAIL

if TYPE_CHECKING:
    from headscan.analysis.verdicts.retention import Retained

_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(1 - TAIL)

#: Where fewer answers differ, the bootstrap knows too few kinds of them to tell how far chance may go.
_FEW_DIFFER = 50


@dataclass(frozen=True)
class PairedDifference:
    """An arm against its baseline on the same questions.

    Attributes:
        questions: How many.
        baseline: Accuracy of the baseline in percent.
        arm: Accuracy of the arm in percent.
        difference: Arm minus baseline in percentage points.
        low: Lower end of the 95 % interval of the difference: bootstrap's or, where few answers
            differ and that is wider, the score test's.
        high: Upper end, likewise.
        gained: Questions where the arm does better.
        lost: Questions where it does worse.
        p_value: Two-sided, McNemar's exact test. It takes questions for independent: where those of one text hang
            together it is too small, and the interval is what to go by.
        retained: Ability that the arm retains, for a family of recall tasks; None elsewhere.
    """

    questions: int
    baseline: float
    arm: float
    difference: float
    low: float
    high: float
    gained: int
    lost: int
    p_value: float
    retained: Retained | None = None

    @property
    def tells(self) -> bool:
        """Whether there were questions enough, and the baseline right on enough of them, for a loss to show."""
        return self.questions >= LEAST_QUESTIONS and self.baseline >= LEAST_BASELINE

    def among(self, comparisons: int) -> tuple[float, float]:
        """Return the interval widened so that all of ``comparisons`` such intervals hold together in 95 % of cases.

        Bonferroni's level, at the quantile of a normal distribution: each end moves away from the difference in
        proportion.
        """
        factor = _NORMAL.inv_cdf(1 - TAIL / comparisons) / _Z
        return (
            self.difference - factor * (self.difference - self.low),
            self.difference + factor * (self.high - self.difference),
        )


def _resampled_interval(
    delta: np.ndarray, strata: np.ndarray | None, texts: np.ndarray | None, resamples: int, seed: int
) -> tuple[float, float]:
    """95 % percentile interval of the mean of ``delta`` (questions,): inside each stratum whole texts are drawn.

    Of n texts n - 1 are drawn, which gives the mean the spread that it has: n would give too little, by a factor of
    (n - 1) / n in variance (Rao and Wu 1988), much where a stratum has few texts. Those of one text are taken together.
    """
    rng = np.random.default_rng(seed)
    count = len(delta)
    groups = np.zeros(count, int) if strata is None else np.unique(strata, return_inverse=True)[1]
    numbers = np.arange(count) if texts is None else np.unique(texts, return_inverse=True)[1]
    distinct, text = np.unique(groups * count + numbers, return_inverse=True)
    groups = np.where((np.bincount(distinct // count) == 1)[groups], -1, groups)
    total = np.zeros(resamples)
    for group in np.unique(groups):
        members = groups == group
        inside = np.unique(text[members], return_inverse=True)[1]
        # Of each text: the sum of its differences, and its questions.
        drawn = np.stack([np.bincount(inside, delta[members]), np.bincount(inside)], axis=1)
        # A resample is fully described by how often each distinct text was drawn: single questions that are right or
        # wrong are of three kinds.
        kinds, counts = np.unique(drawn, axis=0, return_counts=True)
        sums = rng.multinomial(max(1, len(drawn) - 1), counts / len(drawn), size=resamples) @ kinds
        total += members.sum() * sums[:, 0] / sums[:, 1]
    low, high = np.quantile(total / count, [TAIL, 1 - TAIL])
    return float(low), float(high)


def _score_interval(gained: int, lost: int, questions: int) -> tuple[float, float]:
    """95 % interval of (gained - lost) / questions by the score test of paired proportions (Tango 1998).

    One lost question makes four in a resample one time in fifty; the truth may be four far more easily.
    """

    from scipy.optimize import brentq  # slow to import, and stored verdicts are read without it

    def statistic(difference: float) -> float:
        # The likeliest share of lost questions, were the difference this one.
        linear = (2 * questions - gained + lost) * difference - gained - lost
        constant = -lost * difference * (1 - difference)
        share = (sqrt(max(0.0, linear**2 - 8 * questions * constant)) - linear) / (4 * questions)
        variance = questions * (2 * share + difference * (1 - difference))
        return (gained - lost - questions * difference) / sqrt(variance) if variance > 0 else 0.0

    found = (gained - lost) / questions
    edge = 1 - 1e-9
    low = brentq(lambda d: statistic(d) - _Z, -edge, found) if found > -edge and statistic(-edge) > _Z else -1.0
    high = brentq(lambda d: statistic(d) + _Z, found, edge) if found < edge and statistic(edge) < -_Z else 1.0
    return float(low), float(high)


def compare(
    baseline_correct: np.ndarray,
    arm_correct: np.ndarray,
    strata: np.ndarray | None = None,
    texts: np.ndarray | None = None,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> PairedDifference:
    """The paired difference of two arms.

    Args:
        baseline_correct: (questions,) 0 to 1 per question.
        arm_correct: (questions,) the same questions in the same order.
        strata: (questions,) the task of each; the bootstrap draws inside each task. None: one task.
        texts: (questions,) the text of each, a number in its task: questions of one text hang together, so the
            bootstrap draws texts. None: each has its own.
        resamples: Bootstrap resamples.

    Raises:
        VerdictError: No questions, or lengths that differ.
    """
    from scipy.stats import binomtest  # slow to import, and stored verdicts are read without it

    baseline = np.asarray(baseline_correct, dtype=np.float64)
    arm = np.asarray(arm_correct, dtype=np.float64)
    groupings = [grouping for grouping in (strata, texts) if grouping is not None]
    if baseline.ndim != 1 or baseline.shape != arm.shape or any(len(g) != len(arm) for g in groupings):
        raise VerdictError(f"arms of {baseline.size} and {arm.size} answers cannot be paired: answer the same ones")
    if not baseline.size:
        raise VerdictError("there are no answers to compare: run `headscan evaluate` first")
    delta = arm - baseline
    gained, lost = int((delta > 0).sum()), int((delta < 0).sum())
    low, high = _resampled_interval(delta, strata, texts, resamples, seed)
    if gained + lost < _FEW_DIFFER and np.isin(delta, (-1.0, 0.0, 1.0)).all():
        by_score = _score_interval(gained, lost, len(delta))
        low, high = min(low, by_score[0]), max(high, by_score[1])
    return PairedDifference(
        questions=len(delta),
        baseline=100 * float(baseline.mean()),
        arm=100 * float(arm.mean()),
        difference=100 * float(delta.mean()),
        low=100 * low,
        high=100 * high,
        gained=gained,
        lost=lost,
        p_value=float(binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0,
    )
