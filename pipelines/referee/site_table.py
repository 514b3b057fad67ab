"""Results of a referee on labelled examples, as rows of the referee's table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from headscan.analysis.criteria.criterion_curves import by_curve
from headscan.analysis.criteria.rank_agreement import Agreement, agreements
from headscan.analysis.criteria.site_points import ALL_SITES, RANDOM, SitePoint
from headscan.analysis.schema.effect_tables import ACCURACY, LOSS
from headscan.pipelines.referee.referee_table import CriterionLoss

#: Units of metrics; all others are points.
_UNITS = {LOSS: "nats per token"}


def site_losses(points: Sequence[SitePoint]) -> list[CriterionLoss]:
    """Return what each criterion changes by site and share; the means of random orders follow the criteria."""
    rows = []
    for site in dict.fromkeys(point.site for point in points):
        of_site = [point for point in points if point.site == site]
        rows += [_row(point) for point in of_site if point.criterion != RANDOM]
        rows += _random(of_site)
    return rows


def baseline_text(points: Sequence[SitePoint]) -> str:
    """Return the metric of the model without ablation."""
    first = points[0]
    shown = f"{first.effect.baseline:.4f}" if first.metric == LOSS else f"{_scale(first) * first.effect.baseline:.2f}"
    unit = {ACCURACY: " %", LOSS: " nats per token"}.get(first.metric, "")
    return f"Without ablation: {first.metric} {shown}{unit} on {first.effect.n} examples."


def site_agreements(points: Sequence[SitePoint], heads: Sequence[tuple[str, int, int]]) -> list[Agreement]:
    """Return the agreement of every pair of criteria at every site.

    Args:
        heads: ``(site, layer, head)`` of all heads of the model.
    """
    found = []
    for site in dict.fromkeys(point.site for point in points):
        of_site = [point for point in points if point.site == site and point.criterion != RANDOM]
        found += agreements(of_site, [head for head in heads if site in (head[0], ALL_SITES)], site)
    return found


def _row(point: SitePoint) -> CriterionLoss:
    scale, effect = _scale(point), point.effect
    low, high = (scale * end if math.isfinite(end) else None for end in (effect.low, effect.high))
    unit = _UNITS.get(point.metric, "points")
    return CriterionLoss(
        point.metric, unit, point.site, point.criterion, "", point.share, scale * effect.effect, low, high
    )


def _random(points: Sequence[SitePoint]) -> Iterator[CriterionLoss]:
    """Yield the means of random orders by share."""
    curves = by_curve([point for point in points if point.criterion == RANDOM]).values()
    for of_share in zip(*curves, strict=True):
        first = of_share[0]
        mean = sum(_scale(point) * point.effect.effect for point in of_share) / len(of_share)
        unit = _UNITS.get(first.metric, "points")
        yield CriterionLoss(first.metric, unit, first.site, "random heads, mean", "", first.share, mean, None, None)


def _scale(point: SitePoint) -> float:
    return 100.0 if point.metric == ACCURACY else 1.0
