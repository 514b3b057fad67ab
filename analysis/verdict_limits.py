"""The limits that verdicts use, without the libraries that compute verdicts."""

from __future__ import annotations

from math import floor
from statistics import NormalDist

#: The most an arm may lose to be called removable, in percentage points.
MARGIN = 1.0

#: Half of what the intervals leave out: they hold the truth in 95 % of cases.
TAIL = 0.025

_Z = NormalDist().inv_cdf(1 - TAIL)

#: The fewest questions on which an arm with the baseline's very answers passes: with none gained and none lost, the
#: score test's lower end is -z^2 / (questions + z^2), which has to lie above the margin.
LEAST_QUESTIONS = floor(_Z**2 * (100 / MARGIN - 1)) + 1

#: A model that is right on fewer questions (in %) has little more than the margin to lose: no arm of it can fail.
LEAST_BASELINE = 5.0

#: Questions that share one haystack or one passage: 4k to 4k + 3 of a task have the same text.
QUESTIONS_PER_TEXT = 4

#: Recall is kept if at least this share of the model's ability above chance is shown to remain, in percent.
LEAST_RETAINED = 90.0

#: Needle questions have four choices: a baseline that is not shown to be right more often (in %) may be guessing.
NEEDLE_CHANCE = 30.0

#: Tokens are copied from the whole vocabulary: a baseline that copies fewer of them (in %) does not copy.
LEAST_COPIED = 10.0
