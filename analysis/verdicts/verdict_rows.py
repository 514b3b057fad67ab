"""Answers of the finished arms of a run, verdicts on recall tasks and on single tasks, and their stored rows.

A benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574), so an arm must also keep
the model's recall: finding needles and copying text. The tasks of a family differ only in length and are judged
together.

The pooled accuracy can hide the loss of one small task. With many tasks some lose a little by chance, so each interval
is widened for their number: an arm without loss fails one of MMLU's 57 subjects in at most 1 % of cases; plain 95 %
intervals would fail it in up to half of them. A task of few questions therefore shows large losses only
(`least_visible_loss`).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import ceil, log, sqrt
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.analysis.errors import VerdictError
from headscan.analysis.store.records import CONTROL_KINDS_SQL, ArmKind
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import ALL_TASKS, TABLES
from headscan.analysis.store.verdict_limits import (
    LEAST_RETAINED,
    LEAST_TEXTS,
    MARGIN,
    POWER,
    QUESTIONS_PER_TEXT,
    TAIL,
)
from headscan.analysis.verdicts.paired import (
    Interval,
    PairedDifference,
    Sampling,
    compare_sampled,
    retained,
    shows_loss,
    t_quantile,
    wilson_low,
)
from headscan.catalog import recall_family


class FinishedArm(NamedTuple):
    """An arm with all answers; see the comments of the table ``arms``.

    Attributes:
        kv_shares: Share of the KV cache that a plan leaves, by length, as JSON; None for other arms.
        granularity: ``layer`` for a plan by layer; None for other arms.
        weights_left: Share of the weights' bytes that a pruned model keeps; None for other arms.
        replacement: None if the arm ablates no heads.
    """

    arm_id: str
    name: str
    kind: ArmKind
    score: str | None
    selection: str | None
    share: float | None
    zeroed_share: float | None
    kv_shares: str | None = None
    granularity: str | None = None
    weights_left: float | None = None
    cache_left: float | None = None
    layers_dropped: int | None = None
    replacement: str | None = None
    seed: int | None = None


#: Fields in the arm's settings, and their SQL types.
_SETTINGS = {
    "kv_shares": "VARCHAR",
    "granularity": "VARCHAR",
    "weights_left": "DOUBLE",
    "cache_left": "DOUBLE",
    "layers_dropped": "INTEGER",
}


class FinishedArms(NamedTuple):
    """The baseline, the other finished arms (controls last) and the number of unfinished arms."""

    baseline: FinishedArm
    others: tuple[FinishedArm, ...]
    unfinished: int


def can_be_judged(store: Store, run_id: str) -> bool:
    """Return True if the baseline and another arm of a run are finished."""
    kinds = store.query("SELECT kind FROM arms WHERE run_id = ? AND status = 'finished'", [run_id])["kind"].to_pylist()
    return kinds.count(ArmKind.BASELINE) == 1 and len(kinds) > 1


def finished_arms(store: Store, run_id: str) -> FinishedArms:
    """Return the finished arms of a run; raise VerdictError unless exactly one of them is a baseline."""
    columns = [name for name in FinishedArm._fields if name not in _SETTINGS]
    columns += [f"(config ->> '$.{name}')::{kind} AS {name}" for name, kind in _SETTINGS.items()]
    rows = store.query(
        f"SELECT {', '.join(columns)}, status = 'finished' AS finished FROM arms"
        f" WHERE run_id = ? ORDER BY kind IN ({CONTROL_KINDS_SQL}), started_at, name",
        [run_id],
    ).to_pylist()
    arms = [FinishedArm(**row | {"kind": ArmKind(row["kind"])}) for row in rows if row.pop("finished")]
    baselines = [arm for arm in arms if arm.kind is ArmKind.BASELINE]
    if len(baselines) != 1:
        raise VerdictError(
            f"run {run_id} has {len(baselines)} finished baselines (limit 1). Finish the run with `headscan evaluate`"
        )
    others = tuple(arm for arm in arms if arm.kind is not ArmKind.BASELINE)
    return FinishedArms(baselines[0], others, len(rows) - len(arms))


#: Suffix of a task that asks the documents of another task in cloze form.
CLOZE_SUFFIX = "_continuation"


class Scope(NamedTuple):
    """Questions judged together: task, group, recall family or benchmark."""

    task: str
    recall: bool

    @property
    def is_recall_family(self) -> bool:
        """True for a family of recall tasks: needle, but not needle@512."""
        return self.recall and "@" not in self.task

    @property
    def is_benchmark_task(self) -> bool:
        """True for a task of the benchmark or a group of them."""
        return not self.recall and self.task != ALL_TASKS


BENCHMARK = Scope(ALL_TASKS, False)


@dataclass(frozen=True)
class AnswerSheets:
    """Answers of several arms to the same questions.

    Attributes:
        tasks: (questions,) number of each question's task; a task and its cloze form share one number.
        texts: (questions,) number of each question's text within its task; several recall questions share a text, and
            so do the two forms of a question.
        chance: (questions,) accuracy of guessing, 0 to 1; NaN if it is unknown.
        correct: (questions,) 0 to 1, by arm id.
        scopes: (questions,) bool, whether the question is in the scope, by scope.
    """

    tasks: np.ndarray
    texts: np.ndarray
    chance: np.ndarray
    correct: Mapping[str, np.ndarray]
    scopes: Mapping[Scope, np.ndarray]
    _asked: dict[Scope, _Asked] = field(default_factory=dict, init=False, compare=False, repr=False)

    def compare(self, scope: Scope, baseline: np.ndarray, arm: np.ndarray) -> PairedDifference:
        """Return the paired difference in a scope; ``baseline`` and ``arm`` are (questions,)."""
        if scope not in self._asked:
            self._asked[scope] = _Asked.of(self, scope)
        asked = self._asked[scope]
        ours, theirs = arm[asked.questions], baseline[asked.questions]
        paired = compare_sampled(theirs, ours, asked.sampling)
        if not scope.recall:
            return paired if asked.chance is None else replace(paired, chance=asked.chance)
        if not scope.is_recall_family:
            return paired
        return replace(paired, retained=retained(theirs, ours, asked.texts, recall_family(scope.task).chance))

    def difference(self, scope: Scope, baseline: np.ndarray, arm: np.ndarray) -> float:
        """Return the mean paired difference in percentage points; `compare` also computes its interval."""
        counts = self.scopes[scope]
        return 100 * float((arm[counts] - baseline[counts]).mean())

    def only(self, kept: np.ndarray) -> AnswerSheets:
        """Return sheets of the questions in ``kept``, (questions,) bool; empty scopes are removed."""
        return AnswerSheets(
            tasks=self.tasks[kept],
            texts=self.texts[kept],
            chance=self.chance[kept],
            correct={arm_id: correct[kept] for arm_id, correct in self.correct.items()},
            scopes={scope: counts[kept] for scope, counts in self.scopes.items() if counts[kept].any()},
        )


@dataclass(frozen=True)
class _Asked:
    """What all arms share in a scope.

    Attributes:
        questions: Indices of its questions.
        texts: (questions,) number of each question's text, distinct between tasks.
        chance: Accuracy of guessing in percent; None if it is unknown.
    """

    questions: np.ndarray
    texts: np.ndarray
    sampling: Sampling
    chance: float | None

    @classmethod
    def of(cls, sheets: AnswerSheets, scope: Scope) -> _Asked:
        questions = np.flatnonzero(sheets.scopes[scope])
        tasks, texts, guessed = (each[questions] for each in (sheets.tasks, sheets.texts, sheets.chance))
        unknown = np.isnan(guessed)
        chance = None if unknown.all() else 100 * float(np.where(unknown, 0, guessed).mean())
        own_text = tasks * (1 + sheets.texts.max()) + texts
        return cls(questions, own_text, Sampling(len(questions), tasks, texts), chance)


def read_answers(store: Store, baseline: FinishedArm, others: Sequence[FinishedArm]) -> AnswerSheets:
    """Return the answers of a baseline and of other arms."""
    table = store.query(
        "SELECT arm_id, task, question, recall, doc_hash, correct FROM answers"
        " WHERE correct IS NOT NULL AND list_contains(?, arm_id) ORDER BY arm_id, task, question",
        [[arm.arm_id for arm in (baseline, *others)]],
    )
    sheets = _by_arm(table)
    empty = table.slice(0, 0)
    asked = sheets.get(baseline.arm_id, empty)
    for arm in others:
        _check_questions(arm, sheets.get(arm.arm_id, empty), asked)
    tasks = asked["task"].to_numpy()
    numbers = asked["question"].to_numpy()
    return AnswerSheets(
        tasks=_task_numbers(tasks),
        texts=np.where(asked["recall"].to_numpy(), numbers // QUESTIONS_PER_TEXT, numbers),
        chance=_chance(store, baseline, tasks),
        correct={arm_id: sheet["correct"].to_numpy() for arm_id, sheet in sheets.items()},
        scopes=_scopes(store, baseline, tasks),
    )


def _chance(store: Store, baseline: FinishedArm, tasks: np.ndarray) -> np.ndarray:
    """Return 1 / choices, the accuracy of guessing, for each question. NaN stands for answers without choices
    (generated texts, a single likelihood) and for tasks with partial credit, whose grade is not that of the likeliest
    choice. Choices that differ in frequency can be guessed more often.
    """
    found = store.query(
        "SELECT task, len(log_likelihoods) AS choices, bool_and(correct IN (0, 1)) OVER (PARTITION BY task) AS whole"
        " FROM answers WHERE arm_id = ? AND correct IS NOT NULL ORDER BY task, question",
        [baseline.arm_id],
    )
    assert found.num_rows == len(tasks)
    choices = np.array(
        [
            n if n is not None and n > 1 and w else np.nan
            for n, w in zip(found["choices"].to_pylist(), found["whole"].to_pylist(), strict=True)
        ],
        dtype=float,
    )
    return 1 / choices


def _task_numbers(tasks: np.ndarray) -> np.ndarray:
    """Return task numbers; a task and its cloze form share one, because the bootstrap draws the documents of both."""
    names, number = np.unique(tasks, return_inverse=True)
    plain = [name.removesuffix(CLOZE_SUFFIX) for name in names]
    forms = [base if base in names else name for name, base in zip(names, plain, strict=True)]
    return np.unique(forms, return_inverse=True)[1][number]


def _by_arm(table: pa.Table) -> dict[str, pa.Table]:
    """Split ``table``, sorted by arm, into one table per arm id."""
    sheets, start = {}, 0
    for count in table["arm_id"].value_counts().to_pylist():
        sheets[count["values"]] = table.slice(start, count["counts"])
        start += count["counts"]
    return sheets


def _check_questions(arm: FinishedArm, sheet: pa.Table, asked: pa.Table) -> None:
    if not sheet.drop_columns(["arm_id", "correct"]).equals(asked.drop_columns(["arm_id", "correct"])):
        other = f"{sheet.num_rows} questions (baseline {asked.num_rows})"
        if sheet.num_rows == asked.num_rows:
            other = f"{sheet.num_rows} questions that differ from the baseline's"
        raise VerdictError(f"arm {arm.name} answered {other}. Evaluate it again")


def _scopes(store: Store, baseline: FinishedArm, tasks: np.ndarray) -> dict[Scope, np.ndarray]:
    rows = store.query(
        "SELECT scope, recall, list(DISTINCT task) AS tasks FROM"
        " (SELECT task, recall, unnest(task_scopes(task, recall)) AS scope FROM answers"
        " WHERE arm_id = ? AND correct IS NOT NULL) GROUP BY scope, recall ORDER BY scope, recall",
        [baseline.arm_id],
    ).to_pylist()
    scopes = {Scope(row["scope"], row["recall"]): np.isin(tasks, row["tasks"]) for row in rows}
    for group, members in _groups(store, baseline).items():
        inside = np.isin(tasks, members)
        # A group equal to the benchmark or to one task would repeat that scope.
        if inside.any() and not any(np.array_equal(inside, counts) for counts in scopes.values()):
            scopes[Scope(group, False)] = inside
    return scopes


def _groups(store: Store, baseline: FinishedArm) -> dict[str, list[str]]:
    """Return the tasks of each requested group; runs of older versions have no groups."""
    (row,) = store.query(
        "SELECT runs.config->>'groups' AS groups FROM runs JOIN arms USING (run_id) WHERE arm_id = ?", [baseline.arm_id]
    ).to_pylist()
    return json.loads(row["groups"]) if row["groups"] else {}


#: Safety factor on the number of recall questions. With the least number, identical answers pass in only half of the
#: runs, because the baseline's accuracy varies.
_SPARE = 1.5


@dataclass(frozen=True)
class RecallVerdict:
    """Comparison of an arm with the baseline in a recall family.

    Attributes:
        part: Share of the run's recall questions that judge; the others select the best arm of a sweep.
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
        """True if the arm loses more than a tenth of the ability, or more than one point."""
        kept = self.paired.retained
        if kept is None or not self.informative:
            return False
        return (kept.high < LEAST_RETAINED and self.texts >= LEAST_TEXTS) or shows_loss(self.paired.high, self.texts)

    @property
    def kept(self) -> bool:
        """True if the arm keeps at least nine tenths of the ability."""
        kept = self.paired.retained
        return self.informative and kept is not None and kept.low >= LEAST_RETAINED and not self.failed

    @property
    def left(self) -> Interval | None:
        """Share of the ability that is left, in percent; None if the baseline does not solve the task."""
        kept = self.paired.retained
        return kept if self.informative else None

    def share_left(self) -> str:
        """Return the retained share of the ability with its interval."""
        kept = self.paired.retained
        return "unknown" if kept is None else f"{kept.value:.0f} % [{kept.low:.0f} %, {kept.high:.0f} %]"

    def loss_left(self) -> str:
        """Return the retained share, and the loss in points if the share alone does not show it."""
        kept, p = self.paired.retained, self.paired
        in_points = self.failed and kept is not None and kept.high >= LEAST_RETAINED
        points = f" ({p.interval.words(1, ' points')})" if in_points else ""
        return f"{self.share_left()}{points}"

    def points(self) -> str:
        """Return the family and what is left of it."""
        return f"{self.family} {self.loss_left()}"

    def wanting(self) -> str:
        """Return the required number of questions in words; empty if there are enough."""
        needed = recall_needed(self.family, self.paired.baseline, self.comparisons)
        return "" if self.paired.questions >= needed else f"about {ceil(needed / self.part):,} {self.family} questions"


def solves(family: str, baseline: float, questions: int) -> bool:
    """Return True if a baseline (accuracy in percent) solves a family of recall tasks, so that recall can be lost."""
    declared = recall_family(family)
    if declared.choices is None:
        return baseline >= declared.least
    return 100 * wilson_low(round(baseline / 100 * questions), questions) > declared.least


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
        return shows_loss(self.wide.high, self.paired.questions)

    def points(self) -> str:
        return f"{self.task}: {self.wide.words(unit=' points')}"


def task_verdicts(scopes: Mapping[Scope, PairedDifference]) -> tuple[TaskVerdict, ...]:
    """Judge each task and group of a benchmark, clearest loss first."""
    tasks = {scope.task: paired for scope, paired in scopes.items() if scope.is_benchmark_task}
    verdicts = [TaskVerdict(task, paired, paired.among(len(tasks))) for task, paired in tasks.items()]
    return tuple(sorted(verdicts, key=lambda verdict: (verdict.wide.high, verdict.wide.low, verdict.task)))


def least_visible_loss(paired: PairedDifference, tasks: int) -> float:
    """Return the smallest loss in points, at most 100, that the interval of one of ``tasks`` tasks shows in four of
    five cases: ``loss - MARGIN >= (t(TAIL / tasks) + t(1 - POWER)) * 100 * sqrt((loss / 100 + changed - (loss /
    100)**2) / questions)``, where t has that probability beyond it, and ``changed`` is twice the smaller one of the
    shares of gained and lost answers: the variance of a question's difference is the share of changed answers minus the
    squared loss.
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


#: Columns of the table in shares and their attributes of ``PairedDifference`` in percent.
_PERCENT = {"baseline": "baseline", "accuracy": "arm", "difference": "difference", "low": "low", "high": "high"}
_PLAIN = ("questions", "gained", "lost", "p_value")

#: Columns of the table and their fields of the retained ability.
_RETAINED = {"retained": "value", "retained_low": "low", "retained_high": "high"}


#: Most threads that compare arms: drawing bootstrap samples, most of the work, runs without Python's lock.
_MOST_THREADS = 8


class VerdictRows(NamedTuple):
    """The rows of ``arm_verdicts`` of one run, stored and computed."""

    stored: list[dict[str, Any]]
    computed: list[dict[str, Any]]


def read_verdict_rows(store: Store, run_id: str) -> VerdictRows:
    """Read a run's verdict rows; compute missing ones without writing them."""
    with store.reading():
        baseline, others, _ = finished_arms(store, run_id)
        rows = store.query(
            "SELECT v.* FROM arm_verdicts v JOIN arms USING (arm_id) WHERE run_id = ? ORDER BY arm_id, task, recall",
            [run_id],
        ).to_pylist()
        stored = complete_rows(rows)
        known = {row["arm_id"] for row in stored}
        missing = [arm for arm in others if arm.arm_id not in known]
        if not missing:
            return VerdictRows(stored, [])
        sheets = read_answers(store, baseline, missing)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        computed = threads.map(lambda arm: verdict_rows(sheets, baseline, arm), missing)
        return VerdictRows(stored, [row for rows in computed for row in rows])


def complete_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of arms whose rows have all columns. An upgraded store lacks the columns of later rules."""
    incomplete = {row["arm_id"] for row in rows if _lacks_columns(row)}
    return [row for row in rows if row["arm_id"] not in incomplete]


def _lacks_columns(row: Mapping[str, Any]) -> bool:
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
            row |= _worst_columns(next(iter(tasks.values())))
        elif scope.is_benchmark_task:
            row["failed"] = tasks[scope.task].failed
        elif scope.is_recall_family:
            family = RecallVerdict(scope.task, paired)
            row |= {"informative": family.informative, "failed": family.failed, "kept": family.kept}
    return rows


def _row(sheets: AnswerSheets, scope: Scope, baseline: FinishedArm, arm: FinishedArm) -> dict[str, Any]:
    paired = sheets.compare(scope, sheets.correct[baseline.arm_id], sheets.correct[arm.arm_id])
    kept = paired.retained
    return {
        **dict.fromkeys(TABLES["arm_verdicts"].names),
        "arm_id": arm.arm_id,
        **scope._asdict(),
        **{column: getattr(paired, attribute) / 100 for column, attribute in _PERCENT.items()},
        **{name: getattr(paired, name) for name in _PLAIN},
        "chance": None if paired.chance is None else paired.chance / 100,
        **{column: getattr(kept, attribute) / 100 for column, attribute in _RETAINED.items() if kept},
    }


def _worst_columns(worst: TaskVerdict) -> dict[str, Any]:
    return {
        "failed": worst.failed,
        "worst_task": worst.task,
        "worst_difference": worst.wide.value / 100,
        "worst_low": worst.wide.low / 100,
        "worst_high": worst.wide.high / 100,
    }


def _paired(row: Mapping[str, Any]) -> PairedDifference:
    kept = {attribute: row[column] for column, attribute in _RETAINED.items() if row[column] is not None}
    return PairedDifference(
        **{attribute: 100 * row[column] for column, attribute in _PERCENT.items()},
        **{name: row[name] for name in _PLAIN},
        retained=Interval(**{attribute: 100 * share for attribute, share in kept.items()}) if kept else None,
        chance=None if row["chance"] is None else 100 * row["chance"],
    )


def compared_by_arm(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[Scope, PairedDifference]]:
    """Group rows of ``arm_verdicts`` by arm id and scope."""
    verdicts: dict[str, dict[Scope, PairedDifference]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: (row["arm_id"], row["task"], row["recall"])):
        verdicts[row["arm_id"]][Scope(row["task"], row["recall"])] = _paired(row)
    return dict(verdicts)
