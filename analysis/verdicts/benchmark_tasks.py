"""The tasks of a benchmark one by one: whether an arm that passes all together loses one of them.

All questions together hide a task that is lost among larger ones. With many tasks, some lose a little by chance, so
each is judged by an interval that allows for their number: an arm that loses nothing fails one of MMLU's 57 subjects in
at most 1 % of cases, where plain 95 % intervals would fail it in up to half of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headscan.analysis.verdict_limits import MARGIN
from headscan.analysis.verdicts.answer_sheets import Scope
from headscan.analysis.verdicts.paired import PairedDifference


@dataclass(frozen=True)
class TaskVerdict:
    """An arm against the baseline in one task of a benchmark, or in one group of tasks.

    Attributes:
        low: Lower end of the interval that allows for the number of tasks, in percentage points.
        high: Its upper end.
    """

    task: str
    paired: PairedDifference
    low: float
    high: float

    @property
    def failed(self) -> bool:
        """Whether the arm is shown to lose more than one point."""
        return self.high < -MARGIN

    def points(self) -> str:
        """Return the task, the difference and the interval, in words."""
        return f"{self.task}: {self.paired.difference:+.2f} points [{self.low:+.2f}, {self.high:+.2f}]"


def task_verdicts(scopes: Mapping[Scope, PairedDifference]) -> tuple[TaskVerdict, ...]:
    """Judge each task and group of a benchmark, the clearest loss first."""
    tasks = {scope.task: paired for scope, paired in scopes.items() if scope.is_benchmark_task}
    verdicts = [TaskVerdict(task, paired, *paired.among(len(tasks))) for task, paired in tasks.items()]
    return tuple(sorted(verdicts, key=lambda verdict: (verdict.high, verdict.low, verdict.task)))
