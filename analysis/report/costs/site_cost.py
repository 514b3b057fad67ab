"""Report section on criteria that remove heads of each site, judged on labelled examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headscan.analysis.effects.criterion_points import ALL_SITES, RANDOM, SitePoint, by_curve, read_site_points
from headscan.analysis.provenance import same_model
from headscan.analysis.report.figures.site_chart import METRICS, site_figure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.store.store import Store

IDENTITY = "sites"

_NOTE = (
    "Every criterion removes the heads of one kind of attention, or of all; their outputs are zero. Other examples than"
    " those that judge give the order. Whiskers are 95 % intervals of the paired change; broken lines: random orders."
)


def site_section(store: Store, scan: Mapping[str, Any]) -> str | None:
    """Return the section on the newest finished comparison of the scan's model; None without one."""
    for run in store.runs("ablate"):
        finished = run["status"] == "finished" and same_model(run, scan)
        if finished and (points := read_site_points(store, run["run_id"])):
            return _section(run, points)
    return None


def _section(run: Mapping[str, Any], points: Sequence[SitePoint]) -> str:
    first = points[0]
    title, scale, digits = METRICS[first.metric]
    baseline = f"Run {run['run_id']} on {run['corpus']}: {title} {scale * first.effect.baseline:.{digits}f} without"
    parts = [pages.paragraph(_NOTE, "note"), pages.paragraph(f"{baseline} ablation, on {first.effect.n} examples.")]
    parts.append(pages.figure(site_figure(points), "criteria-by-site"))
    for site in dict.fromkeys(point.site for point in points):
        name = "all sites" if site == ALL_SITES else f"{site} attention"
        parts.append(pages.heading(f"Change of {title}, heads of {name}"))
        parts.append(_table([point for point in points if point.site == site]))
    return pages.section("Which criterion loses least, by site", parts, IDENTITY)


def _table(points: Sequence[SitePoint]) -> str:
    shares = sorted({point.share for point in points})
    rows = []
    for (criterion, seed), members in by_curve(points).items():
        at = {point.share: point for point in members}
        cells = [_change(at[share]) if share in at else "–" for share in shares]
        rows.append([f"{criterion}, {seed}" if criterion == RANDOM else criterion, *cells])
    return pages.table(["criterion", *(f"{100 * share:g}%" for share in shares)], rows)


def _change(point: SitePoint) -> str:
    _, scale, digits = METRICS[point.metric]
    effect = point.effect
    found = f"{scale * effect.effect:+.{digits}f}"
    if not math.isfinite(effect.low):
        return found
    return f"{found} [{scale * effect.low:+.{digits}f}, {scale * effect.high:+.{digits}f}]"
