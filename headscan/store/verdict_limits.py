"""Limits of verdicts, importable without scipy."""

from __future__ import annotations

from math import ceil, floor, log
from statistics import NormalDist

#: Maximum loss of a safe arm, in percentage points.
MARGIN = 1.0

#: Probability beyond each end of a 95 % interval.
TAIL = 0.025


def z_quantile(tail: float) -> float:
    """Return the quantile of the normal distribution with the probability ``tail`` beyond it."""
    return NormalDist().inv_cdf(1 - tail)


#: Probability with which a sufficient number of questions shows that an arm without loss is safe.
POWER = 0.8


def rare_event_factor(comparisons: float) -> float:
    """Return the factor ``log(TAIL / comparisons) / log(TAIL)``, which widens an interval of rare events. The chance to
    see no such event falls exponentially with their number; this ratio of logarithms exceeds that of normal quantiles.
    """
    return log(TAIL / comparisons) / log(TAIL)


def identical_questions(comparisons: float = 1, max_points: float = MARGIN) -> int:
    """Return the minimum number of questions with which identical answers are safe. If a share of `max_points` of the
    answers were lost, ``n`` questions would show none of them with a probability of ``(1 - max_points / 100)**n``.
    """
    return floor(log(TAIL / comparisons) / log(1 - max_points / 100)) + 1


#: Minimum number of texts (questions, if each has its own) with which identical answers of one arm are safe.
MIN_SAFE_TEXTS = identical_questions()

#: Minimum accuracy of the baseline above chance, in percentage points; below it there is little more than the margin
#: to lose.
MIN_ABOVE_CHANCE = 5.0

#: Minimum number of texts (questions, if each has its own) that can show a loss of accuracy, or a change of the loss of
#: text. If an arm gains and loses whole texts by chance, fewer are all lost in more than 2.5 % of cases.
MIN_EVIDENCE_TEXTS = ceil(log(TAIL) / log(0.5))

#: A sweep selects on one of this many documents, or recall texts, and judges on the others. Few recall texts suffice to
#: detect lost recall, but a verdict needs nearly all to show that recall is kept.
BENCHMARK_SPLITS, RECALL_SPLITS = 2, 4

#: Recall questions per text (haystack or passage): questions 4k to 4k + 3 of a task share one.
QUESTIONS_PER_TEXT = 4

#: Minimum number of texts that can show the loss of text to be within its limit. If few texts lose most, the interval
#: of fewer ends too low: simulated, it does so in 10 % of cases with 8 texts, 7 % with 20, and 5 % with 64.
MIN_TEXTS_IN_LIMIT = 20

#: Minimum number of documents that questions are made from, so that documents are the unit that varies. A verdict on
#: questions of fewer speaks of these documents only.
MIN_DOCUMENTS = 20

#: Maximum increase of the loss of held-out text of a safe arm, in nats per token, unless the user sets another.
MAX_LOSS = 0.05

#: Minimum retained share of the model's ability above chance, in percent.
MIN_RETAINED = 90.0


def points_words(points: float) -> str:
    """Return a number of percentage points in words."""
    return "one point" if points == 1 else f"{points:g} points"


def limits_words(max_loss: float | None = None, max_points: float = MARGIN) -> str:
    """Return the meaning of the outcomes of verdicts. ``max_loss`` is in nats per token; None leaves the loss of text
    out. ``max_points`` is in percentage points.
    """
    within = "" if max_loss is None else f"that the loss of text rises by at most {max_loss:g} nats per token, "
    text = "" if max_loss is None else f", or a rise of the loss by more than {max_loss:g} nats per token"
    points = f"{max_points:g} point{'s' * (max_points != 1)} of accuracy"
    return (
        f"safe: it is shown that no more than {points} is lost, {within}and that at least {MIN_RETAINED:.0f} % of"
        f" recall is left; a loss of the recall answers counts against it if more than {MARGIN:.0f} point is shown."
        f" Loses: a loss of more than {points} or of {MARGIN:.0f} point of the recall answers, less than"
        f" {MIN_RETAINED:.0f} % of recall{text} is shown"
    )
