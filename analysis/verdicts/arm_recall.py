"""Verdicts on recall tasks: finding needles and copying text.

A benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574), so an arm must also keep
the model's recall. The tasks of a family differ only in length and are judged together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, sqrt
from statistics import NormalDist

from headscan.analysis.verdict_limits import (
    LEAST_COPIED,
    LEAST_RETAINED,
    MARGIN,
    NEEDLE_CHANCE,
    QUESTIONS_PER_TEXT,
    TAIL,
)
from headscan.analysis.verdicts.paired import PairedDifference
from headscan.analysis.verdicts.retention import CHANCE


@dataclass(frozen=True)
class RecallVerdict:
    """Comparison of an arm with the baseline in a recall family."""

    family: str
    paired: PairedDifference

    @property
    def informative(self) -> bool:
        """True if the baseline solves the task."""
        p = self.paired
        if p.retained is None:
            return False
        if self.family != "needle":
            return p.baseline >= LEAST_COPIED
        return 100 * wilson_low(round(p.baseline / 100 * p.questions), p.questions) > NEEDLE_CHANCE

    @property
    def failed(self) -> bool:
        """True if the arm loses the ability.

        Lost means more than a tenth of it, or more than one point.
        """
        kept = self.paired.retained
        return self.informative and kept is not None and (kept.high < LEAST_RETAINED or self.paired.high < -MARGIN)

    @property
    def kept(self) -> bool:
        """True if the arm keeps at least nine tenths of the ability."""
        kept = self.paired.retained
        return self.informative and kept is not None and kept.low >= LEAST_RETAINED and not self.failed

    def share_left(self) -> str:
        """Return the retained share of the ability with its interval."""
        kept = self.paired.retained
        return "unknown" if kept is None else f"{kept.share:.0f} % [{kept.low:.0f} %, {kept.high:.0f} %]"

    def points(self) -> str:
        """Return the family and its retained share with the interval.

        If the loss shows in points alone, they are added.
        """
        kept, p = self.paired.retained, self.paired
        in_points = self.failed and kept is not None and kept.high >= LEAST_RETAINED
        points = f" ({p.difference:+.1f} points [{p.low:+.1f}, {p.high:+.1f}])" if in_points else ""
        return f"{self.family} {self.share_left()}{points}"

    def wanting(self) -> str:
        """Return the required number of questions if there are too few."""
        least = least_questions(self.paired.baseline, CHANCE.get(self.family, 0.0))
        return f"at least {least} {self.family} questions are needed" if self.paired.questions < least else ""


def wilson_low(right: int, questions: int) -> float:
    """Return the lower end of Wilson's 95 % interval, 0 to 1.

    The share is ``right / questions``.
    """
    z = NormalDist().inv_cdf(1 - TAIL)
    share = right / questions
    centre = share + z**2 / (2 * questions)
    half = z * sqrt(share * (1 - share) / questions + z**2 / (4 * questions**2))
    return max(0.0, (centre - half) / (1 + z**2 / questions))


def least_questions(baseline: float, chance: float) -> int:
    """Return the approximate number of questions with which identical answers keep recall.

    The bound adds one text that may be lost, so a share of 1 - 0.025^(1 / texts) of all texts may be lost.

    Args:
        baseline: Accuracy of the baseline in percent, above ``chance``.
        chance: Accuracy of guessing in percent.
    """
    spare = (100 - LEAST_RETAINED) / 100 * (baseline - chance)
    lost = LEAST_RETAINED + (100 - LEAST_RETAINED) / 100 * chance
    return QUESTIONS_PER_TEXT * ceil(log(TAIL) / log(lost / (spare + lost)))
