"""The metric after each step of an iterative removal, by site."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.analysis.effects.paired_effects import Effect
from headscan.analysis.effects.stored_outcomes import read_arms, read_baseline
from headscan.analysis.store.store import Store

#: Site of curves that remove heads of all sites.
ALL_SITES = "all"


@dataclass(frozen=True)
class RemovalPoint:
    """One step of a curve.

    Attributes:
        site: Kind of attention, or ``all``.
        step: Number of the step, from 1.
        heads: Number of removed heads.
        share: Share of the site's heads that are removed, 0 to 1.
        metric: Name of the metric.
        effect: Its change, with interval.
    """

    site: str
    step: int
    heads: int
    share: float
    metric: str
    effect: Effect


def read_removal(store: Store, run_id: str) -> list[RemovalPoint]:
    """Return the finished steps of a run by site and step.

    Raises:
        EffectError: The run has no baseline, or no metric that can be paired.
    """
    rows = store.query(
        "SELECT arm_id, config ->> '$.curve' AS site, (config ->> '$.step')::INT AS step,"
        " (config ->> '$.removed')::INT AS heads, (config ->> '$.site_share')::DOUBLE AS share FROM arms"
        " WHERE run_id = ? AND status = 'finished' AND config ->> '$.curve' IS NOT NULL ORDER BY ALL",
        [run_id],
    ).to_pylist()
    baseline, outcomes = read_baseline(store, run_id)
    values = read_arms(store, baseline, outcomes, [row["arm_id"] for row in rows])
    points = [
        RemovalPoint(
            row["site"],
            row["step"],
            row["heads"],
            row["share"],
            outcomes.metric,
            outcomes.effect(values[row["arm_id"]]),
        )
        for row in rows
    ]
    return sorted(points, key=lambda point: (point.site, point.step))
