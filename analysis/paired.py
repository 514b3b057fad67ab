"""The difference of two arms on the same questions, with its interval and its test.

The difference is taken per question: far sharper than two accuracies with their own errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from analysis.errors import VerdictError

#: The most an arm may lose to be called removable, in percentage points.
MARGIN = 1.0

#: Below this many questions no loss at all is still compatible with one above the margin (rule of three: 3 / 300).
LEAST_QUESTIONS = 300


@dataclass(frozen=True)
class PairedDifference:
    """An arm against its baseline on the same questions.

    Attributes:
        questions: How many.
        baseline: Accuracy of the baseline in percent.
        arm: Accuracy of the arm in percent.
        difference: Arm minus baseline in percentage points.
        low: Lower end of the 95 % interval of the difference.
        high: Upper end.
        gained: Questions where the arm does better.
        lost: Questions where it does worse.
        p_value: Two-sided, McNemar's exact test. It takes questions for independent: where those of one text hang
            together it is too small, and the interval is what to go by.
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


def _interval(
    delta: np.ndarray, strata: np.ndarray | None, texts: np.ndarray | None, resamples: int, seed: int
) -> tuple[float, float]:
    """95 % percentile interval of the mean of ``delta`` (questions,): inside each stratum whole texts are drawn."""
    rng = np.random.default_rng(seed)
    groups = np.zeros(len(delta), int) if strata is None else np.unique(strata, return_inverse=True)[1]
    texts = np.arange(len(delta)) if texts is None else np.asarray(texts)
    totals = np.zeros((resamples, 2))
    for group in range(groups.max() + 1):
        members = groups == group
        text = np.unique(texts[members], return_inverse=True)[1]
        # Of each text: the sum of its differences, and its questions.
        drawn = np.stack([np.bincount(text, delta[members]), np.bincount(text)], axis=1)
        # A resample is fully described by how often each distinct text was drawn: single questions that are right or
        # wrong are of three kinds.
        kinds, counts = np.unique(drawn, axis=0, return_counts=True)
        totals += rng.multinomial(len(drawn), counts / len(drawn), size=resamples) @ kinds
    low, high = np.quantile(totals[:, 0] / totals[:, 1], [0.025, 0.975])
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
    baseline = np.asarray(baseline_correct, dtype=np.float64)
    arm = np.asarray(arm_correct, dtype=np.float64)
    groupings = [grouping for grouping in (strata, texts) if grouping is not None]
    if baseline.ndim != 1 or baseline.shape != arm.shape or any(len(g) != len(arm) for g in groupings):
        raise VerdictError(f"arms of {baseline.size} and {arm.size} answers cannot be paired: answer the same ones")
    if not baseline.size:
        raise VerdictError("there are no answers to compare: run `headscan evaluate` first")
    delta = arm - baseline
    gained, lost = int((delta > 0).sum()), int((delta < 0).sum())
    low, high = _interval(delta, strata, texts, resamples, seed)
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
