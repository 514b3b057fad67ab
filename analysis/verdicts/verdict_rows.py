"""Rows of ``arm_verdicts``: read, computed and written.

The table holds shares (0 to 1), as the views do; a ``PairedDifference`` holds percent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headscan.analysis.schema.tables import TABLES
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, AnswerSheets, Scope, read_answers
from headscan.analysis.verdicts.arm_recall import RecallVerdict
from headscan.analysis.verdicts.benchmark_tasks import TaskVerdict, task_verdicts
from headscan.analysis.verdicts.finished_arms import FinishedArm, finished_arms
from headscan.analysis.verdicts.paired import PairedDifference
from headscan.analysis.verdicts.retention import Retained

#: Columns of the table in shares and their attributes of ``PairedDifference`` in percent.
_PERCENT = {"baseline": "baseline", "accuracy": "arm", "difference": "difference", "low": "low", "high": "high"}
_PLAIN = ("questions", "gained", "lost", "p_value")

#: Columns of the table and their attributes of ``Retained``.
_RETAINED = {"retained": "share", "retained_low": "low", "retained_high": "high"}


class VerdictRows(NamedTuple):
    """The rows of ``arm_verdicts`` of one run, stored and computed."""

    stored: list[dict[str, Any]]
    computed: list[dict[str, Any]]


def read_verdict_rows(store: Store, run_id: str) -> VerdictRows:
    """Read a run's verdict rows; compute missing ones without writing them.

    Raises:
        VerdictError: Not exactly one finished baseline, or an arm answered other questions than the baseline.
    """
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
    return VerdictRows(stored, [row for arm in missing for row in verdict_rows(sheets, baseline, arm)])


def complete_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of arms whose rows have all columns.

    An upgraded store lacks the columns of later rules.
    """
    incomplete = {row["arm_id"] for row in rows if _lacks_columns(row)}
    return [row for row in rows if row["arm_id"] not in incomplete]


def _lacks_columns(row: Mapping[str, Any]) -> bool:
    if row["recall"]:
        return row["informative"] is not None and row["retained"] is None
    return row["failed"] is None or row["informative"] is None


def record_verdicts(store: Store, run_id: str) -> None:
    """Write the verdict rows of finished arms that the store lacks.

    The job that evaluates calls this at its end.

    Raises:
        VerdictError: As for `read_verdict_rows`.
    """
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
    """Return the columns of the benchmark row that name its worst task."""
    return {
        "failed": worst.failed,
        "worst_task": worst.task,
        "worst_difference": worst.paired.difference / 100,
        "worst_low": worst.low / 100,
        "worst_high": worst.high / 100,
    }


def _paired(row: Mapping[str, Any]) -> PairedDifference:
    kept = {attribute: row[column] for column, attribute in _RETAINED.items() if row[column] is not None}
    return PairedDifference(
        **{attribute: 100 * row[column] for column, attribute in _PERCENT.items()},
        **{name: row[name] for name in _PLAIN},
        retained=Retained(**{attribute: 100 * share for attribute, share in kept.items()}) if kept else None,
        chance=None if row["chance"] is None else 100 * row["chance"],
    )


def compared_by_arm(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[Scope, PairedDifference]]:
    """Group rows of ``arm_verdicts`` by arm id and scope."""
    verdicts: dict[str, dict[Scope, PairedDifference]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: (row["arm_id"], row["task"], row["recall"])):
        verdicts[row["arm_id"]][Scope(row["task"], row["recall"])] = _paired(row)
    return dict(verdicts)
