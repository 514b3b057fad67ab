"""Rows of ``arm_verdicts``: the differences of each arm from the baseline, with the verdicts on tasks and recall.

`record_verdicts` writes the rows of a run at the end of its job. A reader computes those that the store lacks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from headscan.store.records import ArmRecord
from headscan.store.store import Store
from headscan.store.tables import TABLES
from headscan.verdicts.answer_sheets import EXPECTED, AnswerSheets, Scope, finished_arms, read_answers
from headscan.verdicts.paired import Interval, PairedDifference
from headscan.verdicts.scope_verdicts import RecallVerdict, TaskVerdict, task_verdicts

#: Maximum number of threads that compare arms: drawing bootstrap samples, most of the work, runs without Python's lock.
_MAX_THREADS = 8


def record_verdicts(store: Store, run_id: str) -> None:
    """Write the verdict rows of finished arms that the store lacks. The job that evaluates calls this at its end."""
    computed = read_verdict_rows(store, run_id).computed
    if computed:
        store.add_verdicts(pa.Table.from_pylist(computed))


class VerdictRows(NamedTuple):
    """The rows of ``arm_verdicts`` of one run: those of the store, and those that it lacks."""

    stored: list[dict[str, Any]]
    computed: list[dict[str, Any]]


def read_verdict_rows(store: Store, run_id: str) -> VerdictRows:
    """Read a run's verdict rows; compute missing ones without writing them."""
    with store.reading():
        arms = finished_arms(store, run_id)
        stored = store.query(
            "SELECT v.* FROM arm_verdicts v JOIN arms USING (arm_id) WHERE run_id = ? ORDER BY arm_id, task, recall",
            [run_id],
        ).to_pylist()
        stored_ids = {row["arm_id"] for row in stored}
        arms_without_rows = [arm for arm in arms.others if arm.arm_id not in stored_ids]
        if not arms_without_rows:
            return VerdictRows(stored, [])
        looks = [[*of_look] for _, of_look in groupby(sorted(arms_without_rows, key=_look), key=_look)]
        sheets = [(read_answers(store, arms.baseline, of_look), of_look) for of_look in looks]
    # The store is closed again, so that others can write to it: comparing many arms takes long.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        rows_by_arm = [
            rows
            for answers, of_look in sheets
            for rows in threads.map(partial(rows_of_arm, answers, arms.baseline), of_look)
        ]
    return VerdictRows(stored, [row for arm_rows in rows_by_arm for row in arm_rows])


def _look(arm: ArmRecord) -> int:
    """Return the last look of an arm, which decides the questions that it was asked."""
    return arm.look or 0


def rows_of_arm(answers: AnswerSheets, baseline: ArmRecord, arm: ArmRecord) -> list[dict[str, Any]]:
    """Return the ``arm_verdicts`` rows of an arm, for every scope."""
    rows = []
    for scope in answers.scopes:
        paired = answers.compare(scope, *(answers.answers(scope, each.arm_id) for each in (baseline, arm)))
        rows.append(_verdict_row(arm, scope, paired))
    # Verdicts follow from the numbers of the rows, so that rounding cannot make stored and computed ones differ.
    differences = {Scope(row["task"], row["recall"]): _difference(row) for row in rows}
    tasks = task_verdicts(differences)
    return [
        row | _verdict_columns(scope, paired, tasks)
        for row, (scope, paired) in zip(rows, differences.items(), strict=True)
    ]


def _verdict_columns(scope: Scope, paired: PairedDifference, tasks: Sequence[TaskVerdict]) -> dict[str, Any]:
    """Return the columns of a scope's row that hold verdicts; ``tasks`` are the verdicts on all tasks of the arm."""
    if scope.is_recall_family:
        recall = RecallVerdict(scope.task, paired)
        return {"informative": recall.informative, "failed": recall.failed, "kept": recall.kept}
    if scope.recall:
        return {}
    columns: dict[str, Any] = {"informative": paired.above_chance}
    if scope == EXPECTED:
        return columns | {"failed": paired.shows_loss()}
    if scope.is_benchmark_task:
        return columns | {"failed": any(verdict.failed for verdict in tasks if verdict.task == scope.task)}
    worst = tasks[0]
    low, difference, high = (points / 100 for points in worst.wide)
    columns |= {"failed": worst.failed, "worst_task": worst.task}
    return columns | {"worst_difference": difference, "worst_low": low, "worst_high": high}


def differences_by_arm(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[Scope, PairedDifference]]:
    """Return the differences in rows of ``arm_verdicts`` by arm id and scope."""
    differences: dict[str, dict[Scope, PairedDifference]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: (row["arm_id"], row["task"], row["recall"])):
        differences[row["arm_id"]][Scope(row["task"], row["recall"])] = _difference(row)
    return dict(differences)


#: Columns that hold shares, and their fields of `PairedDifference` in percent.
_SHARES = {
    "baseline": "baseline",
    "accuracy": "arm",
    "difference": "difference",
    "low": "low",
    "high": "high",
    "standard_error": "standard_error",
}
#: Columns that hold lists of shares, and are fields in percent.
_ENDS = ("lows", "highs")
#: Columns that hold shares, and their fields of `PairedDifference.retained` in percent.
_RETAINED_SHARES = {"retained": "value", "retained_low": "low", "retained_high": "high"}
#: Columns with the numbers of the fields of the same name.
_EQUAL_COLUMNS = ("questions", "gained", "lost", "p_value", "texts", "texts_differ", "documents")


def _verdict_row(arm: ArmRecord, scope: Scope, paired: PairedDifference) -> dict[str, Any]:
    """Return the row of a difference, without verdicts; `_difference` reads it."""
    retained = paired.retained
    return {
        **dict.fromkeys(TABLES["arm_verdicts"].names),
        "arm_id": arm.arm_id,
        **scope._asdict(),
        **{column: getattr(paired, name) / 100 for column, name in _SHARES.items()},
        **{name: [end / 100 for end in getattr(paired, name)] for name in _ENDS},
        **{name: getattr(paired, name) for name in _EQUAL_COLUMNS},
        "chance": None if paired.chance is None else paired.chance / 100,
        **{column: getattr(retained, name) / 100 for column, name in _RETAINED_SHARES.items() if retained},
    }


def _difference(row: Mapping[str, Any]) -> PairedDifference:
    """Return the difference in a row, which `_verdict_row` made."""
    retained = {name: 100 * row[column] for column, name in _RETAINED_SHARES.items() if row[column] is not None}
    ends: dict[str, Any] = {name: tuple(100 * end for end in row[name]) for name in _ENDS}
    return PairedDifference(
        **{name: 100 * row[column] for column, name in _SHARES.items()},
        **ends,
        **{name: row[name] for name in _EQUAL_COLUMNS},
        retained=Interval(**retained) if retained else None,
        chance=None if row["chance"] is None else 100 * row["chance"],
    )
