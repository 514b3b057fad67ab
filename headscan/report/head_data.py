"""All numbers of a report's head map, for the script of the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, get_args

import numpy as np

from headscan.catalog import SCORES
from headscan.plans import HeadClass, HeadPlan, PlannedHead
from headscan.ranking.head_ranking import covering_window
from headscan.ranking.head_roles import HeadRoles, roles_of
from headscan.report.head_measures import HeadMeasure, SiteMeasures, read_head_tables, scanned_measure
from headscan.report.page_parts import compressed
from headscan.store.head_spread import QUANTILES, SiteSummary, Spread
from headscan.store.site_rows import SiteHeads
from headscan.store.store import Store


def plan_measures(plan: HeadPlan, heads: SiteHeads) -> list[HeadMeasure]:
    """Return the measures of a plan; query heads that share a KV head have equal numbers."""
    if heads.site != "self":
        return []
    by_place = {(head.layer, head.kv_head): head for head in plan.heads}
    places = list(zip(heads.layer.tolist(), heads.kv_head.tolist(), strict=True))
    entries = [by_place.get(place) for place in places]

    def numbers(read: Callable[[PlannedHead], float | None]) -> np.ndarray:
        return np.array([None if entry is None else read(entry) for entry in entries], dtype=float)

    classes = get_args(HeadClass)
    measures = [
        HeadMeasure(
            "plan",
            "Plan",
            numbers(lambda entry: classes.index(entry.head_class)),
            f"what the KV head keeps; method {plan.method}: streaming heads keep {plan.window_text()}",
            scale="classes",
            classes=classes,
        ),
        HeadMeasure(
            "keep_score",
            "Plan",
            numbers(lambda entry: 1.0 if entry.score is None else entry.score),
            plan.score,
            scale="share",
        ),
    ]
    damages = [None if entry is None else entry.damage for entry in entries]
    for kind in ("text", "recall"):
        values = np.array([None if damage is None else getattr(damage, kind) for damage in damages], dtype=float)
        if not np.isnan(values).all():
            text = f"loss that a window on this KV head alone adds on {kind}"
            measures.append(HeadMeasure(f"damage_{kind}", "Damage", values, text, "nats per token"))
    return measures


#: Most sets of heads in the page: a sweep has an arm for each score and share.
_MOST_SETS = 300


@dataclass(frozen=True)
class SiteNumbers:
    """One site with its measures, the spreads of scanned ones by name, and the roles of its heads."""

    heads: SiteHeads
    numbers: SiteMeasures
    spreads: Mapping[str, Spread]
    roles: HeadRoles

    def overlaps(self) -> list[dict[str, Any]]:
        """Return all pairs of scores that pick any (sequence, head) beyond the `INACTIVE_QUANTILE` of the pool, as the
        SQL macro ``score_overlap`` does.
        """
        counts = {name: self.spreads[name].picks for name in SCORES if name in self.spreads}
        names = [name for name, of_score in counts.items() if of_score[name]]
        rows = []
        for a, b in combinations(names, 2):
            picked_a, picked_b, both = counts[a][a], counts[b][b], counts[a][b]
            rows.append(
                {"score_a": a, "score_b": b, "picked_a": picked_a, "picked_b": picked_b}
                | {"both": both, "overlap": both / (picked_a + picked_b - both)}
            )
        return rows


@dataclass(frozen=True)
class HeadData:
    """Sites of a scan, the runs of the tables by group, and the compared scan; None without one. ``covered`` is what
    `covering_window` returns.
    """

    sites: tuple[SiteNumbers, ...]
    runs: Mapping[str, Mapping[str, Any]]
    compared: Mapping[str, Any] | None
    covered: str = ""


def read_head_data(
    store: Store,
    scan: Mapping[str, Any],
    *,
    evaluation_id: str | None = None,
    plan: HeadPlan | None = None,
    compared: Mapping[str, Any] | None = None,
) -> HeadData:
    """Read every measure of every head of a scan. The masks of the evaluation become sets of heads, ``plan`` is of the
    same model, and ``compared`` is another scan with the same heads; None leaves each out.
    """
    others = {} if compared is None else {site.heads.site: site for site in store.summaries(compared["run_id"])}
    sites = []
    covered = covering_window(store, scan)
    runs: dict[str, Mapping[str, Any]] = {}
    for heads, spreads in store.summaries(scan["run_id"]):
        means = _other_means(heads, others.get(heads.site))
        scanned = [
            scanned_measure(name, spread, means.get(name), covered if name == "distant_mass" else "")
            for name, spread in spreads.items()
        ]
        tables, of_tables = read_head_tables(store, scan, heads)
        runs |= of_tables
        planned = [] if plan is None else plan_measures(plan, heads)
        sets = {} if evaluation_id is None else _ablated_sets(store, evaluation_id, heads)
        numbers = SiteMeasures((*scanned, *tables, *planned), sets)
        sites.append(SiteNumbers(heads, numbers, spreads, roles_of(store, scan, heads.site)))
    return HeadData(tuple(sites), runs, compared if others else None, covered)


def _other_means(heads: SiteHeads, other: SiteSummary | None) -> dict[str, np.ndarray]:
    """Return the means of another scan by measure; empty if its heads differ."""
    if other is None or not np.array_equal([heads.layer, heads.head], [other.heads.layer, other.heads.head]):
        return {}
    return {name: spread.mean for name, spread in other.spreads.items()}


def _ablated_sets(store: Store, run_id: str, heads: SiteHeads) -> dict[str, list[int]]:
    """Return the heads (rows) that each fixed, not random arm ablates or removes."""
    rows = store.query(
        "SELECT name, site, layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE run_id = ? AND site = ?"
        " AND kind NOT LIKE 'random%' ORDER BY started_at, name, layer, head",
        [run_id, heads.site],
    ).to_pylist()
    index = heads.index
    heads_of_set: dict[str, list[int]] = {}
    for row in rows:
        if row["layer"] < index.shape[0] and row["head"] < index.shape[1] and index[row["layer"], row["head"]] >= 0:
            heads_of_set.setdefault(row["name"], []).append(int(index[row["layer"], row["head"]]))
    return dict(list(heads_of_set.items())[:_MOST_SETS])


def page_data(data: HeadData, first: Sequence[str]) -> str:
    """Return the data of the page's script as base64 of compressed JSON; base64 has no markup, so no text from a store
    can leave its element. ``first`` are measures in the order of preference for the first map.
    """
    sites = [
        {
            "name": site.heads.site,
            "layer": site.heads.layer.tolist(),
            "head": site.heads.head.tolist(),
            "kv": site.heads.kv_head.tolist(),
            "sequences": site.heads.sequences,
            "measures": [measure.payload() for measure in site.numbers.measures],
            "sets": site.numbers.sets,
        }
        for site in data.sites
    ]
    names = [measure.name for measure in data.sites[0].numbers.measures]
    known = {**{name: name for name in names}, "effect": next((name for name in names if _is_effect(name)), None)}
    start = next(filter(None, map(known.get, first)), names[0] if names else None)
    payload = {
        "quantiles": list(QUANTILES),
        "start": start,
        "compared": None if data.compared is None else f"{data.compared['model']}, {data.compared['corpus']}",
        "sites": sites,
    }
    return compressed(json.dumps(payload, allow_nan=False, separators=(",", ":")).encode())


def _is_effect(measure: str) -> bool:
    """Return True for a measure of `effect_definition`, which has a name for each replacement and metric."""
    return measure.startswith("harm_")
