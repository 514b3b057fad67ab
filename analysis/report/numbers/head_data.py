"""All numbers of a report's head map, for the script of the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headscan.analysis.plans import HeadPlan
from headscan.analysis.report.numbers.head_arrays import SiteHeads, read_measures, read_sites
from headscan.analysis.report.numbers.head_spread import QUANTILES, Spread, spread_of
from headscan.analysis.report.numbers.head_tables import read_head_tables
from headscan.analysis.report.numbers.measure import Measure, SiteMeasures, scanned_measure
from headscan.analysis.report.numbers.plan_measures import plan_measures
from headscan.analysis.report.numbers.score_overlaps import Picks
from headscan.analysis.report.page.templates import compressed
from headscan.analysis.store.store import Store

#: Most sets of heads in the page: a sweep has an arm for each score and share.
_MOST_SETS = 300


@dataclass(frozen=True)
class SiteNumbers:
    """One site with its measures, the spreads of scanned ones by name, and the overlaps of the scores' picks."""

    heads: SiteHeads
    numbers: SiteMeasures
    spreads: Mapping[str, Spread]
    picks: Picks


@dataclass(frozen=True)
class HeadData:
    """Sites of a scan, the runs of the tables by group, and the compared scan; None without one."""

    sites: tuple[SiteNumbers, ...]
    runs: Mapping[str, Mapping[str, Any]]
    compared: Mapping[str, Any] | None


def read_head_data(
    store: Store,
    scan: Mapping[str, Any],
    *,
    evaluation_id: str | None = None,
    plan: HeadPlan | None = None,
    compared: Mapping[str, Any] | None = None,
) -> HeadData:
    """Read every measure of every head of a scan.

    Args:
        evaluation_id: Evaluation whose masks become sets of heads; None leaves them out.
        plan: A plan of the same model, or None.
        compared: Another scan with the same heads, or None.
    """
    others = {} if compared is None else {site.site: site for site in read_sites(store, compared["run_id"])}
    found = []
    runs: dict[str, Mapping[str, Any]] = {}
    for heads in read_sites(store, scan["run_id"]):
        picks = Picks()
        spreads: dict[str, Spread] = {}
        for name, values in read_measures(store, heads):
            spreads[name] = spread_of(name, values)
            picks.add(name, values, spreads[name])
        means = _other_means(store, heads, others.get(heads.site))
        scanned = [scanned_measure(name, spread, means.get(name)) for name, spread in spreads.items()]
        tables, of_tables = read_head_tables(store, scan, heads)
        runs |= of_tables
        planned = [] if plan is None else plan_measures(plan, heads)
        sets = {} if evaluation_id is None else _ablated_sets(store, evaluation_id, heads)
        numbers = SiteMeasures((*scanned, *tables, *planned), sets)
        found.append(SiteNumbers(heads, numbers, spreads, picks))
    return HeadData(tuple(found), runs, compared if others else None)


def _other_means(store: Store, heads: SiteHeads, other: SiteHeads | None) -> dict[str, np.ndarray]:
    """Return the means of another scan by measure; empty if its heads differ."""
    if other is None or len(other) != len(heads) or not _same_places(heads, other):
        return {}
    return {name: spread_mean(values) for name, values in read_measures(store, other)}


def _same_places(a: SiteHeads, b: SiteHeads) -> bool:
    return bool(np.array_equal(a.layer, b.layer) and np.array_equal(a.head, b.head))


def spread_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the measured sequences (H,)."""
    finite = np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(finite, values, 0).sum(axis=1, dtype=np.float64) / finite.sum(axis=1)


def _ablated_sets(store: Store, run_id: str, heads: SiteHeads) -> dict[str, list[int]]:
    """Return the heads (rows) that each fixed, not random arm ablates or removes."""
    rows = store.query(
        "SELECT name, site, layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE run_id = ? AND site = ?"
        " AND kind NOT LIKE 'random%' ORDER BY started_at, name, layer, head",
        [run_id, heads.site],
    ).to_pylist()
    index = heads.index
    found: dict[str, list[int]] = {}
    for row in rows:
        if row["layer"] < index.shape[0] and row["head"] < index.shape[1] and index[row["layer"], row["head"]] >= 0:
            found.setdefault(row["name"], []).append(int(index[row["layer"], row["head"]]))
    return dict(list(found.items())[:_MOST_SETS])


def page_data(data: HeadData, first: Sequence[str]) -> str:
    """Return the data of the page's script as base64 of compressed JSON.

    No text from a store can leave its element, because base64 has no markup.

    Args:
        first: Measures in the order of preference for the first map.
    """
    sites = [_site_payload(site) for site in data.sites]
    names = [measure.name for measure in data.sites[0].numbers.measures]
    start = next((name for name in first if name in names), names[0] if names else None)
    payload = {
        "quantiles": list(QUANTILES),
        "start": start,
        "compared": None if data.compared is None else f"{data.compared['model']}, {data.compared['corpus']}",
        "sites": sites,
    }
    return compressed(json.dumps(payload, allow_nan=False, separators=(",", ":")).encode())


def _site_payload(site: SiteNumbers) -> dict[str, Any]:
    measures: Sequence[Measure] = site.numbers.measures
    return {
        "name": site.heads.site,
        "layer": site.heads.layer.tolist(),
        "head": site.heads.head.tolist(),
        "kv": site.heads.kv_head.tolist(),
        "sequences": site.heads.sequences,
        "measures": [measure.payload() for measure in measures],
        "sets": site.numbers.sets,
    }
