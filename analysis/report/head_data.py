"""All numbers of a report's head map, for the script of the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.analysis.plans import HeadDamage, HeadPlan, PlannedHead
from headscan.analysis.report.head_measures import HeadMeasure, SiteMeasures, read_head_tables, scanned_measure
from headscan.analysis.report.head_spread import (
    QUANTILES,
    SiteHeads,
    Spread,
    mean_over_sequences,
    read_measures,
    read_sites,
    spread_of,
)
from headscan.analysis.report.page_parts import compressed
from headscan.analysis.store.store import Store
from headscan.analysis.store.views import INACTIVE_QUANTILE
from headscan.catalog import SCORES

_CLASSES = ("retrieval", "streaming", "removable", "protected")

#: By kind of text, the number in the plan's evidence.
DAMAGES: dict[str, Callable[[HeadDamage], float | None]] = {
    "text": lambda damage: damage.text,
    "recall": lambda damage: damage.recall,
}


def plan_measures(plan: HeadPlan, heads: SiteHeads) -> list[HeadMeasure]:
    """Return the measures of a plan; query heads that share a KV head have equal numbers."""
    if heads.site != "self":
        return []
    by_place = {(head.layer, head.kv_head): head for head in plan.heads}
    places = list(zip(heads.layer.tolist(), heads.kv_head.tolist(), strict=True))
    entries = [by_place.get(place) for place in places]

    def numbers(read: Callable[[PlannedHead], float | None]) -> np.ndarray:
        found = [None if entry is None else read(entry) for entry in entries]
        return np.array([np.nan if value is None else value for value in found], dtype=float)

    measures = [
        HeadMeasure(
            "plan",
            "Plan",
            numbers(lambda entry: _CLASSES.index(entry.head_class)),
            f"what the KV head keeps; method {plan.method}: streaming heads keep {plan.window_text()}",
            scale="classes",
            classes=_CLASSES,
        ),
        HeadMeasure("keep_score", "Plan", numbers(lambda entry: entry.score), plan.score, scale="share"),
    ]
    for kind, read in DAMAGES.items():
        values = numbers(partial(_damage, read))
        if not np.isnan(values).all():
            text = f"loss that a window on this KV head alone adds on {kind}"
            measures.append(HeadMeasure(f"damage_{kind}", "Damage", values, text, "nats per token"))
    return measures


def _damage(read: Callable[[HeadDamage], float | None], entry: PlannedHead) -> float | None:
    return None if entry.evidence.damage is None else read(entry.evidence.damage)


#: Number of set bits of each byte.
_SET_BITS = np.array([byte.bit_count() for byte in range(256)])


class Picks:
    """The picks of scores, one bit per (sequence, head): a fraction of the memory of the scores."""

    def __init__(self) -> None:
        self._bits: dict[str, np.ndarray] = {}

    def add(self, name: str, values: np.ndarray, spread: Spread) -> None:
        """Add a score with its values (H, S); a statistic without a direction is skipped."""
        score = SCORES.get(name)
        if score is None:
            return
        limit = spread.thresholds[INACTIVE_QUANTILE]
        picked = values < limit if score.inactive == "low" else values > limit
        if picked.any():
            self._bits[name] = np.packbits(picked)

    def overlaps(self) -> pa.Table:
        """Return all pairs of scores that pick anything, as the SQL macro ``score_overlap`` does."""
        names = [name for name in SCORES if name in self._bits]
        sizes = {name: _count(self._bits[name]) for name in names}
        rows = []
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                both = _count(self._bits[a] & self._bits[b])
                overlap = both / (sizes[a] + sizes[b] - both)
                rows.append(
                    {"score_a": a, "score_b": b, "picked_a": sizes[a], "picked_b": sizes[b]}
                    | {"both": both, "overlap": overlap}
                )
        return pa.Table.from_pylist(rows)


def _count(bits: np.ndarray) -> int:
    return int(_SET_BITS[bits].sum())


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
    """Read every measure of every head of a scan. The masks of the evaluation become sets of heads, ``plan`` is of the
    same model, and ``compared`` is another scan with the same heads; None leaves each out.
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
    return {name: mean_over_sequences(values) for name, values in read_measures(store, other)}


def _same_places(a: SiteHeads, b: SiteHeads) -> bool:
    return bool(np.array_equal(a.layer, b.layer) and np.array_equal(a.head, b.head))


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
    """Return the data of the page's script as base64 of compressed JSON; base64 has no markup, so no text from a store
    can leave its element. ``first`` are measures in the order of preference for the first map.
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
    measures: Sequence[HeadMeasure] = site.numbers.measures
    return {
        "name": site.heads.site,
        "layer": site.heads.layer.tolist(),
        "head": site.heads.head.tolist(),
        "kv": site.heads.kv_head.tolist(),
        "sequences": site.heads.sequences,
        "measures": [measure.payload() for measure in measures],
        "sets": site.numbers.sets,
    }
