"""Comparisons of scores within a scan and between two scans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from headscan.catalog import SCORES
from headscan.errors import HeadscanError, unknown_name
from headscan.store.store import Store


class ComparisonError(HeadscanError):
    """Scores or runs cannot be compared."""


def score_overlap(store: Store, run_id: str, quantile: float = 0.1, *, site: str = "self") -> pa.Table:
    """Return the overlap of the rules of all pairs of scores, by the SQL macro ``score_overlap``. ``run_id`` is the
    first characters of a scan's id, and ``quantile`` the share of the pool of (sequence, layer, head) that each rule
    ablates, between 0 and 1. There is one row per pair, in catalogue order: ``score_a, score_b, picked_a, picked_b,
    both, overlap`` (0 to 1).
    """
    return _overlap(store, "score_overlap", run_id, "quantile", quantile, site)


def mask_overlap(store: Store, run_id: str, share: float = 0.1, *, site: str = "self") -> pa.Table:
    """Return the overlap of the masks of all pairs of scores, by the SQL macro ``mask_overlap``; each mask holds
    ``share`` of all heads, between 0 and 1. The columns are those of `score_overlap`; counts are heads.
    """
    return _overlap(store, "mask_overlap", run_id, "share", share, site)


def score_distance(
    store: Store,
    run_a: str,
    run_b: str,
    *,
    scores: Iterable[str] = tuple(SCORES),
    by_layer: bool = False,
    site: str = "self",
) -> pa.Table:
    """Return the distance between the score distributions of two scans, by the SQL macro ``score_distance``. The scans,
    given by the first characters of their ids, can differ in model, checkpoint or corpus; scores that a scan did not
    measure have no row. ``by_layer`` gives one row per layer (the macro ``layer_distance``), with the column ``layer``.

    The columns are ``score, distance`` (Wasserstein-1, in the score's unit), ``relative_distance`` (divided by
    ``pooled_std``), ``mean_a, mean_b, pooled_std, values_a, values_b``; largest relative distance first.
    """
    names = list(dict.fromkeys(scores))
    if unknown := [name for name in names if name not in SCORES]:
        raise unknown_name("score", unknown[0], SCORES)
    run_a, run_b = (store.resolve_run(run, "scan")["run_id"] for run in (run_a, run_b))
    macro = "one_layer_distance" if by_layer else "one_score_distance"
    # One query per score: a query of all scores would hold both runs in memory.
    tables = [store.query(f"FROM {macro}(?, ?, ?, at_site := ?)", [run_a, run_b, name, site]) for name in names]
    rows = pa.concat_tables(tables) if tables else pa.table({})
    if not rows.num_rows:
        raise ComparisonError(
            f"runs {run_a} and {run_b} have no common score at site {site!r}. Choose a site of both runs, or scan with"
            " the same scores"
        )
    return rows.sort_by([("relative_distance", "descending")])


def _overlap(store: Store, macro: str, run_id: str, what: str, share: float, site: str) -> pa.Table:
    if not 0 < share < 1:
        raise ComparisonError(f"{what} out of range: {share:g} (limit above 0, below 1). Change {what}")
    run_id = store.resolve_run(run_id, "scan")["run_id"]
    # The quantile is a literal because DuckDB accepts no parameter there.
    rows = store.query(f"FROM {macro}(?, {float(share)!r}, at_site := ?)", [run_id, site])
    if not rows.num_rows:
        raise ComparisonError(
            f"run {run_id} has no two scores at site {site!r} that pick a head at {what} {share:g}. Choose another"
            f" {what} or site, or scan with more scores"
        )
    return rows


def comparable_scan(store: Store, scan: Mapping[str, Any]) -> str | None:
    """Return the id of the newest other finished scan with the same heads; None if there is none."""
    for run in store.runs("scan"):
        if run["run_id"] != scan["run_id"] and run["status"] == "finished" and _places(run) == _places(scan):
            return str(run["run_id"])
    return None


def _places(run: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return sorted((site["site"], site["layer"], site["num_attention_heads"]) for site in run["grid"] or ())
