"""Verdicts on single tasks of a benchmark.

The pooled accuracy can hide the loss of one small task. With many tasks some lose a little by chance, so each interval
is widened for their number: an arm without loss fails one of MMLU's 57 subjects in at most 1 % of cases; plain 95 %
intervals would fail it in up to half of them. A task of few questions therefore shows large losses only
(`least_visible_loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from headscan.analysis.verdict_limits import MARGIN, POWER, TAIL
from headscan.analysis.verdicts.answer_sheets import Scope
from headscan.analysis.verdicts.paired import PairedDifference, shows_loss, t_quantile


@dataclass(frozen=True)
class TaskVerdict:
    """Comparison of an arm with the baseline in a task or group.

    Attributes:
        low: Lower end of the interval widened for the number of tasks, in percentage points.
        high: Upper end of that interval.
    """

    task: str
    paired: PairedDifference
    low: float
    high: float

    @property
    def failed(self) -> bool:
        """True if the interval shows a loss of more than one point."""
        return shows_loss(self.high, self.paired.questions)

    def points(self) -> str:
        """Return the task, its difference and the interval."""
        return f"{self.task}: {self.paired.difference:+.2f} points [{self.low:+.2f}, {self.high:+.2f}]"


def task_verdicts(scopes: Mapping[Scope, PairedDifference]) -> tuple[TaskVerdict, ...]:
    """Judge each task and group of a benchmark, clearest loss first."""
    tasks = {scope.task: paired for scope, paired in scopes.items() if scope.is_benchmark_task}
    verdicts = [TaskVerdict(task, paired, *paired.among(len(tasks))) for task, paired in tasks.items()]
    return tuple(sorted(verdicts, key=lambda verdict: (verdict.high, verdict.low, verdict.task)))


def least_visible_loss(paired: PairedDifference, tasks: int) -> float:
    """Return the loss in points that the interval of one of ``tasks`` tasks shows in four of five cases.

    The arm loses answers in addition to those that it changes in both directions; at most 100.
    """
    questions = paired.questions
    changed = 2 * min(paired.gained, paired.lost) / questions
    reach = t_quantile(TAIL / tasks, max(1, questions - 1)) + t_quantile(1 - POWER, max(1, questions - 1))
    # The standard error grows with the loss; the smallest loss is where the two sides meet.
    losses = [loss / 10 for loss in range(int(10 * MARGIN), 1001)]
    return next(
        (
            loss
            for loss in losses
            if loss - MARGIN >= reach * 100 * sqrt(max(0.0, loss / 100 + changed - (loss / 100) ** 2) / questions)
        ),
        100.0,
    )
