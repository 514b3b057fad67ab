"""The cost of ablating heads: the arms of an evaluation against their baseline, their recall and random controls.

Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.errors import VerdictError
from headscan.analysis.store.store import Store
from headscan.analysis.verdict_limits import LEAST_QUESTIONS, LEAST_RETAINED, MARGIN
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, Scope
from headscan.analysis.verdicts.arm_recall import RecallVerdict
from headscan.analysis.verdicts.benchmark_tasks import TaskVerdict, task_verdicts
from headscan.analysis.verdicts.controls import Controls, judge_controls
from headscan.analysis.verdicts.finished_arms import FinishedArm, finished_arms
from headscan.analysis.verdicts.measures import Measure, read_measures
from headscan.analysis.verdicts.paired import PairedDifference
from headscan.analysis.verdicts.verdict_rows import compared_by_arm, read_verdict_rows

#: So many lost tasks are named in a verdict; the store has all of them.
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ArmOutcome:
    """What is known of one arm beside its accuracy.

    Attributes:
        zeroed_share: Share of the heads really ablated, 0 to 1.
        recall: The families of recall tasks, which do not count in the benchmark.
        measures: Metrics of tasks without right answers.
    """

    name: str
    kind: ArmKind
    zeroed_share: float | None
    recall: tuple[RecallVerdict, ...] = ()
    measures: tuple[Measure, ...] = ()

    @property
    def is_random(self) -> bool:
        """Whether it ablates heads drawn by chance."""
        return self.kind.is_random

    @property
    def recall_lost(self) -> str:
        """The recall families that the arm is shown to lose, in words; empty for none."""
        return ", ".join(family.family for family in self.recall if family.failed)

    @property
    def recall_open(self) -> str:
        """The recall families that the arm is shown neither to lose nor to keep, in words; empty for none."""
        families = [family for family in self.recall if family.informative and not (family.failed or family.kept)]
        return ", ".join(family.family for family in families)

    def sentence(self) -> str:
        """Return the verdict on the arm, and the numbers that it rests on, in words."""
        share = "" if self.zeroed_share is None else f" ({self.zeroed_share:.1%} of heads ablated)"
        return f"{self.name}{share}: {'. '.join(filter(None, self._parts()))}."

    def _parts(self) -> list[str]:
        """The sentences after the arm's name; empty ones say nothing."""
        lost = f"It loses recall ({self.recall_lost})" if self.recall_lost else ""
        found = ["no task has right answers to count", *(measure.words() for measure in self.measures)]
        return [*found, lost, self._recall_words()]

    def _recall_words(self) -> str:
        """The share of the model's recall that is left, family by family."""
        known = [family for family in self.recall if family.informative]
        if not self.recall:
            return "Recall was not tested"
        if not known:
            return "Recall cannot be judged: the model itself does not do the recall tasks"
        left = ", ".join(family.points() for family in known)
        return (
            f"Recall that is left, of the model's ability above chance: {left}"
            f" (95 % intervals; at least {LEAST_RETAINED:.0f} % must be shown)"
        )


@dataclass(frozen=True, kw_only=True)
class ArmVerdict(ArmOutcome):
    """What is known of one arm, and whether its heads can go.

    Attributes:
        paired: The benchmark: all questions together that have a right answer.
        tasks: The benchmark's tasks and groups of tasks, the clearest loss first.
        controls: None when no random arm of its size was evaluated.
    """

    paired: PairedDifference
    tasks: tuple[TaskVerdict, ...] = ()
    controls: Controls | None = None

    @property
    def passes_benchmark(self) -> bool:
        """Whether the interval's lower end is above -1 point, on enough questions, and no task is lost."""
        return self.paired.low > -MARGIN and self.paired.tells and not self.tasks_lost

    @property
    def tasks_lost(self) -> tuple[TaskVerdict, ...]:
        """The tasks that the arm is shown to lose, the clearest loss first."""
        return tuple(task for task in self.tasks if task.failed)

    @property
    def removable(self) -> bool:
        """Whether the arm passes the benchmark and is shown to keep all recall that the model has."""
        return self.passes_benchmark and not self.recall_lost and not self.recall_open

    def _parts(self) -> list[str]:
        p, c = self.paired, self.controls
        return [
            self._conclusion(),
            f"Accuracy {p.arm:.2f} % against {p.baseline:.2f} % on {p.questions} questions: {p.difference:+.2f} points"
            f" [{p.low:+.2f}, {p.high:+.2f}], p = {p.p_value:.3g}",
            *(measure.words() for measure in self.measures),
            self._worst_task(),
            self._recall_words(),
            "No random control with as many heads" if c is None else c.sentence(self.zeroed_share),
        ]

    def _conclusion(self) -> str:
        losses, doubts = self._losses(), self._doubts()
        if losses:
            return f"not removable: it {' and '.join(losses)}"
        if doubts:
            return f"not shown to be removable: {' and '.join(doubts)}"
        return "removable within one point"

    def _losses(self) -> list[str]:
        """What the arm is shown to lose."""
        losses = []
        if self.paired.high < -MARGIN:
            losses.append("loses more than one point of accuracy")
        elif self.tasks_lost:
            names = ", ".join(task.task for task in self.tasks_lost[:_MOST_NAMED])
            more = len(self.tasks_lost) - _MOST_NAMED
            losses.append(f"loses more than one point in {names}" + (f" and {more} other tasks" if more > 0 else ""))
        if self.recall_lost:
            losses.append(f"loses recall ({self.recall_lost})")
        return losses

    def _doubts(self) -> list[str]:
        """What the questions do not show."""
        doubts = []
        if self.paired.questions < LEAST_QUESTIONS:
            doubts.append(f"at least {LEAST_QUESTIONS} questions are needed to exclude a loss of one point")
        elif self.paired.low <= -MARGIN:
            doubts.append("its loss may be more than one point")
        elif not self.paired.tells:
            doubts.append("the model itself answers too few questions right to lose any")
        if self.recall_open:
            wanting = [family.wanting() for family in self.recall if family.informative and not family.kept]
            needed = "; ".join(words for words in wanting if words)
            doubts.append(f"recall is not shown to be kept ({self.recall_open}{f'; {needed}' if needed else ''})")
        return doubts

    def _worst_task(self) -> str:
        """The task with the clearest loss, if there are several."""
        if len(self.tasks) < 2:
            return ""
        return (
            f"Worst of {len(self.tasks)} tasks and groups, with an interval widened for their number:"
            f" {self.tasks[0].points()}"
        )


@dataclass(frozen=True)
class Verdict:
    """All finished arms of an evaluate run but the baseline, random controls last.

    Attributes:
        arms: Those with an accuracy.
        unjudged: Those without: all of them, where no benchmark task has right answers (perplexity).
        unfinished: Number of unfinished arms of the run, which are not judged.
        unrecorded: Rows of ``arm_verdicts`` that were computed because the store lacks them.
    """

    run_id: str
    model: str
    arms: tuple[ArmVerdict, ...]
    unjudged: tuple[ArmOutcome, ...] = ()
    unfinished: int = 0
    unrecorded: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    @property
    def progress(self) -> str:
        """How many arms are finished, the baseline among them, in words; empty when all are."""
        finished = 1 + len(self.arms) + len(self.unjudged)
        return f"{finished} of {finished + self.unfinished} arms finished" if self.unfinished else ""

    def sentences(self) -> list[str]:
        """One sentence per arm that is not a random control; before them, whether arms are missing."""
        told = [arm.sentence() for arm in (*self.arms, *self.unjudged) if not arm.is_random]
        return [f"{self.progress}.", *told] if self.progress else told


def judge(store: Store, run_id: str) -> Verdict:
    """Every finished arm of an evaluate run against its baseline and its random controls.

    Nothing is written: comparisons that the store lacks are computed and stay in memory.

    Raises:
        VerdictError: Not exactly one finished baseline, no other finished arm, or arms with other questions.
    """
    run = store.resolve_run(run_id, "evaluate")
    run_id = run["run_id"]
    arms = finished_arms(store, run_id)
    if not arms.others:
        raise VerdictError(
            f"run {run_id} has a baseline and 0 other finished arms; a verdict needs one: ablate heads with"
            " `headscan evaluate`"
        )
    rows = read_verdict_rows(store, run_id)
    compared = compared_by_arm([*rows.stored, *rows.computed])
    controls = judge_controls(arms.others, benchmark_differences(compared))
    measures = read_measures(store, run_id, arms.baseline)
    judged: list[ArmVerdict] = []
    unjudged: list[ArmOutcome] = []
    for arm in arms.others:
        outcome = arm_outcome(
            arm,
            compared.get(arm.arm_id, {}),
            measures=measures.get(arm.arm_id, ()),
            controls=controls.get(arm.arm_id),
        )
        if isinstance(outcome, ArmVerdict):
            judged.append(outcome)
        else:
            unjudged.append(outcome)
    return Verdict(run_id, run["model"], tuple(judged), tuple(unjudged), arms.unfinished, tuple(rows.computed))


def benchmark_differences(compared: Mapping[str, Mapping[Scope, PairedDifference]]) -> dict[str, float]:
    """Return the benchmark difference in percentage points of every arm id that has one."""
    return {arm_id: scopes[BENCHMARK].difference for arm_id, scopes in compared.items() if BENCHMARK in scopes}


def arm_outcome(
    arm: FinishedArm,
    scopes: Mapping[Scope, PairedDifference],
    *,
    measures: tuple[Measure, ...] = (),
    controls: Controls | None = None,
) -> ArmOutcome:
    """Judge one arm by its comparisons; an ``ArmVerdict`` if they include the benchmark's accuracy."""
    known = ArmOutcome(
        name=arm.name,
        kind=arm.kind,
        zeroed_share=arm.zeroed_share,
        recall=_families(scopes),
        measures=measures,
    )
    if BENCHMARK not in scopes:
        return known
    return ArmVerdict(**vars(known), paired=scopes[BENCHMARK], tasks=task_verdicts(scopes), controls=controls)


def _families(scopes: Mapping[Scope, PairedDifference]) -> tuple[RecallVerdict, ...]:
    """The recall families among what was compared."""
    return tuple(RecallVerdict(scope.task, paired) for scope, paired in scopes.items() if scope.is_recall_family)
