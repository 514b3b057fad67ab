"""Points of the curves of criteria on labelled examples, by kind of attention."""

from __future__ import annotations

import json
from dataclasses import dataclass

from headscan.analysis.effects.paired_effects import Effect
from headscan.analysis.effects.stored_outcomes import read_arms, read_baseline
from headscan.analysis.store.store import Store

#: Site of curves that remove heads of all sites, and criterion of random orders.
ALL_SITES, RANDOM = "all", "random"


@dataclass(frozen=True)
class SitePoint:
    """A criterion at one share of the heads of a site.

    Attributes:
        criterion: Name of the criterion.
        seed: Seed of a random order; None for all others.
        site: Kind of attention, or ``all``.
        share: Nominal share of the site's heads that are removed, 0 to 1.
        heads: ``(site, layer, head)`` of the removed heads.
        metric: Name of the metric.
        effect: Its change, with interval.
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
        """Criterion, and seed of a random order."""
        return self.criterion, "" if self.seed is None else f"seed {self.seed}"


def read_site_points(store: Store, run_id: str) -> list[SitePoint]:
    """Return the finished points of a run by site, criterion, seed and share; none if it compares no criteria.

    Raises:
        EffectError: The run has no baseline, or no metric that can be paired.
    """
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
