"""Every arm against its baseline, computed once: written to ``arm_verdicts`` and read from there.

The table holds shares (0 to 1), as the views do; a ``PairedDifference`` holds percent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from analysis.answer_sheets import AnswerSheets, Scope, read_answers
from analysis.finished_arms import FinishedArm, finished_arms
from analysis.paired import PairedDifference
from analysis.recall import RecallVerdict
from analysis.store import Store

#: Column of the table in shares, to attribute of ``PairedDifference`` in percent.
_PERCENT = {"baseline": "baseline", "accuracy": "arm", "difference": "difference", "low": "low", "high": "high"}
_PLAIN = ("questions", "gained", "lost", "p_value")


def record_verdicts(store: Store, run_id: str) -> None:
    """Compare with the baseline every finished arm of a run that was not compared yet.

    Costs a query when there is none: it may be called whenever an arm is finished.

    Raises:
        VerdictError: Not exactly one finished baseline, or an arm that answered other questions.
    """
    baseline, others, _ = finished_arms(store, run_id)
    recorded = store.query(
        "SELECT DISTINCT arm_id FROM arm_verdicts JOIN arms USING (arm_id) WHERE run_id = ?", [run_id]
    )["arm_id"].to_pylist()
    missing = [arm for arm in others if arm.arm_id not in recorded]
    if not missing:
        return
    sheets = read_answers(store, baseline, missing)
    rows = [_row(sheets, scope, baseline, arm) for arm in missing for scope in sheets.scopes]
    if rows:
        store.add_verdicts(pa.Table.from_pylist(rows))


def _row(sheets: AnswerSheets, scope: Scope, baseline: FinishedArm, arm: FinishedArm) -> dict[str, Any]:
    paired = sheets.compare(scope, sheets.correct[baseline.arm_id], sheets.correct[arm.arm_id])
    row: dict[str, Any] = {
        "arm_id": arm.arm_id,
        **scope._asdict(),
        **{column: getattr(paired, attribute) / 100 for column, attribute in _PERCENT.items()},
        **{name: getattr(paired, name) for name in _PLAIN},
    }
    # Judged as it will be read, so that rounding cannot make the two disagree.
    family = RecallVerdict(scope.task, _paired(row)) if scope.is_recall_family else None
    return row | {
        "informative": None if family is None else family.informative,
        "failed": None if family is None else family.failed,
    }


def _paired(row: Mapping[str, Any]) -> PairedDifference:
    return PairedDifference(
        **{attribute: 100 * row[column] for column, attribute in _PERCENT.items()},
        **{name: row[name] for name in _PLAIN},
    )


def read_verdicts(store: Store, run_id: str) -> Mapping[str, Mapping[Scope, PairedDifference]]:
    """The recorded comparisons of a run: of each arm id, by scope."""
    rows = store.query(
        "SELECT v.* FROM arm_verdicts v JOIN arms USING (arm_id) WHERE run_id = ? ORDER BY arm_id, task, recall",
        [run_id],
    ).to_pylist()
    verdicts: dict[str, dict[Scope, PairedDifference]] = defaultdict(dict)
    for row in rows:
        verdicts[row["arm_id"]][Scope(row["task"], row["recall"])] = _paired(row)
    return dict(verdicts)
