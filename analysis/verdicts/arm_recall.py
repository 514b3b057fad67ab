"""Verdicts on recall tasks: finding needles and copying text.

A benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574), so an arm must also keep
the model's recall. The tasks of a family differ only in length and are judged together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

from headscan.analysis.verdict_limits import (
    LEAST_COPIED,
    LEAST_RETAINED,
    LEAST_TEXTS,
    NEEDLE_CHANCE,
    QUESTIONS_PER_TEXT,
    TAIL,
)
from headscan.analysis.verdicts.paired import PairedDifference, shows_loss, wilson_low
from headscan.analysis.verdicts.retention import CHANCE

#: Questions for which recall is asked, as a multiple of those with which identical answers keep it: at the least number
#: they keep it in half of the cases, because the accuracy of the baseline varies.
_SPARE = 1.5


@dataclass(frozen=True)
class RecallVerdict:
    """Comparison of an arm with the baseline in a recall family.

    Attributes:
        part: Share of the recall questions of the run that judge; the others select the best arm of a sweep.
        comparisons: Number of arms for which the intervals are widened.
    """

    family: str
    paired: PairedDifference
    part: float = 1.0
    comparisons: int = 1

    @property
    def texts(self) -> int:
        """Number of texts, which are independent; their questions are not."""
        return ceil(self.paired.questions / QUESTIONS_PER_TEXT)

    @property
    def informative(self) -> bool:
        """True if the baseline solves the task."""
        p = self.paired
        return p.retained is not None and solves(self.family, p.baseline, p.questions)

    @property
    def failed(self) -> bool:
        """True if the arm loses the ability.

        Lost means more than a tenth of it, or more than one point.
        """
        kept = self.paired.retained
        if kept is None or not self.informative:
            return False
        return (kept.high < LEAST_RETAINED and self.texts >= LEAST_TEXTS) or shows_loss(self.paired.high, self.texts)

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
        needed = recall_needed(self.family, self.paired.baseline, self.comparisons)
        if self.paired.questions >= needed:
            return ""
        return f"about {ceil(needed / self.part):,} {self.family} questions are needed"


def solves(family: str, baseline: float, questions: int) -> bool:
    """Return True if a baseline solves a family of recall tasks, so that there is recall to lose.

    Args:
        baseline: Its accuracy in percent.
    """
    if family != "needle":
        return baseline >= LEAST_COPIED
    return 100 * wilson_low(round(baseline / 100 * questions), questions) > NEEDLE_CHANCE


def recall_needed(family: str, baseline: float, comparisons: int = 1) -> int:
    """Return the number of judging questions to ask so that an arm without loss is shown to keep recall.

    An arm that loses nothing and changes 4 % of the answers is then shown to keep it in about nine of ten cases if the
    model finds at least 65 % of the needles, and in three of four if it finds half of them.

    Args:
        baseline: Accuracy of the baseline in percent, above chance.
        comparisons: Number of arms that the questions judge.
    """
    least = least_questions(baseline, CHANCE.get(family, 0.0), comparisons)
    return QUESTIONS_PER_TEXT * ceil(_SPARE * least / QUESTIONS_PER_TEXT)


def least_questions(baseline: float, chance: float, comparisons: int = 1) -> int:
    """Return the approximate number of questions with which identical answers keep recall.

    The bound adds one text that may be lost, so a share of 1 - 0.025^(1 / texts) of all texts may be lost; with more
    comparisons, a smaller probability takes the place of 0.025.

    Args:
        baseline: Accuracy of the baseline in percent, above ``chance``.
        chance: Accuracy of guessing in percent.
        comparisons: Number of arms that the questions judge.
    """
    spare = (100 - LEAST_RETAINED) / 100 * (baseline - chance)
    lost = LEAST_RETAINED + (100 - LEAST_RETAINED) / 100 * chance
    return QUESTIONS_PER_TEXT * ceil(log(TAIL / comparisons) / log(lost / (spare + lost)))
