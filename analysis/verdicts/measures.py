"""Metrics of tasks without right answers, as lm-eval computes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.finished_arms import FinishedArm


@dataclass(frozen=True)
class Measure:
    """A metric of a task; None if lm-eval has no value."""

    task: str
    metric: str
    baseline: float | None
    arm: float | None

    def words(self) -> str:
        """Return the measure in words."""
        return f"Measured {self.task} {self.metric}: {_number(self.arm)} against {_number(self.baseline)}"


def read_measures(store: Store, run_id: str, baseline: FinishedArm) -> Mapping[str, tuple[Measure, ...]]:
    """Return the metrics of tasks without right answers, by arm id."""
    rows = store.query(
        "SELECT r.arm_id, task, metric, r.value AS arm, b.value AS baseline"
        " FROM arm_results r JOIN arms a ON a.arm_id = r.arm_id"
        " LEFT JOIN (FROM arm_results WHERE arm_id = $2) b USING (task, metric, filter)"
        " WHERE a.run_id = $1 AND NOT r.is_group"
        " AND task NOT IN (SELECT task FROM answers WHERE arm_id = $2 AND correct IS NOT NULL)"
        " ORDER BY r.arm_id, task, metric, filter",
        [run_id, baseline.arm_id],
    ).to_pylist()
    measures: dict[str, list[Measure]] = defaultdict(list)
    for row in rows:
        measures[row["arm_id"]].append(Measure(row["task"], row["metric"], row["baseline"], row["arm"]))
    return {arm_id: tuple(found) for arm_id, found in measures.items()}


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}"
