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
from typing import NamedTuple

import numpy as np

from headscan.errors import VerdictError
from headscan.store.verdict_limits import (
    FEW_DIFFER,
    MARGIN,
    MIN_ABOVE_CHANCE,
    MIN_EVIDENCE_TEXTS,
    MIN_SAFE_TEXTS,
    POWER,
    TAIL,
    identical_questions,
    z_quantile,
)

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
        low: Lower end of the 95 % interval of the difference: the wider one of Student's t and of a bootstrap with t
            quantiles; if few answers differ, the score test counts if it is wider.
        gained: Number of questions where the arm is better; ``lost`` where it is worse.
        p_value: Two-sided p-value of McNemar's exact test on texts: one is gained or lost by the sum of its questions'
            differences, because these are correlated.
        texts_differ: Number of texts with an answer that differs.
        degrees_of_freedom: Of the interval, at least 1: Satterthwaite's; with one stratum ``texts - 1``.
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
    gained: int
    lost: int
    p_value: float
    texts_differ: int
    degrees_of_freedom: int
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

    @property
    def can_show_safety(self) -> bool:
        """True if so many texts, with as many right answers of the baseline, could show that nothing is lost: with
        `MIN_SAFE_TEXTS` texts, answers that do not differ do.
        """
        return self.texts >= MIN_SAFE_TEXTS and self.above_chance

    @property
    def shows_loss(self) -> bool:
        """True if a loss of more than one point is shown."""
        return shows_loss(self.high, self.texts)

    @property
    def few_differ(self) -> bool:
        """True if so few texts differ that they are rare events."""
        return few_differ(self.texts_differ)

    def questions_needed(self, comparisons: int = 1) -> int:
        """Return the number of questions that would show an arm without loss to be safe, in four of five cases.
        The number may be smaller than `questions`.

        The arm is assumed to change as many answers as this one, in both directions alike: the more it changes, the
        more questions are needed. For example, with one question per text and one comparison, an arm that changes 10 %
        of the answers needs about 7,850. With ``comparisons`` above 1, this difference must have the interval of
        `simultaneous_interval`.
        """
        # The interval also counts partial credit and correlated questions, but its width is uncertain if few differ.
        variance = (self.gained + self.lost) / self.questions
        if not self.few_differ:
            error = (self.high - self.low) / 2 / t_quantile(TAIL / comparisons, self.degrees_of_freedom)
            variance = self.texts * (error / 100) ** 2
        return ceil(enough_questions(variance, comparisons) * self.questions / self.texts)

    def simultaneous_interval(self, comparisons: int) -> Interval:
        """Return the interval widened for ``comparisons`` simultaneous ones at 95 % (Bonferroni, by Student's t)."""
        freedom = self.degrees_of_freedom
        return self.interval.stretched(t_quantile(TAIL / comparisons, freedom) / t_quantile(TAIL, freedom))


def few_differ(differing_clusters: float) -> bool:
    """Return True if a number of differing clusters is so small that they are rare events."""
    return differing_clusters < FEW_DIFFER


def enough_questions(changed: float, comparisons: int = 1) -> int:
    """Return the number of questions with which the lower end of an arm without loss is above the margin with the
    probability `POWER`: ``((z(1 - TAIL / comparisons) + z(POWER)) * 100 / MARGIN)**2 * changed`` (non-inferiority of
    paired proportions: Liu et al. 2002), 78,500 times ``changed`` for one comparison. If few answers differ, the score
    interval is wider, and `identical_questions` are added. ``changed`` is the share of the answers that the arm
    changes, 0 to 1, or the variance of a question's difference.
    """
    questions = ((z_quantile(TAIL / comparisons) + z_quantile(1 - POWER)) * 100 / MARGIN) ** 2 * changed
    if few_differ(changed * questions):
        questions += identical_questions(comparisons)
    return ceil(questions - 1e-9)


def about(number: float) -> str:
    """Return a number of questions in words, rounded up to two significant digits."""
    unit = 10 ** max(0, floor(log10(number)) - 1)
    return f"{ceil(number / unit - 1e-9) * unit:,}"


def shows_loss(high: float, clusters: int) -> bool:
    """Return True if an upper end, in points, is below -`MARGIN` on at least `MIN_EVIDENCE_TEXTS` clusters."""
    return high < -MARGIN and clusters >= MIN_EVIDENCE_TEXTS


def wilson_low(right: int, questions: int) -> float:
    """Return the lower end of Wilson's 95 % interval of ``right / questions``, 0 to 1."""
    share = right / questions
    centre = share + _Z**2 / (2 * questions)
    half = _Z * sqrt(share * (1 - share) / questions + _Z**2 / (4 * questions**2))
    return max(0.0, (centre - half) / (1 + _Z**2 / questions))


@lru_cache(maxsize=1 << 12)
def t_quantile(tail: float, freedom: int) -> float:
    """Return the quantile of Student's t with the probability ``tail`` beyond it."""
    from scipy.special import stdtrit  # takes a tenth of a second to import, and not every verb needs it

    return float(stdtrit(freedom, 1 - tail))


class _Stratum(NamedTuple):
    """Differences of one stratum: ``clusters`` (clusters, 2) holds each one's sum of differences and number of
    questions.
    """

    clusters: np.ndarray
    questions: int

    @property
    def variance(self) -> float:
        """Variance of the sum of the differences, linearised for clusters of different sizes."""
        count, (total, questions) = len(self.clusters), self.clusters.sum(axis=0)
        residuals = self.clusters[:, 0] - total / questions * self.clusters[:, 1]
        return float((residuals**2).sum()) * count / (count - 1)


class QuestionClusters:
    """How questions fall into strata and clusters, which is the same for every arm.

    Args:
        strata: (questions,) task of each question; the bootstrap draws within tasks. None treats all as one task.
        clusters: (questions,) number of each question's cluster within its task, such as its text; the bootstrap draws
            whole clusters, whose questions are correlated. None makes each question a cluster.

    Attributes:
        cluster: (questions,) index of the cluster of each question.
        sizes: (clusters,) number of questions of each cluster.
    """

    def __init__(self, count: int, strata: np.ndarray | None = None, clusters: np.ndarray | None = None) -> None:
        for grouping in (strata, clusters):
            if grouping is not None and len(grouping) != count:
                raise VerdictError(
                    f"cannot pair {count} answers with the tasks or texts of {len(grouping)} questions. Name one for"
                    " each question"
                )
        self.count = count
        stratum = np.zeros(count, int) if strata is None else np.unique(strata, return_inverse=True)[1]
        numbers = np.arange(count) if clusters is None else np.unique(clusters, return_inverse=True)[1]
        distinct, cluster = np.unique(stratum * count + numbers, return_inverse=True)
        self.cluster, self.sizes = cluster, np.bincount(cluster)
        # Strata of one cluster are pooled; a single one joins the largest.
        stratum_sizes = np.bincount(distinct // max(1, count))
        alone = stratum_sizes == 1
        pool = int(stratum_sizes.argmax()) if alone.sum() == 1 else -1
        stratum = np.where(alone[stratum], pool, stratum)
        # Of each stratum: its questions by index, the cluster of each, and the number of questions of each cluster.
        self._members: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for number in np.unique(stratum):
            members = np.flatnonzero(stratum == number)
            member_cluster = np.unique(cluster[members], return_inverse=True)[1]
            self._members.append((members, member_cluster, np.bincount(member_cluster)))

    def strata(self, delta: np.ndarray) -> list[_Stratum]:
        """Return the strata of differences (questions,)."""
        return [
            _Stratum(np.stack([np.bincount(cluster, delta[questions]), sizes], axis=1), len(questions))
            for questions, cluster, sizes in self._members
        ]

    def standard_error(self, delta: np.ndarray) -> float:
        """Return the standard error of the mean of differences (questions,); infinite with one cluster."""
        strata = self.strata(delta)
        if any(len(stratum.clusters) < 2 for stratum in strata):
            return inf
        return sqrt(sum(stratum.variance for stratum in strata)) / self.count


def resampled_interval(strata: list[_Stratum], resamples: int) -> tuple[float, float, int]:
    """Return the 95 % interval of a mean and its degrees of freedom. Each end is the wider one of Student's t and of a
    bootstrap of clusters.

    A percentile interval is too narrow with few clusters: of two it holds the mean in half of the cases. Its ends are
    therefore moved out by the ratio of the t quantile to the normal one, and the t interval counts where it is wider.
    The degrees of freedom are Satterthwaite's. The mean of one cluster has no interval but -1 to 1.
    """
    count = sum(stratum.questions for stratum in strata)
    observed = sum(stratum.clusters[:, 0].sum() for stratum in strata) / count
    if any(len(stratum.clusters) < 2 for stratum in strata):  # there is one cluster in all
        return -1.0, 1.0, 1
    freedoms = np.array([len(stratum.clusters) - 1 for stratum in strata])
    variances = np.array([stratum.variance for stratum in strata])
    freedom = variances.sum() ** 2 / (variances**2 / freedoms).sum() if variances.any() else freedoms.sum()
    whole_freedom = max(1, floor(freedom + 1e-9))  # one stratum has exactly its own, in spite of rounding
    quantile = t_quantile(TAIL, whole_freedom)
    half = quantile * sqrt(variances.sum()) / count
    low, high = percentiles(tuple(_cluster_counts(stratum) for stratum in strata), resamples)
    t_to_normal = quantile / _Z
    below, above = max(half, t_to_normal * (observed - low)), max(half, t_to_normal * (high - observed))
    return float(max(-1.0, observed - below)), float(min(1.0, observed + above)), whole_freedom


class _ClusterCounts(NamedTuple):
    """The distinct clusters of a stratum, each a sum of differences and a number of questions, and how many there are
    of each. Equal ones are interchangeable, so one multinomial draw over these replaces drawing them one by one.
    """

    kinds: tuple[tuple[float, float], ...]
    counts: tuple[int, ...]
    questions: int


def _cluster_counts(stratum: _Stratum) -> _ClusterCounts:
    clusters = stratum.clusters
    if (clusters[:, 1] == 1).all():
        # np.unique is far faster on one column.
        values, counts = np.unique(clusters[:, 0], return_counts=True)
        kinds = tuple((value, 1.0) for value in values.tolist())
    else:
        rows, counts = np.unique(clusters, axis=0, return_counts=True)
        kinds = tuple(map(tuple, rows.tolist()))
    return _ClusterCounts(kinds, tuple(counts.tolist()), stratum.questions)


@lru_cache(maxsize=1 << 14)
def percentiles(strata: tuple[_ClusterCounts, ...], resamples: int) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of a mean over bootstrap samples.

    Each stratum draws n - 1 of its n clusters: drawing n would make the variance too small by the factor (n - 1) / n
    (Rao and Wu 1988), which matters in strata with few clusters.
    """
    rng = np.random.default_rng(_SEED)
    total = np.zeros(resamples)
    for stratum in strata:
        clusters = sum(stratum.counts)
        shares = np.array(stratum.counts) / clusters
        sums = rng.multinomial(clusters - 1, shares, size=resamples) @ np.array(stratum.kinds)
        total += stratum.questions * sums[:, 0] / sums[:, 1]
    low, high = np.quantile(total / sum(stratum.questions for stratum in strata), [TAIL, 1 - TAIL])
    return float(low), float(high)


def _rare_low(delta: np.ndarray, clusters: QuestionClusters) -> float:
    """Return the lower end of the score interval of the mean of ``delta`` (questions,), -1 to 1, by clusters.

    The unit is the largest cluster, gained or lost as a whole: what few clusters show is not more certain if each is
    asked in two forms. A smaller cluster, a part of one, or partial credit counts as that fraction of a unit. Fractions
    make the interval wider than necessary, because their variance is smaller than that of whole units with the same
    mean.
    """
    changes = np.bincount(clusters.cluster, delta) / clusters.sizes.max()
    gained, lost = float(changes[changes > 0].sum()), float(-changes[changes < 0].sum())
    return score_interval(gained, lost, clusters.count / int(clusters.sizes.max()))[0]


@lru_cache(maxsize=1 << 14)
def score_interval(gained: float, lost: float, questions: float) -> tuple[float, float]:
    """Return the 95 % interval of (gained - lost) / questions by Tango's score test (Tango 1998).

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

    observed = (gained - lost) / questions
    edge = 1 - 1e-9
    low = brentq(lambda d: statistic(d) - _Z, -edge, observed) if observed > -edge and statistic(-edge) > _Z else -1.0
    high = brentq(lambda d: statistic(d) + _Z, observed, edge) if observed < edge and statistic(edge) < -_Z else 1.0
    return float(low), float(high)


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
    baseline_correct: np.ndarray, arm_correct: np.ndarray, clusters: QuestionClusters, *, resamples: int = 2000
) -> PairedDifference:
    """Return the paired difference of two arms, (questions,) of 0 to 1 in the same order. Many arms share one
    ``clusters``.

    Of 400 questions, a baseline answers 300 right, and an arm loses 8 of these and gains 2 others. The difference is
    ``100 * (2 - 8) / 400 = -1.5`` points. Its standard error is ``100 * sqrt((10 / 400 - 0.015**2) / 399) = 0.79``
    points, so Student's t gives -3.05 to 0.05; as only 10 answers differ, the score interval counts where it is wider,
    -3.46 to 0.06.
    """
    baseline = np.asarray(baseline_correct, dtype=np.float64)
    arm = np.asarray(arm_correct, dtype=np.float64)
    if baseline.ndim != 1 or baseline.shape != arm.shape or len(arm) != clusters.count:
        raise VerdictError(f"cannot pair arms with {baseline.size} and {arm.size} answers. Answer the same questions")
    if not baseline.size:
        raise VerdictError("no answers to compare. Run `headscan evaluate` first")
    delta = arm - baseline
    gained, lost = int((delta > 0).sum()), int((delta < 0).sum())
    # Sums of partial credit that cancel leave a rounding error.
    cluster_changes = np.bincount(clusters.cluster, delta).round(12)
    low, high, freedom = resampled_interval(clusters.strata(delta), resamples)
    differing_clusters = int(np.count_nonzero(np.bincount(clusters.cluster, delta != 0)))
    without_credit = bool(((delta == 0) | (np.abs(delta) == 1)).all())
    # Partial credit that differs on most clusters is no rare event: differences have many values, however few they are.
    if few_differ(differing_clusters) and (without_credit or 2 * differing_clusters <= len(clusters.sizes)):
        low = min(low, _rare_low(delta, clusters))
    # The bootstrap's upper end is wide enough for correlated questions and for partial credit: losses that few
    # clusters hide only lower it.
    if few_differ(differing_clusters) and without_credit:
        high = max(high, score_interval(gained, lost, len(delta))[1])
    return PairedDifference(
        questions=len(delta),
        texts=len(clusters.sizes),
        baseline=100 * float(baseline.mean()),
        arm=100 * float(arm.mean()),
        difference=100 * float(delta.mean()),
        low=100 * low,
        high=100 * high,
        gained=gained,
        lost=lost,
        p_value=_mcnemar(int((cluster_changes > 0).sum()), int((cluster_changes < 0).sum())),
        texts_differ=differing_clusters,
        degrees_of_freedom=freedom,
    )
