"""Reading what ``comparison_macros`` computes: which scores agree in a scan, and what moved between two scans."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from headscan.analysis.errors import AnalysisError
from headscan.analysis.store.store import Store
from headscan.catalog import SCORES


class ComparisonError(AnalysisError):
    """Scores or runs cannot be compared as asked."""


def score_overlap(store: Store, run_id: str, quantile: float = 0.1, *, site: str = "self") -> pa.Table:
    """What the rules of every two scores would ablate together: the rows of the SQL macro ``score_overlap``.

    Args:
        run_id: A scan, or the beginning of its id.
        quantile: Share of the pool of (sequence, layer, head) that each rule ablates, between 0 and 1.

    Returns:
        One row per pair, in the catalogue's order: ``score_a, score_b, picked_a, picked_b, both, overlap`` (0 to 1).

    Raises:
        ComparisonError: A quantile out of range, or fewer than two scores that pick a head at this site.
        StoreError: No such scan, or several.
    """
    return _overlap(store, "score_overlap", run_id, "quantile", quantile, site)


def mask_overlap(store: Store, run_id: str, share: float = 0.1, *, site: str = "self") -> pa.Table:
    """The same of masks: heads picked once for all sequences, by their mean score; the SQL macro ``mask_overlap``.

    Args:
        share: Share of all heads that each mask holds, between 0 and 1.

    Returns:
        As of ``score_overlap``; counts are of heads.

    Raises:
        ComparisonError: A share out of range, or fewer than two scores measured at this site.
        StoreError: No such scan, or several.
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
    """How far each score's distribution moved between two scans: the rows of the SQL macro ``score_distance``.

    The scans may be of two models, of one model before and after tuning, or of two corpora.

    Args:
        run_a: A scan, or the beginning of its id.
        run_b: Another one.
        scores: Those to compare; what one of the scans did not measure has no row.
        by_layer: Layer by layer (the macro ``layer_distance``), which adds the column ``layer``.

    Returns:
        ``score, distance`` (Wasserstein-1, in the score's unit), ``relative_distance`` (divided by ``pooled_std``),
        ``mean_a, mean_b, pooled_std, values_a, values_b``; the largest relative distance first.

    Raises:
        ComparisonError: An unknown score, or none that both scans measured at this site.
        StoreError: No such scan, or several.
    """
    names = list(dict.fromkeys(scores))
    if unknown := [name for name in names if name not in SCORES]:
        raise ComparisonError(f"unknown score {unknown[0]!r}: there are {', '.join(SCORES)}")
    run_a, run_b = (store.resolve_run(run, "scan")["run_id"] for run in (run_a, run_b))
    macro = "one_layer_distance" if by_layer else "one_score_distance"
    # One at a time: all of them in one query would hold every score of both runs in memory.
    tables = [store.query(f"FROM {macro}(?, ?, ?, at_site := ?)", [run_a, run_b, name, site]) for name in names]
    rows = pa.concat_tables(tables) if tables else pa.table({})
    if not rows.num_rows:
        raise ComparisonError(
            f"runs {run_a} and {run_b} have no score at site {site!r} in common: name a site both have, or scan with"
            " the same scores"
        )
    return rows.sort_by([("relative_distance", "descending")])


def _overlap(store: Store, macro: str, run_id: str, what: str, share: float, site: str) -> pa.Table:
    if not 0 < share < 1:
        raise ComparisonError(f"{what} {share:g} is out of range: above 0 and below 1")
    run_id = store.resolve_run(run_id, "scan")["run_id"]
    # Quantiles have to be written out: DuckDB takes no parameter for them.
    rows = store.query(f"FROM {macro}(?, {float(share)!r}, at_site := ?)", [run_id, site])
    if not rows.num_rows:
        raise ComparisonError(
            f"run {run_id} has no two scores at site {site!r} that pick a head at {what} {share:g}: choose another"
            f" {what} or site, or scan with more scores"
        )
    return rows
