"""Recall tasks beside a benchmark: needles to be found, text to be copied.

A benchmark of short questions does not see the loss of the heads that retrieve (arXiv 2404.15574), so an arm that
passes it has to keep the model's recall as well. The tasks of a family differ in length alone and are judged together.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import binomtest

from analysis.paired import MARGIN, PairedDifference

#: Questions that share one haystack or one passage: 4k to 4k + 3 of a task have the same text.
QUESTIONS_PER_TEXT = 4

#: A loss of more than this many points fails, even where questions are too few for an interval below the margin.
MOST_LOST = 5.0

#: Needle questions have four choices: a baseline that is not shown to be right more often (in %) may be guessing.
NEEDLE_CHANCE = 30.0

#: Tokens are copied from the whole vocabulary: a baseline that copies fewer of them (in %) does not copy.
LEAST_COPIED = 10.0


@dataclass(frozen=True)
class RecallVerdict:
    """An arm against the baseline in one family of recall tasks."""

    family: str
    paired: PairedDifference

    @property
    def informative(self) -> bool:
        """Whether the baseline itself does the task, so that there is something to lose."""
        p = self.paired
        if self.family != "needle":
            return p.baseline >= LEAST_COPIED
        right = binomtest(round(p.baseline / 100 * p.questions), p.questions)
        return 100 * float(right.proportion_ci(0.95, method="wilson").low) > NEEDLE_CHANCE

    @property
    def failed(self) -> bool:
        """Whether the arm loses recall that the baseline has."""
        return self.informative and (self.paired.difference < -MOST_LOST or self.paired.high < -MARGIN)

    def points(self) -> str:
        """The family and its difference, in words."""
        return f"{self.family} ({self.paired.difference:+.1f} points)"
