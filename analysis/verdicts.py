"""What silencing heads costs: the arms of an evaluation against their baseline, their recall and random controls.

Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.answer_sheets import BENCHMARK, Scope
from analysis.controls import Controls, judge_controls
from analysis.errors import VerdictError
from analysis.finished_arms import finished_arms
from analysis.measures import Measure, read_measures
from analysis.paired import LEAST_QUESTIONS, MARGIN, PairedDifference
from analysis.recall import RecallVerdict
from analysis.store import Store
from analysis.verdict_rows import read_verdicts, record_verdicts


@dataclass(frozen=True, kw_only=True)
class ArmOutcome:
    """What is known of one arm beside its accuracy.

    Attributes:
        zeroed_share: Share of the heads really silenced, 0 to 1.
        recall: The families of recall tasks, which do not count in the benchmark.
        measures: Metrics of tasks without right answers.
    """

    name: str
    kind: str
    zeroed_share: float | None
    recall: tuple[RecallVerdict, ...] = ()
    measures: tuple[Measure, ...] = ()

    @property
    def is_random(self) -> bool:
        """Whether it silences heads drawn by chance."""
        return self.kind.startswith("random_")

    @property
    def recall_lost(self) -> str:
        """The recall families that the arm fails, in words; empty for none."""
        return ", ".join(family.points() for family in self.recall if family.failed)

    def sentence(self) -> str:
        """What is known, in words."""
        share = "" if self.zeroed_share is None else f" ({self.zeroed_share:.1%} of heads silenced)"
        return f"{self.name}{share}: {'; '.join(self._parts())}."

    def _parts(self) -> list[str]:
        fails = [f"fails {self.recall_lost}"] if self.recall_lost else []
        return [*(measure.words() for measure in self.measures), "no accuracy to judge by", *fails]


@dataclass(frozen=True, kw_only=True)
class ArmVerdict(ArmOutcome):
    """What is known of one arm, and whether its heads can go.

    Attributes:
        paired: The benchmark: all questions together that have a right answer.
        controls: None when no random arm of its size was evaluated.
    """

    paired: PairedDifference
    controls: Controls | None = None

    @property
    def passes_benchmark(self) -> bool:
        """Whether the interval's lower end is above -1 point, on a benchmark that tells."""
        return self.paired.low > -MARGIN and self.paired.tells

    @property
    def removable(self) -> bool:
        """Whether the arm passes the benchmark and loses no recall that the model is known to have."""
        return self.passes_benchmark and not self.recall_lost

    def _parts(self) -> list[str]:
        p, c = self.paired, self.controls
        return [
            f"{p.arm:.2f} % against {p.baseline:.2f} % on {p.questions} questions,"
            f" {p.difference:+.2f} points [{p.low:+.2f}, {p.high:+.2f}], p = {p.p_value:.3g}",
            *(measure.words() for measure in self.measures),
            self._conclusion(),
            "no random control of its size" if c is None else c.sentence(self.zeroed_share),
        ]

    def _conclusion(self) -> str:
        if self.removable:
            return f"removable within one point; {self._recall_kept()}"
        if self.passes_benchmark:
            return f"passes the benchmark, but fails {self.recall_lost}: not removable"
        fails = f"; fails {self.recall_lost}" if self.recall_lost else ""
        return self._shortcoming() + fails

    def _shortcoming(self) -> str:
        """Why the arm does not pass the benchmark."""
        if self.paired.high < -MARGIN:
            return "not removable: it loses more than one point"
        if self.paired.questions < LEAST_QUESTIONS:
            return f"not shown to be removable: at least {LEAST_QUESTIONS} questions are needed to tell one point"
        if self.paired.low <= -MARGIN:
            return "not shown to be removable: the interval reaches below -1 point"
        return "not shown to be removable: the model itself is right on too few questions to lose any"

    def _recall_kept(self) -> str:
        """What is known of the recall of an arm that fails no family."""
        if not self.recall:
            return "recall not tested"
        kept = ", ".join(family.points() for family in self.recall if family.informative)
        return f"recall kept: {kept}" if kept else "the model itself does not retrieve, so recall cannot tell"


@dataclass(frozen=True)
class Verdict:
    """All finished arms of an evaluate run but the baseline, random controls last.

    Attributes:
        arms: Those with an accuracy.
        unjudged: Those without: all of them, where no benchmark task has right answers (perplexity).
        unfinished: How many arms of the run are not finished, of which nothing is said.
    """

    run_id: str
    model: str
    arms: tuple[ArmVerdict, ...]
    unjudged: tuple[ArmOutcome, ...] = ()
    unfinished: int = 0

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

    Comparisons that the store lacks are written to it.

    Raises:
        VerdictError: Not exactly one finished baseline, no other finished arm, or arms with other questions.
    """
    run = store.resolve_run(run_id, "evaluate")
    run_id = run["run_id"]
    arms = finished_arms(store, run_id)
    if not arms.others:
        raise VerdictError(
            f"run {run_id} has a baseline and 0 other finished arms; a verdict needs one: silence heads with"
            " `headscan evaluate`"
        )
    record_verdicts(store, run_id)
    compared = read_verdicts(store, run_id)
    controls = judge_controls(store, arms, compared)
    measures = read_measures(store, run_id, arms.baseline)
    judged, unjudged = [], []
    for arm in arms.others:
        scopes = compared.get(arm.arm_id, {})
        known = ArmOutcome(
            name=arm.name,
            kind=arm.kind,
            zeroed_share=arm.zeroed_share,
            recall=_families(scopes),
            measures=measures.get(arm.arm_id, ()),
        )
        if BENCHMARK in scopes:
            judged.append(ArmVerdict(**vars(known), paired=scopes[BENCHMARK], controls=controls.get(arm.arm_id)))
        else:
            unjudged.append(known)
    return Verdict(run_id, run["model"], tuple(judged), tuple(unjudged), arms.unfinished)


def _families(scopes: Mapping[Scope, PairedDifference]) -> tuple[RecallVerdict, ...]:
    """The recall families among what was compared."""
    return tuple(RecallVerdict(scope.task, paired) for scope, paired in scopes.items() if scope.is_recall_family)
