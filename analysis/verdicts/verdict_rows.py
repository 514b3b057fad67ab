"""Verdicts on recall tasks and on single tasks, and their stored rows.

A benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574), so an arm must also keep
the model's recall: finding needles and copying text. The tasks of a family differ only in length and are judged
together.

The pooled accuracy can hide the loss of one small task. With many tasks some lose a little by chance, so each interval
is widened for their number: an arm without loss fails one of MMLU's 57 subjects in at most 1 % of cases; plain 95 %
intervals would fail it in up to half of them. A task of few questions therefore shows large losses only
(`least_visible_loss`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log, sqrt
from typing import Any, NamedTuple

import pyarrow as pa

from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import TABLES
from headscan.analysis.store.verdict_limits import (
    LEAST_RETAINED,
    LEAST_TEXTS,
    MARGIN,
    POWER,
    QUESTIONS_PER_TEXT,
    TAIL,
    rare_event_factor,
)
from headscan.analysis.verdicts.answer_sheets import (
    BENCHMARK,
    AnswerSheets,
    FinishedArm,
    FinishedArms,
    Scope,
    finished_arms,
    read_answers,
)
from headscan.analysis.verdicts.paired import Interval, PairedDifference, shows_loss, t_quantile, wilson_low
from headscan.catalog import recall_family

#: Safety factor on the number of recall questions. With the least number, identical answers pass in only half of the
#: runs, because the baseline's accuracy varies.
_SPARE = 1.5


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
    comparisons: int = 1

    @property
    def informative(self) -> bool:
        """True if the baseline solves the task."""
        p = self.paired
        return p.retained is not None and solves(self.family, p.baseline, p.questions)

    @property
    def failed(self) -> bool:
        """True if a loss of more than a tenth of the ability, or of more than one point of the answers, is shown."""
        retained = self.retained
        if retained is None:
            return False
        return (retained.high < LEAST_RETAINED and self.paired.texts >= LEAST_TEXTS) or self.paired.shows_loss

    @property
    def kept(self) -> bool:
        """True if at least nine tenths of the ability are shown to be left, and `failed` is false."""
        return self.retained is not None and self.retained.low >= LEAST_RETAINED and not self.failed

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
        in_points = self.failed and self.retained is not None and self.retained.high >= LEAST_RETAINED
        return self.paired.interval.words(1, " points") if in_points else ""

    @property
    def questions_needed(self) -> int:
        """Number of questions that an arm without loss needs; 0 if these are enough."""
        needed = recall_needed(self.family, self.paired.baseline, self.comparisons)
        return 0 if self.paired.questions >= needed else ceil(needed / self.judging_share)


def solves(family: str, baseline: float, questions: int) -> bool:
    """Return True if a baseline (accuracy in percent) solves a family of recall tasks, so that recall can be lost. Of
    questions that can be guessed, that must be shown, by independent texts.
    """
    declared = recall_family(family)
    if declared.choices is None:
        return baseline >= declared.least
    texts = max(1, questions // QUESTIONS_PER_TEXT)
    return 100 * wilson_low(round(baseline / 100 * texts), texts) > declared.least


def recall_needed(family: str, baseline: float, comparisons: int = 1) -> int:
    """Return the number of judging questions to ask so that an arm without loss is shown to keep recall.

    ``baseline`` is an accuracy in percent, above chance. An arm that loses nothing and changes 4 % of the answers is
    then shown to keep recall in about nine of ten cases if the model finds at least 65 % of the needles, and in three
    of four if it finds half of them.
    """
    least = least_questions(baseline, recall_family(family).chance, comparisons)
    return QUESTIONS_PER_TEXT * ceil(_SPARE * least / QUESTIONS_PER_TEXT)


def least_questions(baseline: float, chance: float, comparisons: int = 1) -> int:
    """Return the approximate number of questions with which identical answers keep recall.

    The bound adds one text that may be lost, so a share of 1 - (`TAIL` / comparisons)^(1 / texts) of all texts may be
    lost. ``baseline`` and ``chance`` are accuracies in percent, ``baseline`` above ``chance``.
    """
    spare = (100 - LEAST_RETAINED) / 100 * (baseline - chance)
    lost = LEAST_RETAINED + (100 - LEAST_RETAINED) / 100 * chance
    return QUESTIONS_PER_TEXT * ceil(log(TAIL / comparisons) / log(lost / (spare + lost)))


@dataclass(frozen=True)
class TaskVerdict:
    """Comparison of an arm with the baseline in a task or group; ``wide`` is the difference in percentage points, with
    its interval widened for the number of tasks.
    """

    task: str
    paired: PairedDifference
    wide: Interval

    @property
    def failed(self) -> bool:
        """True if the interval shows a loss of more than one point."""
        return shows_loss(self.wide.high, self.paired.texts)

    def points(self) -> str:
        return f"{self.task}: {self.wide.words(unit=' points')}"


def task_verdicts(scopes: Mapping[Scope, PairedDifference]) -> tuple[TaskVerdict, ...]:
    """Judge each task and group of a benchmark, clearest loss first."""
    tasks = {scope.task: paired for scope, paired in scopes.items() if scope.is_benchmark_task}
    verdicts = [TaskVerdict(task, paired, paired.simultaneous_interval(len(tasks))) for task, paired in tasks.items()]
    return tuple(sorted(verdicts, key=lambda verdict: (verdict.wide.high, verdict.wide.low, verdict.task)))


def least_visible_loss(paired: PairedDifference, tasks: int) -> float:
    """Return the smallest loss in points, at most 100, that the interval of one of ``tasks`` tasks shows in four of
    five cases: ``loss - MARGIN >= (t(TAIL / tasks) + t(1 - POWER)) * 100 * sqrt((loss / 100 + changed - (loss /
    100)**2) / texts)``. t(p) is the quantile of Student's t with the probability p beyond it. The root has the
    variance of a text's difference, if its questions change together: the share of changed answers minus the squared
    loss. ``changed`` is the part of these answers without a net loss, twice the smaller one of the shares of gained and
    lost answers.
    """
    texts = paired.texts
    changed = 2 * min(paired.gained, paired.lost) / paired.questions
    reach = t_quantile(TAIL / tasks, max(1, texts - 1)) + t_quantile(1 - POWER, max(1, texts - 1))
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


def for_comparisons(
    scopes: Mapping[Scope, PairedDifference], comparisons: int, recall: int | None = None
) -> dict[Scope, PairedDifference]:
    """Return comparisons whose intervals of the benchmark and of recall, in points and as the share that is left, are
    widened for so many arms: each interval then misses in 5 % divided by their number, so all together in at most 5 %.
    The difference of -1.5 points in the example of `compare` has the interval -3.46 to 0.06 for one arm, and -4.05 to
    0.53 for three. Intervals of tasks count the tasks alone. ``recall`` is the number of arms in recall; None stands
    for ``comparisons``.
    """
    corrected = dict(scopes)
    for scope, paired in scopes.items():
        if scope == BENCHMARK:
            corrected[scope] = _corrected(paired, comparisons)
        elif scope.is_recall_family:
            corrected[scope] = _corrected(paired, comparisons if recall is None else recall)
    return corrected


def _corrected(paired: PairedDifference, comparisons: int) -> PairedDifference:
    if comparisons == 1:
        return paired
    rare = rare_event_factor(comparisons)
    wide, further = paired.simultaneous_interval(comparisons), paired.interval.stretched(rare)
    if paired.few_differ:
        wide = Interval(min(wide.low, further.low), wide.value, max(wide.high, further.high))
    retained = paired.retained
    if retained is not None:
        widened = retained.stretched(rare)
        retained = Interval(max(-100.0, widened.low), widened.value, min(200.0, widened.high))
    return replace(paired, low=max(-100.0, wide.low), high=min(100.0, wide.high), retained=retained)


#: Columns of the table in shares and their attributes of ``PairedDifference`` in percent.
_PERCENT = {"baseline": "baseline", "accuracy": "arm", "difference": "difference", "low": "low", "high": "high"}
_PLAIN = ("questions", "gained", "lost", "p_value")
#: Columns of later schemas, NULL in older rows.
_LATER = ("texts", "texts_differ", "degrees_of_freedom")

#: Columns of the table and their fields of the retained ability.
_RETAINED = {"retained": "value", "retained_low": "low", "retained_high": "high"}


#: Most threads that compare arms: drawing bootstrap samples, most of the work, runs without Python's lock.
_MOST_THREADS = 8


class VerdictRows(NamedTuple):
    """The rows of ``arm_verdicts`` of one run, stored and computed."""

    stored: list[dict[str, Any]]
    computed: list[dict[str, Any]]

    def by_arm(self) -> dict[str, dict[Scope, PairedDifference]]:
        """Return all comparisons by arm id and scope."""
        return compared_by_arm([*self.stored, *self.computed])


class VerdictInputs(NamedTuple):
    """The stored rows of ``arm_verdicts`` of one run, and the answers of the arms that have none; ``sheets`` is None if
    all have rows.
    """

    rows: list[dict[str, Any]]
    baseline: FinishedArm
    missing: list[FinishedArm]
    sheets: AnswerSheets | None

    @classmethod
    def read(cls, store: Store, run_id: str, arms: FinishedArms) -> VerdictInputs:
        rows = store.query(
            "SELECT v.* FROM arm_verdicts v JOIN arms USING (arm_id) WHERE run_id = ? ORDER BY arm_id, task, recall",
            [run_id],
        ).to_pylist()
        stored = complete_rows(rows)
        known = {row["arm_id"] for row in stored}
        missing = [arm for arm in arms.others if arm.arm_id not in known]
        sheets = read_answers(store, arms.baseline, missing) if missing else None
        return cls(stored, arms.baseline, missing, sheets)

    def with_computed(self) -> VerdictRows:
        """Compute the missing rows. This takes long with many arms, so call it when the store is closed again."""
        if self.sheets is None:
            return VerdictRows(self.rows, [])
        compute = partial(verdict_rows, self.sheets, self.baseline)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
            return VerdictRows(self.rows, [row for rows in threads.map(compute, self.missing) for row in rows])


def read_verdict_rows(store: Store, run_id: str) -> VerdictRows:
    """Read a run's verdict rows; compute missing ones without writing them."""
    with store.reading():
        stored = VerdictInputs.read(store, run_id, finished_arms(store, run_id))
    return stored.with_computed()


def complete_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of arms whose rows have all columns. An upgraded store lacks the columns of later rules."""
    incomplete = {row["arm_id"] for row in rows if _lacks_columns(row)}
    return [row for row in rows if row["arm_id"] not in incomplete]


def _lacks_columns(row: Mapping[str, Any]) -> bool:
    if any(row[name] is None for name in _LATER):
        return True
    if row["recall"]:
        return row["informative"] is not None and row["retained"] is None
    return row["failed"] is None or row["informative"] is None


def record_verdicts(store: Store, run_id: str) -> None:
    """Write the verdict rows of finished arms that the store lacks. The job that evaluates calls this at its end."""
    computed = read_verdict_rows(store, run_id).computed
    if computed:
        store.add_verdicts(pa.Table.from_pylist(computed))


def verdict_rows(sheets: AnswerSheets, baseline: FinishedArm, arm: FinishedArm) -> list[dict[str, Any]]:
    """Return the ``arm_verdicts`` rows of an arm, for every scope."""
    rows = [_row(sheets, scope, baseline, arm) for scope in sheets.scopes]
    # Convert to shares and back before judging, so that rounding cannot make stored and computed verdicts differ.
    scopes = {Scope(row["task"], row["recall"]): _paired(row) for row in rows}
    tasks = {verdict.task: verdict for verdict in task_verdicts(scopes)}
    for row, (scope, paired) in zip(rows, scopes.items(), strict=True):
        if not scope.recall:
            row["informative"] = paired.above_chance
        if scope == BENCHMARK:
            worst = next(iter(tasks.values()))
            low, difference, high = worst.wide
            row |= {"failed": worst.failed, "worst_task": worst.task, "worst_difference": difference / 100}
            row |= {"worst_low": low / 100, "worst_high": high / 100}
        elif scope.is_benchmark_task:
            row["failed"] = tasks[scope.task].failed
        elif scope.is_recall_family:
            family = RecallVerdict(scope.task, paired)
            row |= {"informative": family.informative, "failed": family.failed, "kept": family.kept}
    return rows


def _row(sheets: AnswerSheets, scope: Scope, baseline: FinishedArm, arm: FinishedArm) -> dict[str, Any]:
    paired = sheets.compare(scope, sheets.correct[baseline.arm_id], sheets.correct[arm.arm_id])
    retained = paired.retained
    return {
        **dict.fromkeys(TABLES["arm_verdicts"].names),
        "arm_id": arm.arm_id,
        **scope._asdict(),
        **{column: getattr(paired, attribute) / 100 for column, attribute in _PERCENT.items()},
        **{name: getattr(paired, name) for name in (*_PLAIN, *_LATER)},
        "chance": None if paired.chance is None else paired.chance / 100,
        **{column: getattr(retained, attribute) / 100 for column, attribute in _RETAINED.items() if retained},
    }


def _paired(row: Mapping[str, Any]) -> PairedDifference:
    retained = {attribute: row[column] for column, attribute in _RETAINED.items() if row[column] is not None}
    # Rows of older schemas, which only count as comparisons of later verdicts, have estimates.
    questions, texts = row["questions"], row["questions"] if row["texts"] is None else row["texts"]
    estimates = {
        "texts": texts,
        "texts_differ": (row["gained"] + row["lost"]) * texts // questions,
        "degrees_of_freedom": max(1, texts - 1),
    }
    return PairedDifference(
        **{attribute: 100 * row[column] for column, attribute in _PERCENT.items()},
        **{name: row[name] for name in _PLAIN},
        **{name: estimate if row[name] is None else row[name] for name, estimate in estimates.items()},
        retained=Interval(**{attribute: 100 * share for attribute, share in retained.items()}) if retained else None,
        chance=None if row["chance"] is None else 100 * row["chance"],
    )


def compared_by_arm(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[Scope, PairedDifference]]:
    """Group rows of ``arm_verdicts`` by arm id and scope."""
    verdicts: dict[str, dict[Scope, PairedDifference]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: (row["arm_id"], row["task"], row["recall"])):
        verdicts[row["arm_id"]][Scope(row["task"], row["recall"])] = _paired(row)
    return dict(verdicts)
