"""Answers of the finished arms of a run to the same questions, and the scopes of questions that are judged together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headscan.catalog import recall_family
from headscan.errors import VerdictError
from headscan.store.records import CONTROL_KINDS_SQL, ArmKind, ArmRecord
from headscan.store.store import Store
from headscan.store.tables import ALL_TASKS, EXPECTED_TASKS
from headscan.store.verdict_limits import QUESTIONS_PER_TEXT
from headscan.verdicts.paired import PairedDifference, QuestionClusters, paired_difference, retained_share


class FinishedArms(NamedTuple):
    """The baseline, the other finished arms (controls last) and the number of unfinished arms."""

    baseline: ArmRecord
    others: tuple[ArmRecord, ...]
    unfinished: int


def can_be_judged(store: Store, run_id: str) -> bool:
    """Return True if one baseline and another arm of a run are finished; False for a run that is not far enough yet."""
    try:
        return bool(finished_arms(store, run_id).others)
    except VerdictError:
        return False


def finished_arms(store: Store, run_id: str) -> FinishedArms:
    """Return the finished arms of a run, and those that a later look asks with their last finished look; raise
    VerdictError unless exactly one of them is a baseline.
    """
    names = [each.name for each in fields(ArmRecord)]
    rows = store.query(
        f"SELECT {', '.join(names)}, status FROM arms WHERE run_id = ?"
        f" ORDER BY kind IN ({CONTROL_KINDS_SQL}), started_at, name",
        [run_id],
    ).to_pylist()
    arms = list[ArmRecord]()
    for row in rows:
        if (running := row.pop("status") != "finished") and (row["look"] or 1) == 1:
            continue
        look = None if row["look"] is None else row["look"] - running
        config = json.loads(row["config"])
        arms.append(ArmRecord(**{**row, "kind": ArmKind(row["kind"]), "config": config, "look": look}))
    baselines = [arm for arm in arms if arm.kind is ArmKind.BASELINE]
    if len(baselines) != 1:
        raise VerdictError(f"run {run_id} has {len(baselines)} finished baselines (limit 1). Run its command again")
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
        return not self.recall and self.task not in (ALL_TASKS, EXPECTED_TASKS)


BENCHMARK = Scope(ALL_TASKS, False)
#: The questions of the benchmark, where an answer among choices counts by the probability of the right one.
EXPECTED = Scope(EXPECTED_TASKS, False)


@dataclass(frozen=True)
class AnswerSheets:
    """Answers of several arms to the same questions.

    Attributes:
        tasks: (questions,) number of each question's task; a task and its cloze form share one number.
        texts: (questions,) number of each question's text within its task; several recall questions share a text, and
            so do the two forms of a question.
        documents: (questions,) number of the document that each question is made from; -1 if it is unknown.
        chance: (questions,) accuracy of guessing, 0 to 1; NaN if it is unknown.
        correct: (questions,) 0 to 1, by arm id.
        expected: (questions,) the same where the stored scores of the choices decide the answer: the probability of the
            right choice, the softmax of the scores. Its mean is the accuracy that is expected if answers are drawn from
            it, and differs between arms by much less chance than the count.
        scopes: (questions,) bool, whether the question is in the scope, by scope.
    """

    tasks: np.ndarray
    texts: np.ndarray
    chance: np.ndarray
    correct: Mapping[str, np.ndarray]
    scopes: Mapping[Scope, np.ndarray]
    expected: Mapping[str, np.ndarray] = field(default_factory=dict)
    documents: np.ndarray | None = None
    _scope_questions: dict[Scope, _ScopeQuestions] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answers(self, scope: Scope, arm_id: str) -> np.ndarray:
        """Return the answers (questions,) of an arm that count in a scope, 0 to 1."""
        return (self.expected if scope == EXPECTED else self.correct)[arm_id]

    def compare(self, scope: Scope, baseline: np.ndarray, arm: np.ndarray) -> PairedDifference:
        """Return the paired difference in a scope; ``baseline`` and ``arm`` are (questions,)."""
        if scope not in self._scope_questions:
            self._scope_questions[scope] = _ScopeQuestions.of(self, scope)
        questions = self._scope_questions[scope]
        baseline_answers, arm_answers = baseline[questions.indices], arm[questions.indices]
        paired = paired_difference(baseline_answers, arm_answers, questions.clusters)
        if not scope.recall:
            return paired if questions.chance is None else replace(paired, chance=questions.chance)
        if not scope.is_recall_family:
            return paired
        chance = recall_family(scope.task).chance
        return replace(paired, retained=retained_share(baseline_answers, arm_answers, questions.texts, chance))

    def difference(self, scope: Scope, baseline: np.ndarray, arm: np.ndarray) -> float:
        """Return the mean paired difference in percentage points; `compare` also computes its interval."""
        in_scope = self.scopes[scope]
        return 100 * float((arm[in_scope] - baseline[in_scope]).mean())

    def only(self, kept: np.ndarray) -> AnswerSheets:
        """Return sheets of the questions in ``kept``, (questions,) bool; empty scopes are removed."""
        return AnswerSheets(
            tasks=self.tasks[kept],
            texts=self.texts[kept],
            chance=self.chance[kept],
            correct={arm_id: correct[kept] for arm_id, correct in self.correct.items()},
            expected={arm_id: expected[kept] for arm_id, expected in self.expected.items()},
            documents=None if self.documents is None else self.documents[kept],
            scopes={scope: in_scope[kept] for scope, in_scope in self.scopes.items() if in_scope[kept].any()},
        )


@dataclass(frozen=True)
class _ScopeQuestions:
    """The questions of a scope, by their indices in the sheets, with the number of each question's text (questions,),
    distinct between tasks, and the accuracy of guessing in percent; None if it is unknown.
    """

    indices: np.ndarray
    texts: np.ndarray
    clusters: QuestionClusters
    chance: float | None

    @classmethod
    def of(cls, sheets: AnswerSheets, scope: Scope) -> _ScopeQuestions:
        indices = np.flatnonzero(sheets.scopes[scope])
        tasks, texts_in_task, chances = sheets.tasks[indices], sheets.texts[indices], sheets.chance[indices]
        unknown = np.isnan(chances)
        chance = None if unknown.all() else 100 * float(np.where(unknown, 0, chances).mean())
        texts = tasks * (1 + sheets.texts.max()) + texts_in_task
        documents = None if sheets.documents is None else sheets.documents[indices]
        if documents is not None and (documents < 0).any():
            documents = None
        return cls(indices, texts, QuestionClusters(len(indices), tasks, texts_in_task, documents), chance)


def read_answers(store: Store, baseline: ArmRecord, others: Sequence[ArmRecord]) -> AnswerSheets:
    """Return the answers of a baseline and of other arms, which were asked the same questions. Where looks asked the
    baseline more, those that the others were asked count.
    """
    asked = next((arm for arm in others if arm.look != baseline.look), None)
    table = store.query(
        f"WITH scored AS ({_SCORED_TASKS})"
        " SELECT arm_id, task, question, recall, doc_hash, document, correct, len(log_likelihoods) AS choices,"
        " CASE WHEN task IN (FROM scored) THEN"
        " 1 / list_sum(list_transform(log_likelihoods, lambda x: exp(x - log_likelihoods[target::INT + 1]))) END"
        " AS expected FROM answers"
        f" WHERE correct IS NOT NULL AND list_contains($2, arm_id) AND {_ASKED} ORDER BY arm_id, task, question",
        [baseline.arm_id, [arm.arm_id for arm in (baseline, *others)], None if asked is None else asked.arm_id],
    )
    sheets = _by_arm(table)
    empty = table.slice(0, 0)
    baseline_sheet = sheets.get(baseline.arm_id, empty)
    for arm in others:
        _check_questions(arm, sheets.get(arm.arm_id, empty), baseline_sheet)
    tasks = baseline_sheet["task"].to_numpy()
    numbers = baseline_sheet["question"].to_numpy()
    scopes = _scopes(store, baseline, tasks)
    expected = {}
    if BENCHMARK in scopes and baseline_sheet["expected"].null_count < len(tasks):
        scopes[EXPECTED] = scopes[BENCHMARK]
        expected = {arm_id: _expected(sheet) for arm_id, sheet in sheets.items()}
    return AnswerSheets(
        tasks=_task_numbers(tasks),
        texts=np.where(baseline_sheet["recall"].to_numpy(), numbers // QUESTIONS_PER_TEXT, numbers),
        chance=_chance(baseline_sheet, tasks),
        correct={arm_id: sheet["correct"].to_numpy() for arm_id, sheet in sheets.items()},
        scopes=scopes,
        expected=expected,
        documents=_document_numbers(baseline_sheet["document"]),
    )


def _document_numbers(names: pa.ChunkedArray) -> np.ndarray | None:
    """Return the number of each question's document, -1 where it is unknown; None if all are."""
    if names.null_count == len(names):
        return None
    known = names.is_valid().to_numpy()
    return np.where(known, np.unique(names.fill_null("").to_numpy(), return_inverse=True)[1], -1)


#: Condition on a question: the arm $3 was asked it, or there is no such arm.
_ASKED = "($3 IS NULL OR (task, question) IN (SELECT (task, question) FROM answers WHERE arm_id = $3))"
#: Tasks of the benchmark whose answers are the choices with the highest stored scores, in every answer of the baseline.
#: A task that is graded by another ranking, such as scores by character, is counted.
_SCORED_TASKS = """
    SELECT task FROM answers WHERE arm_id = $1 AND NOT recall AND correct IS NOT NULL GROUP BY task
    HAVING bool_and(coalesce(
        len(log_likelihoods) > 1 AND TRY_CAST(target AS INT) BETWEEN 0 AND len(log_likelihoods) - 1
        AND correct = (list_position(log_likelihoods, list_max(log_likelihoods)) - 1 = TRY_CAST(target AS INT))::INT,
        false
    ))
"""


def _expected(sheet: pa.Table) -> np.ndarray:
    """Return the probability of the right choice of each answer (questions,), or what is counted where there is none.
    A right choice without any likelihood has none.
    """
    expected, counted = sheet["expected"].to_numpy(), sheet["correct"].to_numpy()
    impossible = np.isnan(expected) & sheet["expected"].is_valid().to_numpy()
    return np.where(impossible, 0.0, np.where(np.isnan(expected), counted, expected))


def _chance(sheet: pa.Table, tasks: np.ndarray) -> np.ndarray:
    """Return 1 / choices, the accuracy of guessing, for each question of the baseline. NaN stands for answers without
    choices (generated texts, a single likelihood) and for tasks with partial credit, whose grade is not that of the
    likeliest choice. Choices that differ in frequency can be guessed more often.
    """
    credit = np.unique(tasks[~np.isin(sheet["correct"].to_numpy(), (0, 1))])
    choices = sheet["choices"].fill_null(0).to_numpy().astype(float)
    return np.where((choices > 1) & ~np.isin(tasks, credit), 1 / np.maximum(choices, 1), np.nan)


def _task_numbers(tasks: np.ndarray) -> np.ndarray:
    """Return task numbers; a task and its cloze form share one, because the bootstrap draws the documents of both."""
    names, name_index = np.unique(tasks, return_inverse=True)
    plain_names = [name.removesuffix(CLOZE_SUFFIX) for name in names]
    shared_names = [plain if plain in names else name for name, plain in zip(names, plain_names, strict=True)]
    return np.unique(shared_names, return_inverse=True)[1][name_index]


def _by_arm(table: pa.Table) -> dict[str, pa.Table]:
    """Split ``table``, sorted by arm, into one table per arm id."""
    sheets, start = {}, 0
    for count in table["arm_id"].value_counts().to_pylist():
        sheets[count["values"]] = table.slice(start, count["counts"])
        start += count["counts"]
    return sheets


def _check_questions(arm: ArmRecord, sheet: pa.Table, baseline_sheet: pa.Table) -> None:
    asked = ["task", "question", "recall", "doc_hash"]
    if not sheet.select(asked).equals(baseline_sheet.select(asked)):
        questions = f"{sheet.num_rows} questions (baseline {baseline_sheet.num_rows})"
        if sheet.num_rows == baseline_sheet.num_rows:
            questions = f"{sheet.num_rows} questions that differ from the baseline's"
        raise VerdictError(f"arm {arm.name} answered {questions}. Evaluate it again")


def _scopes(store: Store, baseline: ArmRecord, tasks: np.ndarray) -> dict[Scope, np.ndarray]:
    rows = store.query(
        "SELECT scope, recall, list(DISTINCT task) AS tasks FROM"
        " (SELECT task, recall, unnest(task_scopes(task, recall)) AS scope FROM answers"
        " WHERE arm_id = ? AND correct IS NOT NULL) GROUP BY scope, recall ORDER BY scope, recall",
        [baseline.arm_id],
    ).to_pylist()
    scopes = {Scope(row["scope"], row["recall"]): np.isin(tasks, row["tasks"]) for row in rows}
    scopes = {scope: in_scope for scope, in_scope in scopes.items() if in_scope.any()}  # a look asks a part of them
    for group, members in _groups(store, baseline).items():
        in_group = np.isin(tasks, members)
        # A group equal to the benchmark or to one task would repeat that scope.
        if in_group.any() and not any(np.array_equal(in_group, in_scope) for in_scope in scopes.values()):
            scopes[Scope(group, False)] = in_group
    return scopes


def _groups(store: Store, baseline: ArmRecord) -> dict[str, list[str]]:
    """Return the tasks of each requested group; empty without groups."""
    (row,) = store.query(
        "SELECT runs.config->>'groups' AS groups FROM runs JOIN arms USING (run_id) WHERE arm_id = ?", [baseline.arm_id]
    ).to_pylist()
    return json.loads(row["groups"]) if row["groups"] else {}
