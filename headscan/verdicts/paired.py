"""Paired difference of two arms with interval and test, and the share of recall that is left.

A difference per question has a much smaller error than the difference of two accuracies. Recall is counted above
chance: a model that guesses is right on a quarter of the needles and cannot lose recall.

A cluster is a set of correlated questions, such as those on one text, and clusters are independent. Fields and limits
call it a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, inf, isfinite, log10, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from headscan.errors import VerdictError
from headscan.store.verdict_limits import (
    MARGIN,
    MIN_ABOVE_CHANCE,
    MIN_DOCUMENTS,
    MIN_EVIDENCE_TEXTS,
    POWER,
    TAIL,
    identical_questions,
    z_quantile,
)
from headscan.verdicts.bounds import LEVELS, end_for, mean_ends

#: Shares are clipped to these limits in percent, because a model near chance would make them unbounded.
_MIN_SHARE, _MAX_SHARE = -100.0, 200.0

_DRAWS = 4000
#: Seed of every resampling: the same answers have the same interval.
_SEED = 0


class Interval(NamedTuple):
    """A number with the ends of its 95 % interval, which are infinite if too little was measured."""

    low: float
    value: float
    high: float

    @property
    def known(self) -> bool:
        return isfinite(self.low) and isfinite(self.high)

    def scaled(self, factor: float, offset: float = 0.0) -> Interval:
        """Return the numbers times a positive factor, plus an offset."""
        return Interval(*(offset + factor * number for number in self))

    def stretched(self, factor: float) -> Interval:
        """Return the number with both ends moved away from it by a factor."""
        return Interval(*(self.value + factor * (end - self.value) for end in self))

    def words(self, digits: int = 2, unit: str = "", sign: str = "+") -> str:
        """Return the number with its unit, and its interval if it is known; an empty ``sign`` shows minus only. What is
        rounded to 0 has no minus.
        """
        low, value, high = (f"{number:{sign}z.{digits}f}" for number in self)
        return f"{value}{unit} [{low}, {high}]" if self.known else f"{value}{unit}"


def retained_share(baseline: np.ndarray, arm: np.ndarray, clusters: np.ndarray, chance: float) -> Interval:
    """Return the share of the baseline's ability above chance that an arm retains, in percent: ``clip(100 * (arm -
    chance) / (baseline - chance), -100, 200)`` of the means over clusters. If the baseline is not above chance, the
    number and the upper end are 200, and the lower end is -100.

    The interval is a Bayesian bootstrap of whole clusters with one added cluster: the worst possible for the lower end,
    the best possible for the upper end (Gaffke's bound; arXiv 1905.06208). Identical answers to few questions therefore
    give a wide interval, for any correlation within clusters. If each cluster is retained or lost as a whole, the
    result is Clopper and Pearson's interval. The lower end is at most that of identical answers: gained answers do not
    show that others are kept.

    For example, if of 400 needles in 100 texts the baseline finds 90 % and the arm 85 %, with 25 % by guessing, the arm
    retains ``100 * (85 - 25) / (90 - 25) = 92.3`` %. With all 20 losses in five texts the interval is 83 to 100 %.

    ``baseline`` and ``arm`` are (questions,) of 0 to 1, ``clusters`` (questions,) is the cluster of each question, and
    ``chance`` is in percent.
    """
    cluster = np.unique(clusters, return_inverse=True)[1]
    sizes = np.bincount(cluster)
    # (2, clusters): accuracy of the baseline and of the arm in each cluster, above chance.
    ability = np.stack([np.bincount(cluster, answers) / sizes for answers in (baseline, arm)]) - chance / 100
    weights = _cluster_weights(len(sizes))
    measured, added_weight = weights[:, 1:] @ ability.T, weights[:, :1]
    worst, best = np.array([1.0, 0.0]) - chance / 100, np.array([0.0, 1.0]) - chance / 100
    lows = _shares(measured + added_weight * worst, _MIN_SHARE)
    highs = _shares(measured + added_weight * best, _MAX_SHARE)
    identical = _shares(measured[:, [0, 0]] + added_weight * worst, _MIN_SHARE)
    return Interval(
        value=float(_shares(ability.mean(axis=1)[None], _MAX_SHARE)[0]),
        low=float(min(np.quantile(lows, TAIL), np.quantile(identical, TAIL))),
        high=float(np.quantile(highs, 1 - TAIL)),
    )


@lru_cache(maxsize=8)
def _cluster_weights(clusters: int) -> np.ndarray:
    """Return exponential weights (draws, 1 + clusters): of one added cluster, and of all others."""
    weights = np.random.default_rng(_SEED).standard_exponential((_DRAWS, clusters + 1))
    weights.flags.writeable = False
    return weights


def _shares(ability: np.ndarray, otherwise: float) -> np.ndarray:
    """Return ``clip(100 * arm / baseline, -100, 200)`` for ``ability`` (draws, 2), and ``otherwise`` where the baseline
    is not above 0.
    """
    baseline, arm = ability.T
    able = baseline > 0
    shares = np.full(len(ability), otherwise)
    shares[able] = np.clip(100 * arm[able] / baseline[able], _MIN_SHARE, _MAX_SHARE)
    return shares


_Z = z_quantile(TAIL)


@dataclass(frozen=True)
class PairedDifference:
    """Comparison of an arm with its baseline on the same questions.

    Attributes:
        baseline: Accuracy in percent, as ``arm``.
        difference: Arm minus baseline in percentage points.
        texts: Number of independent clusters of questions: those on one text, such as the two forms of a question, are
            correlated.
        low: Lower end of the 95 % interval of the difference (`bounds`), where one text is the unit and one more text
            is lost whole; ``high`` is the upper end, where one is gained whole.
        lows: Lower ends for the numbers of comparisons in `bounds.LEVELS`; ``highs`` are the upper ends.
        standard_error: Of the difference, from independent texts; 100 with one text.
        gained: Number of questions where the arm is better; ``lost`` where it is worse.
        p_value: Two-sided p-value of McNemar's exact test on texts: one is gained or lost by the sum of its questions'
            differences, because these are correlated.
        texts_differ: Number of texts with an answer that differs.
        documents: Number of documents that the questions are made from; None if it is unknown.
        retained: Retained ability in a family of recall tasks; None elsewhere.
        chance: Accuracy of guessing in percent; None if it is unknown, as for generated answers.
    """

    questions: int
    texts: int
    baseline: float
    arm: float
    difference: float
    low: float
    high: float
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    standard_error: float
    gained: int
    lost: int
    p_value: float
    texts_differ: int
    documents: int | None = None
    retained: Interval | None = None
    chance: float | None = None

    @property
    def interval(self) -> Interval:
        return Interval(self.low, self.difference, self.high)

    @property
    def above_chance(self) -> bool:
        """True if the baseline is at least `MIN_ABOVE_CHANCE` points above chance, and `wilson_low` exceeds chance;
        unknown chance counts as 0.
        """
        chance = self.chance or 0.0
        by_chance = 100 * wilson_low(round(self.baseline / 100 * self.texts), self.texts) <= chance
        return self.baseline - chance >= MIN_ABOVE_CHANCE and not (chance and by_chance)

    def shows_loss(self, max_points: float = MARGIN) -> bool:
        """Return True if a loss of more than ``max_points`` points is shown."""
        return shows_loss(self.high, self.texts, max_points)

    def shows_safety(self, max_points: float = MARGIN) -> bool:
        """Return True if no loss of more than ``max_points`` points is possible, in the 95 % interval."""
        return self.low > -max_points

    def questions_needed(self, comparisons: float = 1, max_points: float = MARGIN) -> int:
        """Return the number of questions that would show an arm without loss to be safe, in four of five cases.
        The number may be smaller than `questions`.

        The arm is assumed to change its answers as much as this one, in both directions alike: the more it changes, the
        more questions are needed. For example, with one question per text and one comparison, an arm that changes 10 %
        of the answers needs about 8,200.
        """
        variance = self.texts * (self.standard_error / 100) ** 2
        return ceil(enough_questions(variance, comparisons, max_points) * self.questions / self.texts)

    def chance_of_safety(self, comparisons: float = 1, max_points: float = MARGIN) -> float:
        """Return the probability, 0 to 1, that `questions_needed` new questions show safety if the estimate is true."""
        return _chance_of_safety(self.difference, comparisons, max_points)

    def simultaneous_interval(self, comparisons: float) -> Interval:
        """Return the interval for ``comparisons`` simultaneous ones at 95 % (Bonferroni)."""
        return Interval(end_for(self.lows, comparisons), self.difference, end_for(self.highs, comparisons))


def enough_questions(changed: float, comparisons: float = 1, max_points: float = MARGIN) -> int:
    """Return the number of questions with which the lower end of an arm without loss is above ``-max_points`` with the
    probability `POWER`: ``((z(1 - TAIL / comparisons) + z(POWER)) * 100 / max_points)**2 * changed`` (non-inferiority
    of paired proportions: Liu et al. 2002), 78,500 times ``changed`` for one comparison and one point, and
    `identical_questions` for the added text that the bound loses. ``changed`` is the share of the answers that the arm
    changes, 0 to 1, or the variance of a question's difference.
    """
    sampled = _of_all_changed(comparisons, max_points) * changed
    return ceil(sampled - 1e-9) + identical_questions(comparisons, max_points)


def shown_change(questions: int, comparisons: float = 1, max_points: float = MARGIN) -> float:
    """Return the largest ``changed`` for which `enough_questions` are at most ``questions``; negative if identical
    answers to these are not shown to be safe.
    """
    spare = questions - identical_questions(comparisons, max_points)
    return spare / _of_all_changed(comparisons, max_points)


def _of_all_changed(comparisons: float, max_points: float) -> float:
    return ((z_quantile(TAIL / comparisons) + z_quantile(1 - POWER)) * 100 / max_points) ** 2


def _chance_of_safety(difference: float, comparisons: float, max_points: float) -> float:
    quantile = z_quantile(TAIL / comparisons)
    spare = 1 + min(0.0, difference) / max_points
    return NormalDist().cdf((quantile + z_quantile(1 - POWER)) * spare - quantile)


def about(number: float) -> str:
    """Return a number of questions in words, rounded up to two significant digits."""
    unit = 10 ** max(0, floor(log10(number)) - 1)
    return f"{ceil(number / unit - 1e-9) * unit:,}"


def shows_loss(high: float, clusters: int, max_points: float = MARGIN) -> bool:
    """Return True if an upper end, in points, is below ``-max_points`` on at least `MIN_EVIDENCE_TEXTS` clusters."""
    return high < -max_points and clusters >= MIN_EVIDENCE_TEXTS


@lru_cache(maxsize=1 << 12)
def t_quantile(tail: float, freedom: int) -> float:
    """Return the quantile of Student's t with the probability ``tail`` beyond it."""
    from scipy.special import stdtrit  # takes a tenth of a second to import, and not every verb needs it

    return float(stdtrit(freedom, 1 - tail))


def wilson_low(right: int, questions: int) -> float:
    """Return the lower end of Wilson's 95 % interval of ``right / questions``, 0 to 1."""
    share = right / questions
    centre = share + _Z**2 / (2 * questions)
    half = _Z * sqrt(share * (1 - share) / questions + _Z**2 / (4 * questions**2))
    return max(0.0, (centre - half) / (1 + _Z**2 / questions))


class QuestionClusters:
    """How questions fall into clusters, which is the same for every arm.

    Args:
        strata: (questions,) task of each question; None treats all as one task.
        clusters: (questions,) number of each question's cluster within its task, such as its text, whose questions are
            correlated. None makes each question a cluster.
        documents: (questions,) number of the document that each question is made from; None if they are unknown.

    Attributes:
        cluster: (questions,) index of the cluster of each question.
        sizes: (clusters,) number of questions of each cluster.
    """

    def __init__(
        self,
        count: int,
        strata: np.ndarray | None = None,
        clusters: np.ndarray | None = None,
        documents: np.ndarray | None = None,
    ) -> None:
        for grouping in (strata, clusters, documents):
            if grouping is not None and len(grouping) != count:
                raise VerdictError(
                    f"cannot pair {count} answers with the tasks or texts of {len(grouping)} questions. Name one for"
                    " each question"
                )
        self.count = count
        if clusters is None:
            self.cluster = np.arange(count)
        else:
            stratum = np.zeros(count, int) if strata is None else np.unique(strata, return_inverse=True)[1]
            numbers = np.unique(clusters, return_inverse=True)[1]
            self.cluster = np.unique(stratum * count + numbers, return_inverse=True)[1]
        self.sizes = np.bincount(self.cluster)
        self.documents = None if documents is None else QuestionClusters(count, clusters=documents)

    def linearised(self, delta: np.ndarray) -> np.ndarray:
        """Return one number per cluster (clusters,) whose mean and spread are those of the mean of ``delta``
        (questions,). If all clusters have one size, the number is the cluster's mean; a larger one counts for more.
        """
        mean, size = delta.mean(), self.sizes.mean()
        sums = np.bincount(self.cluster, delta)
        return np.asarray(mean + (sums - mean * self.sizes) / size).round(12)  # sums of credit leave a rounding error

    def standard_error(self, delta: np.ndarray) -> float:
        """Return the standard error of the mean of differences (questions,); infinite with one cluster."""
        count = len(self.sizes)
        return float(self.linearised(delta).std(ddof=1)) / sqrt(count) if count > 1 else inf


@lru_cache(maxsize=1 << 14)
def _mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test. For a share of one half, the value of
    `scipy.stats.binomtest` is the sum of both tails.
    """
    from scipy.stats import binom  # slow to import, and stored verdicts are read without it

    if gained == lost:
        return 1.0
    fewer, differ = min(gained, lost), gained + lost
    return min(1.0, float(binom.cdf(fewer, differ, 0.5) + binom.sf(differ - fewer - 1, differ, 0.5)))


def paired_difference(
    baseline_correct: np.ndarray, arm_correct: np.ndarray, clusters: QuestionClusters
) -> PairedDifference:
    """Return the paired difference of two arms, (questions,) of 0 to 1 in the same order. Many arms share one
    ``clusters``. Of questions that are made from at least `MIN_DOCUMENTS` documents, Student's t over documents counts
    where it is wider: documents that differ in what they lose are fewer than their questions.

    Of 400 questions, a baseline answers 300 right, and an arm loses 8 of these and gains 2 others. The difference is
    ``100 * (2 - 8) / 400 = -1.5`` points. Its standard error is ``100 * sqrt((10 / 400 - 0.015**2) / 399) = 0.79``
    points; the interval is -3.51 to 0.30, because one more question may be lost, or gained.
    """
    baseline = np.asarray(baseline_correct, dtype=np.float64)
    arm = np.asarray(arm_correct, dtype=np.float64)
    if baseline.ndim != 1 or baseline.shape != arm.shape or len(arm) != clusters.count:
        raise VerdictError(f"cannot pair arms with {baseline.size} and {arm.size} answers. Answer the same questions")
    if not baseline.size:
        raise VerdictError("no answers to compare. Run `headscan evaluate` first")
    delta = arm - baseline
    texts = len(clusters.sizes)
    changes = clusters.linearised(delta)
    difference, largest = float(delta.mean()), clusters.sizes.max() / clusters.sizes.mean()
    # The added text is as large as the largest, and it is lost or gained whole.
    lows, highs = mean_ends(changes, *(difference + largest * (end - difference) for end in (-1.0, 1.0)))
    error = clusters.standard_error(delta)
    documents = None if clusters.documents is None else len(clusters.documents.sizes)
    if clusters.documents is not None and documents is not None and documents >= MIN_DOCUMENTS:
        of_documents = clusters.documents.standard_error(delta)
        error = max(error, of_documents)
        halves = of_documents * np.array([t_quantile(TAIL / level, documents - 1) for level in LEVELS])
        lows, highs = np.minimum(lows, difference - halves), np.maximum(highs, difference + halves)
    lows, highs = (100 * ends.clip(-1, 1) for ends in (lows, highs))
    # Sums of partial credit that cancel leave a rounding error.
    cluster_changes = np.bincount(clusters.cluster, delta).round(12)
    return PairedDifference(
        questions=len(delta),
        texts=texts,
        baseline=100 * float(baseline.mean()),
        arm=100 * float(arm.mean()),
        difference=100 * difference,
        low=float(lows[0]),
        high=float(highs[0]),
        lows=tuple(lows.tolist()),
        highs=tuple(highs.tolist()),
        standard_error=min(100.0, 100 * error),
        gained=int((delta > 0).sum()),
        lost=int((delta < 0).sum()),
        p_value=_mcnemar(int((cluster_changes > 0).sum()), int((cluster_changes < 0).sum())),
        texts_differ=int(np.count_nonzero(np.bincount(clusters.cluster, delta != 0))),
        documents=documents,
    )
