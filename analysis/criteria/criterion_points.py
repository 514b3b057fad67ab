"""Points of the curves of criteria: what is lost when a criterion removes a share of the heads."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import ArmOutcome, Verdict


@dataclass(frozen=True)
class CriterionPoint:
    """A criterion at one share.

    Attributes:
        criterion: Name of the criterion.
        selection: Further settings of the choice and the repair; points that differ in it are on different curves.
        share: Nominal share of removed heads, 0 to 1.
        arm: The verdict on its arm.
        heads: ``(layer, head)`` of the removed heads.
    """

    criterion: str
    selection: str
    share: float
    arm: ArmOutcome
    heads: frozenset[tuple[int, int]]

    @property
    def curve(self) -> tuple[str, str]:
        """Criterion and selection."""
        return self.criterion, self.selection


def criterion_points(store: Store, verdict: Verdict) -> list[CriterionPoint]:
    """Return the points of all arms whose heads a criterion chose, by criterion and share."""
    rows = store.query(
        "SELECT name, score, selection, share, config FROM arms"
        " WHERE run_id = ? AND kind IN ('mask', 'pruned') AND score IS NOT NULL AND share IS NOT NULL",
        [verdict.run_id],
    ).to_pylist()
    heads: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for row in store.query(
        "SELECT name, layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE run_id = ?", [verdict.run_id]
    ).to_pylist():
        heads[row["name"]].add((row["layer"], row["head"]))
    outcomes = {arm.name: arm for arm in (*verdict.arms, *verdict.unjudged)}
    points = []
    for row in rows:
        config = row["config"] if isinstance(row["config"], dict) else json.loads(row["config"] or "{}")
        of_referee = "criterion" in config or "repair" in config
        if of_referee and row["name"] in outcomes:
            arm = outcomes[row["name"]]
            removed = frozenset(heads[row["name"]])
            points.append(CriterionPoint(row["score"], row["selection"] or "", row["share"], arm, removed))
    return sorted(points, key=lambda point: (point.curve, point.share))
