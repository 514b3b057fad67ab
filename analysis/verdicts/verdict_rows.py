"""Every arm against its baseline, computed once: written to ``arm_verdicts`` and read from there.

The table holds shares (0 to 1), as the views do; a ``PairedDifference`` holds percent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from headscan.analysis.schema.tables import TABLES
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, AnswerSheets, Scope, read_answers
from headscan.analysis.verdicts.arm_recall import RecallVerdict
from headscan.analysis.verdicts.benchmark_tasks import TaskVerdict, task_verdicts
from headscan.analysis.verdicts.finished_arms import FinishedArm, finished_arms
from headscan.analysis.verdicts.paired import PairedDifference
from headscan.analysis.verdicts.retention import Retained

#: Column of the table in shares, to attribute of ``PairedDifference`` in percent.
_PERCENT = {"baseline": "baseline", "accuracy": "arm", "difference": "difference", "low": "low", "high": "high"}
_PLAIN = ("questions", "gained", "lost", "p_value")

#: The same of ``Retained``.
_RETAINED = {"retained": "share", "retained_low": "low", "retained_high": "high"}


def record_verdicts(store: Store, run_id: str) -> None:
    """Compare with the baseline every finished arm of a run that was not compared yet.

    Costs a query when there is none: it may be called whenever an arm is finished.

    Raises:
        VerdictError: Not exactly one finished baseline, or an arm that answered other questions.
    """
    baseline, others, _ = finished_arms(store, run_id)
    # Rows of a store that was upgraded lack the columns of later rules, and are compared again.
    recorded = store.query(
        "SELECT arm_id FROM arm_verdicts JOIN arms USING (arm_id) WHERE run_id = ? GROUP BY arm_id HAVING"
        " bool_and(recall OR failed IS NOT NULL) AND bool_and(informative IS NULL OR retained IS NOT NULL)",
        [run_id],
    )["arm_id"].to_pylist()
    missing = [arm for arm in others if arm.arm_id not in recorded]
    if not missing:
        return
    sheets = read_answers(store, baseline, missing)
    rows = [row for arm in missing for row in verdict_rows(sheets, baseline, arm)]
    if rows:
        store.add_verdicts(pa.Table.from_pylist(rows))


def verdict_rows(sheets: AnswerSheets, baseline: FinishedArm, arm: FinishedArm) -> list[dict[str, Any]]:
    """Compare an arm with the baseline in every scope of the sheets: rows of ``arm_verdicts``."""
    rows = [_row(sheets, scope, baseline, arm) for scope in sheets.scopes]
    # Judged as they will be read, so that rounding cannot make the two disagree.
    scopes = {Scope(row["task"], row["recall"]): _paired(row) for row in rows}
    tasks = {verdict.task: verdict for verdict in task_verdicts(scopes)}
    for row, (scope, paired) in zip(rows, scopes.items(), strict=True):
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
        **{column: getattr(kept, attribute) / 100 for column, attribute in _RETAINED.items() if kept},
    }


def _worst_columns(worst: TaskVerdict) -> dict[str, Any]:
    """Columns of the row of the whole benchmark."""
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
    )


def read_verdicts(store: Store, run_id: str) -> Mapping[str, Mapping[Scope, PairedDifference]]:
    """The recorded comparisons of a run: of each arm id, by scope."""
    rows = store.query(
        "SELECT v.* FROM arm_verdicts v JOIN arms USING (arm_id) WHERE run_id = ? ORDER BY arm_id, task, recall",
        [run_id],
    ).to_pylist()
    return compared_by_arm(rows)


def compared_by_arm(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[Scope, PairedDifference]]:
    """Group rows of ``arm_verdicts`` by arm id and scope."""
    verdicts: dict[str, dict[Scope, PairedDifference]] = defaultdict(dict)
    for row in rows:
        verdicts[row["arm_id"]][Scope(row["task"], row["recall"])] = _paired(row)
    return dict(verdicts)
