"""Criteria that choose heads: the arms of each by share, and the agreement of criteria."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol, TypeVar

from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.head_effects import Effect, read_arms, read_baseline
from headscan.verdicts.judge import Verdict


class CurvePoint(Protocol):
    """The heads that a criterion removes at one share, 0 to 1; the points of a curve have the same ``curve``."""

    @property
    def curve(self) -> tuple[str, str]: ...

    @property
    def share(self) -> float: ...

    @property
    def heads(self) -> Set[Hashable]: ...


C = TypeVar("C", bound=CurvePoint)


def by_curve(points: Sequence[C]) -> dict[tuple[str, str], list[C]]:
    """Return the points by criterion and selection, each by growing share."""
    points_of: dict[tuple[str, str], list[C]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.share):
        points_of[point.curve].append(point)
    return dict(points_of)


@dataclass(frozen=True)
class CriterionPoint:
    """A criterion at one nominal share of removed heads, 0 to 1, with the removed ``(layer, head)``. Points that differ
    in ``selection``, the further settings of the choice and the repair, are on different curves.
    """

    criterion: str
    selection: str
    share: float
    verdict: ArmVerdict
    heads: frozenset[tuple[int, int]]

    @property
    def curve(self) -> tuple[str, str]:
        return self.criterion, self.selection


def heads_of_arms(store: Store, run_id: str) -> dict[str, set[tuple[int, int]]]:
    """Return the fixed heads ``(layer, head)`` that the arms of a run ablate or remove, by name."""
    heads: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for row in store.query(
        "SELECT name, layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE run_id = ?", [run_id]
    ).to_pylist():
        heads[row["name"]].add((row["layer"], row["head"]))
    return dict(heads)


def criterion_points(store: Store, verdict: Verdict) -> list[CriterionPoint]:
    """Return the points of all arms whose heads a criterion chose, by criterion and share."""
    heads = heads_of_arms(store, verdict.run_id)
    points = []
    for judged in verdict.by_name.values():
        arm = judged.arm
        is_referee_arm = "criterion" in arm.config or "repair" in arm.config
        if arm.kind in (ArmKind.MASK, ArmKind.PRUNED) and is_referee_arm and arm.criterion and arm.share is not None:
            removed = frozenset(heads.get(arm.name, ()))
            points.append(CriterionPoint(arm.criterion, arm.selection or "", arm.share, judged, removed))
    return sorted(points, key=lambda point: (point.curve, point.share))


#: Site of curves that remove heads of all sites.
ALL_SITES = "all"


@dataclass(frozen=True)
class SitePoint:
    """A criterion at one nominal share of a site's heads, 0 to 1, with the removed ``(site, layer, head)``. ``site`` is
    a kind of attention, or ``all``; ``seed`` is None unless the order is random.
    """

    criterion: str
    seed: int | None
    site: str
    share: float
    heads: frozenset[tuple[str, int, int]]
    metric: str
    effect: Effect

    @property
    def curve(self) -> tuple[str, str]:
        return self.criterion, "" if self.seed is None else f"seed {self.seed}"


def read_site_points(store: Store, run_id: str) -> list[SitePoint]:
    """Return the finished points of a run by site, criterion, seed and share; none if it compares no criteria."""
    rows = store.query(
        "SELECT arm_id, config ->> '$.criterion' AS criterion, (config ->> '$.seed')::INT AS seed,"
        " config ->> '$.curve' AS site, (config ->> '$.share')::DOUBLE AS share, config ->> '$.sites' AS sites"
        " FROM arms WHERE run_id = ? AND status = 'finished' AND config ->> '$.curve' IS NOT NULL",
        [run_id],
    ).to_pylist()
    if not rows:
        return []
    baseline, outcomes = read_baseline(store, run_id)
    values = read_arms(store, baseline, outcomes, [row["arm_id"] for row in rows])
    points = [
        SitePoint(
            row["criterion"],
            row["seed"],
            row["site"],
            row["share"],
            frozenset((site, layer, head) for site, heads in json.loads(row["sites"]).items() for layer, head in heads),
            outcomes.metric,
            outcomes.effect(values[row["arm_id"]]),
        )
        for row in rows
    ]
    return sorted(points, key=lambda point: (point.site, point.curve, point.share))


@dataclass(frozen=True)
class Agreement:
    """Agreement of two curves, each of a criterion and a selection: Kendall's tau-b of the shares at which heads go, -1
    to 1, NaN if a curve removes all or no heads at once; and ``|A & B| / min(|A|, |B|)`` of the removed heads, 0 to 1,
    by common share.
    """

    site: str
    first: tuple[str, str]
    second: tuple[str, str]
    tau: float
    overlap: dict[float, float]


def agreements(points: Sequence[CurvePoint], heads: Sequence[Hashable], site: str = "self") -> list[Agreement]:
    """Return the agreement of every pair of curves; ``heads`` are all heads of the site. A head has the rank of the
    smallest tested share that removes it, so heads of one step are ties.
    """
    from scipy.stats import kendalltau  # slow to import, and the report reads points without it

    curves = by_curve(points)
    agreements = []
    for (first, ours), (second, theirs) in combinations(curves.items(), 2):
        tau = kendalltau([_rank(ours, head) for head in heads], [_rank(theirs, head) for head in heads]).statistic
        others = {point.share: point.heads for point in theirs}
        overlap = {
            point.share: len(point.heads & others[point.share]) / min(len(point.heads), len(others[point.share]))
            for point in ours
            if point.heads and others.get(point.share)
        }
        agreements.append(Agreement(site, first, second, float(tau), overlap))
    return agreements


def _rank(points: Sequence[CurvePoint], head: Hashable) -> float:
    return min((point.share for point in points if head in point.heads), default=math.inf)
