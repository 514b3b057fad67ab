"""Paired difference of two arms, with interval and test.

A difference per question has a much smaller error than the difference of two accuracies.
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

#: With fewer differing answers the bootstrap has too few distinct values for a reliable interval.
_FEW_DIFFER = 50


@dataclass(frozen=True)
class PairedDifference:
    """Comparison of an arm with its baseline on the same questions.

    Attributes:
        questions: Number of questions.
        baseline: Accuracy of the baseline in percent.
        arm: Accuracy of the arm in percent.
        difference: Arm minus baseline in percentage points.
        low: Lower end of the 95 % interval of the difference in percentage points, by bootstrap; if few answers differ,
            the wider one of bootstrap and score test.
        high: Upper end of that interval.
        gained: Number of questions where the arm is better.
        lost: Number of questions where the arm is worse.
        p_value: Two-sided p-value of McNemar's exact test. The test assumes independent questions; it is too small if
            questions of one text are correlated, and then only the interval is valid.
        retained: Retained ability in a family of recall tasks; None elsewhere.
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
    def can_show_loss(self) -> bool:
        """True if the questions are enough to show a loss.

        The baseline's right answers must be enough, too.
        """
        return self.questions >= LEAST_QUESTIONS and self.baseline >= LEAST_BASELINE

    def among(self, comparisons: int) -> tuple[float, float]:
        """Return the interval widened for ``comparisons`` simultaneous intervals at 95 %.

        Bonferroni's level at the quantile of a normal distribution; both ends move away from the difference by the same
        factor.
        """
        factor = _NORMAL.inv_cdf(1 - TAIL / comparisons) / _Z
        return (
            self.difference - factor * (self.difference - self.low),
            self.difference + factor * (self.high - self.difference),
        )


def _resampled_interval(
    delta: np.ndarray, strata: np.ndarray | None, texts: np.ndarray | None, resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 95 % interval of a mean by bootstrap of texts.

    The mean is that of ``delta`` (questions,); the interval is a percentile interval.

    Each stratum draws n - 1 of its n texts: drawing n would make the variance too small by the factor (n - 1) / n (Rao
    and Wu 1988), which matters in strata with few texts. Strata of one text are pooled.
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
        # (texts, 2): sum of the differences and number of questions of each text.
        drawn = np.stack([np.bincount(inside, delta[members]), np.bincount(inside)], axis=1)
        # Equal texts are interchangeable, so one multinomial draw over distinct rows replaces drawing texts one by one.
        kinds, counts = np.unique(drawn, axis=0, return_counts=True)
        sums = rng.multinomial(max(1, len(drawn) - 1), counts / len(drawn), size=resamples) @ kinds
        total += members.sum() * sums[:, 0] / sums[:, 1]
    low, high = np.quantile(total / count, [TAIL, 1 - TAIL])
    return float(low), float(high)


def _score_interval(gained: int, lost: int, questions: int) -> tuple[float, float]:
    """Return the 95 % interval of Tango's score test (Tango 1998).

    It is the interval of (gained - lost) / questions.

    With few lost questions the bootstrap interval is too narrow: it only resamples the observed losses.
    """

    from scipy.optimize import brentq  # slow to import, and stored verdicts are read without it

    def statistic(difference: float) -> float:
        # Maximum-likelihood share of lost questions, given this difference.
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
    """Return the paired difference of two arms.

    Args:
        baseline_correct: (questions,) 0 to 1 per question.
        arm_correct: (questions,) the same questions in the same order.
        strata: (questions,) task of each question; the bootstrap draws within tasks. None treats all as one task.
        texts: (questions,) number of each question's text within its task; the bootstrap draws whole texts, whose
            questions are correlated. None gives each question its own text.
        resamples: Number of bootstrap resamples.

    Raises:
        VerdictError: No questions, or different lengths.
    """
    from scipy.stats import binomtest  # slow to import, and stored verdicts are read without it

    baseline = np.asarray(baseline_correct, dtype=np.float64)
    arm = np.asarray(arm_correct, dtype=np.float64)
    groupings = [grouping for grouping in (strata, texts) if grouping is not None]
    if baseline.ndim != 1 or baseline.shape != arm.shape or any(len(g) != len(arm) for g in groupings):
        raise VerdictError(f"cannot pair arms with {baseline.size} and {arm.size} answers. Answer the same questions")
    if not baseline.size:
        raise VerdictError("no answers to compare. Run `headscan evaluate` first")
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
