"""Verdicts on a family of recall tasks and on single tasks, and intervals that are widened for several arms.

A benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574), so an arm must also keep
the model's recall: finding needles and copying text. The tasks of a family differ only in length and are judged
together.

The pooled accuracy can hide the loss of one small task. With many tasks some lose a little by chance, so each interval
is widened for their number: an arm without loss fails one of MMLU's 57 subjects in at most 1 % of cases; plain 95 %
intervals would fail it in up to half of them. A task of few questions therefore shows large losses only
(`least_visible_loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log, sqrt

from headscan.catalog import recall_family
from headscan.store.verdict_limits import (
    MARGIN,
    MIN_EVIDENCE_TEXTS,
    MIN_RETAINED,
    POWER,
    QUESTIONS_PER_TEXT,
    TAIL,
    rare_event_factor,
    z_quantile,
)
from headscan.verdicts.answer_sheets import BENCHMARK, EXPECTED, Scope
from headscan.verdicts.paired import Interval, PairedDifference, shows_loss, wilson_low

#: Safety factor on the number of recall questions. With the least number, identical answers pass in only half of the
#: runs, because the baseline's accuracy varies.
_QUESTIONS_FACTOR = 1.5


@dataclass(frozen=True)
class RecallVerdict:
    """Comparison of an arm with the baseline in a recall family.

    Attributes:
        judging_share: Share of the run's recall questions that judge; the others select the best arm of a sweep.
        comparisons: Number of arms for which the intervals are widened.
    """

    family: str
    paired: PairedDifference
    judging_share: float = 1.0
    comparisons: float = 1

    @property
    def informative(self) -> bool:
        """True if the baseline solves the task."""
        paired = self.paired
        return paired.retained is not None and solves(self.family, paired.baseline, paired.questions)

    @property
    def failed(self) -> bool:
        """True if a loss of more than a tenth of the ability, or of more than one point of the answers, is shown."""
        retained = self.retained
        if retained is None:
            return False
        return (retained.high < MIN_RETAINED and self.paired.texts >= MIN_EVIDENCE_TEXTS) or self.paired.shows_loss()

    @property
    def kept(self) -> bool:
        """True if at least nine tenths of the ability are shown to be left, and `failed` is false."""
        return self.retained is not None and self.retained.low >= MIN_RETAINED and not self.failed

    @property
    def retained(self) -> Interval | None:
        """Share of the ability that is left, in percent; None if the baseline does not solve the task."""
        return self.paired.retained if self.informative else None

    def share_words(self) -> str:
        """Return the retained share with its interval."""
        share = self.paired.retained
        return "unknown" if share is None else f"{share.value:.0f} % [{share.low:.0f} %, {share.high:.0f} %]"

    def numbers(self) -> str:
        """Return the retained share, and the loss in points if the share alone does not show it."""
        points = self._points()
        return f"{self.share_words()} ({points})" if points else self.share_words()

    def words(self) -> str:
        """Return the family and its numbers."""
        return f"{self.family} {self.numbers()}"

    def loss_words(self) -> str:
        """Return the family and in brackets what is left of it, to follow "loses"."""
        return f"{self.family} ({', '.join(filter(None, [f'{self.share_words()} left', self._points()]))})"

    def _points(self) -> str:
        """Return the loss in points, if it is shown and the share alone does not show it; else nothing."""
        in_points = self.failed and self.retained is not None and self.retained.high >= MIN_RETAINED
        return self.paired.interval.words(1, " points") if in_points else ""

    @property
    def questions_needed(self) -> int | None:
        """Number of questions that an arm without loss needs; None if no larger number is known to help: these are
        enough, or the baseline does not solve the task.
        """
        if not self.informative:
            return None
        needed = recall_needed(self.family, self.paired.baseline, self.comparisons)
        return None if self.paired.questions >= needed else ceil(needed / self.judging_share)


def solves(family: str, baseline: float, questions: int) -> bool:
    """Return True if a baseline (accuracy in percent) solves a family of recall tasks, so that recall can be lost. Of
    questions that can be guessed, that must be shown, by independent texts.
    """
    declared = recall_family(family)
    if declared.choices is None:
        return baseline >= declared.least
    texts = max(1, questions // QUESTIONS_PER_TEXT)
    return 100 * wilson_low(round(baseline / 100 * texts), texts) > declared.least


def recall_needed(family: str, baseline: float, comparisons: float = 1) -> int:
    """Return the number of judging questions to ask so that an arm without loss is shown to keep recall.

    ``baseline`` is an accuracy in percent, above chance. An arm that loses nothing and changes 4 % of the answers is
    then shown to keep recall in about nine of ten cases if the model finds at least 65 % of the needles, and in three
    of four if it finds half of them.
    """
    least = least_questions(baseline, recall_family(family).chance, comparisons)
    return QUESTIONS_PER_TEXT * ceil(_QUESTIONS_FACTOR * least / QUESTIONS_PER_TEXT)


def least_questions(baseline: float, chance: float, comparisons: float = 1) -> int:
    """Return the approximate number of questions with which identical answers keep recall.

    The bound adds one text that may be lost, so a share of 1 - (`TAIL` / comparisons)^(1 / texts) of all texts may be
    lost. ``baseline`` and ``chance`` are accuracies in percent, ``baseline`` above ``chance``.
    """
    assert baseline > chance, "a baseline at chance has no recall to keep"
    allowed_loss = (100 - MIN_RETAINED) / 100 * (baseline - chance)
    loss_of_text = MIN_RETAINED + (100 - MIN_RETAINED) / 100 * chance
    return QUESTIONS_PER_TEXT * ceil(log(TAIL / comparisons) / log(loss_of_text / (allowed_loss + loss_of_text)))


@dataclass(frozen=True)
class TaskVerdict:
    """Comparison of an arm with the baseline in a task or group; ``wide`` is the difference in percentage points, with
    its interval widened for the number of tasks.
    """

    task: str
    paired: PairedDifference
    wide: Interval
    max_points: float = MARGIN

    @property
    def failed(self) -> bool:
        """True if the interval shows a loss of more than ``max_points``."""
        return shows_loss(self.wide.high, self.paired.texts, self.max_points)

    def points(self) -> str:
        return f"{self.task}: {self.wide.words(unit=' points')}"


def task_verdicts(differences: Mapping[Scope, PairedDifference], max_points: float = MARGIN) -> tuple[TaskVerdict, ...]:
    """Judge each task and group of a benchmark, clearest loss first."""
    task_differences = {scope.task: paired for scope, paired in differences.items() if scope.is_benchmark_task}
    verdicts = [
        TaskVerdict(task, paired, paired.simultaneous_interval(len(task_differences)), max_points)
        for task, paired in task_differences.items()
    ]
    return tuple(sorted(verdicts, key=lambda verdict: (verdict.wide.high, verdict.wide.low, verdict.task)))


def least_visible_loss(paired: PairedDifference, tasks: int) -> float:
    """Return the smallest loss in points, at most 100, that the interval of one of ``tasks`` tasks shows in four of
    five cases. For example, one of 57 tasks, with 100 questions of which 2 were gained and 2 lost, shows losses of 19.6
    points and more; with 1,000 questions, 20 gained and 20 lost, it shows 4.9.

    It is the smallest loss with ``loss - MARGIN >= (z(TAIL / tasks) + z(1 - POWER)) * 100 * sqrt((loss / 100 +
    changed - (loss / 100)**2) / texts)``. z(p) is the normal quantile with the probability p beyond it. The root has
    the variance of a text's difference, if its questions change together: the share of changed answers minus the
    squared loss. ``changed`` is the part of these answers without a net loss, twice the smaller one of the shares of
    gained and lost answers.
    """
    texts = paired.texts
    changed = 2 * min(paired.gained, paired.lost) / paired.questions
    reach = z_quantile(TAIL / tasks) + z_quantile(1 - POWER)
    # The standard error grows with the loss; the smallest loss is where the two sides meet.
    losses = [loss / 10 for loss in range(int(10 * MARGIN), 1001)]
    return next(
        (
            loss
            for loss in losses
            if loss - MARGIN >= reach * 100 * sqrt(max(0.0, loss / 100 + changed - (loss / 100) ** 2) / texts)
        ),
        100.0,
    )


def widened_differences(
    differences: Mapping[Scope, PairedDifference], comparisons: float, recall_comparisons: float
) -> dict[Scope, PairedDifference]:
    """Return differences with wider intervals, because several arms are judged together.

    ``comparisons`` arms are judged on the benchmark and ``recall_comparisons`` on recall. An interval of 95 % misses
    the true value in 5 % of cases. Widened for three arms it misses in 5 % / 3, so at least one of the three misses in
    at most 5 %. In recall both intervals are widened, that of the points and that of the share of the ability that is
    left. The difference of -1.5 points in the example of `paired_difference` has the interval -3.51 to 0.30 for one
    arm, and -3.99 to 0.67 for three. Intervals of single tasks are widened for the number of tasks instead.
    """
    widened = dict(differences)
    for scope, paired in differences.items():
        if scope in (BENCHMARK, EXPECTED):
            widened[scope] = _widened(paired, comparisons)
        elif scope.is_recall_family:
            widened[scope] = _widened(paired, recall_comparisons)
    return widened


def _widened(paired: PairedDifference, comparisons: float) -> PairedDifference:
    low, _, high = paired.simultaneous_interval(comparisons)
    retained = paired.retained
    if retained is not None:
        stretched = retained.stretched(rare_event_factor(comparisons))
        retained = Interval(max(-100.0, stretched.low), stretched.value, min(200.0, stretched.high))
    return replace(paired, low=low, high=high, retained=retained)
