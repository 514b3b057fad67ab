"""Summaries of a scan as rows: one per head and measure, and one per pool of a measure.

A finished scan stores these rows (tables ``head_summaries`` and ``measure_pools``), so that no question reads all rows
of ``head_statistics``. For an unfinished run the same numbers are computed by `headscan.store.head_spread`.
A store that gets the views of a new score loses the summaries that lack it; the next `Store.summarise` stores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from headscan.catalog import PROFILES, SCORES
from headscan.store.head_spread import Persistence, SiteSummary, Spread, site_quantiles, summarise_site
from headscan.store.scan_tables import HEAD_BINS, literal
from headscan.store.site_rows import SiteHeads, column_values
from headscan.store.views import SUMMARISED, profile_means_sql


def _counted_heads(connection: duckdb.DuckDBPyConnection, run_id: str) -> pa.Table:
    """Return ``site, layer, head, kv_head`` of a run's heads, and their number of sequences."""
    counted, table = "count(*)", "head_statistics"
    if is_summarised(connection, run_id):
        counted, table = "max(sequences)", "head_summaries"
    return connection.sql(
        f"SELECT site, layer, head, min(kv_head) AS kv_head, {counted} AS sequences FROM {table}"
        " WHERE run_id = ? GROUP BY site, layer, head ORDER BY site <> 'self', site, layer, head",
        params=[run_id],
    ).to_arrow_table()


def sites_of(connection: duckdb.DuckDBPyConnection, run_id: str) -> list[SiteHeads]:
    """Return the heads of each site of a scan, self-attention first."""
    return _sites(run_id, _counted_heads(connection, run_id))


def _sites(run_id: str, rows: pa.Table) -> list[SiteHeads]:
    names = np.array(rows["site"].to_pylist(), dtype=object)
    columns = {name: column_values(rows[name]).astype(int) for name in ("layer", "head", "kv_head", "sequences")}
    sites = []
    for site in dict.fromkeys(names.tolist()):
        layer, head, kv_head, counts = (column[names == site] for column in columns.values())
        sites.append(SiteHeads(run_id, site, layer, head, kv_head, int(counts.max()), counts))
    return sites


class SummaryRows(NamedTuple):
    """The summary of a run's first ``shards`` shards as rows of ``head_summaries`` and of ``measure_pools``; columns
    that a table lacks are NULL.
    """

    shards: int
    heads: list[pa.Table]
    pools: list[pa.Table]


def count_shards(connection: duckdb.DuckDBPyConnection, run_id: str) -> int:
    """Return the number of shards of a run."""
    rows = connection.execute("SELECT count(*) FROM shards WHERE run_id = ?", [run_id]).fetchall()
    return int(rows[0][0])


def summarise_run(connection: duckdb.DuckDBPyConnection, run_id: str) -> SummaryRows:
    """Return the summary of a run; without rows if no head was measured."""
    bounded = bounded_keys(connection, run_id)
    counted = _counted_heads(connection, run_id)
    summarised = SummaryRows(count_shards(connection, run_id), [], [])
    for heads in _sites(run_id, counted):
        summary = summarise_site(connection, heads, bounded)
        summarised.heads.extend(_head_rows(heads, name, spread) for name, spread in summary.spreads.items())
        summarised.pools.extend(_pool_row(heads, name, spread) for name, spread in summary.spreads.items())
    connection.register("counted_heads", counted)
    for profile in PROFILES.values():
        of_run = f"(SELECT * FROM head_statistics WHERE run_id = {literal(run_id)})"
        rows = connection.sql(
            f"SELECT {literal(profile.name)} AS measure, p.*, sequences FROM"
            f" ({profile_means_sql(profile, of_run)}) p JOIN counted_heads USING (site, layer, head)"
        ).to_arrow_table()
        summarised.heads.extend([rows] if rows.num_rows else [])
    connection.unregister("counted_heads")
    return summarised


def bounded_keys(connection: duckdb.DuckDBPyConnection, run_id: str) -> int | None:
    """Return the number of keys of sink and recent together; None if the run does not record it."""
    rows = connection.execute("SELECT config::VARCHAR FROM runs WHERE run_id = ?", [run_id]).fetchall()
    config = json.loads(rows[0][0]) if rows else {}
    widths = [config[name] for name in ("sink", "recent") if isinstance(config.get(name), int)]
    return sum(widths) if len(widths) == 2 else None


def _head_rows(heads: SiteHeads, name: str, spread: Spread) -> pa.Table:
    count = len(heads)
    numbers = {
        "mean": spread.mean,
        "std": spread.std,
        "p10": spread.quantiles[0],
        "median": spread.quantiles[1],
        "p90": spread.quantiles[2],
        "inactive": spread.inactive,
        "long_mean": spread.long_mean,
        "far_mean": spread.far_mean,
    }
    return pa.table(
        {
            "run_id": [heads.run_id] * count,
            "site": [heads.site] * count,
            "layer": heads.layer,
            "head": heads.head,
            "kv_head": heads.kv_head,
            "measure": [name] * count,
            "sequences": heads.counts,
            "measured": spread.measured,
            **{key: pa.array(value, from_pandas=True) for key, value in numbers.items() if value is not None},
            "histogram": list(spread.counts),
        }
    )


def _pool_row(heads: SiteHeads, name: str, spread: Spread) -> pa.Table:
    persistence = spread.persistence
    row = {
        "run_id": heads.run_id,
        "site": heads.site,
        "measure": name,
        "low": spread.low,
        "high": spread.high,
        "histogram": spread.pool.tolist(),
    }
    if persistence is not None:
        row |= {
            "inactive_heads": persistence.heads,
            "inactive_heads_low": persistence.low,
            "inactive_heads_high": persistence.high,
        }
    table = pa.Table.from_pylist([row])
    if persistence is None:
        return table
    shares = pa.array([list(spread.thresholds.items())], pa.map_(pa.float64(), pa.float64()))
    picks = pa.array([list(spread.picks.items())], pa.map_(pa.string(), pa.int64()))
    return table.append_column("thresholds", shares).append_column("picks", picks)


def incomplete_summaries_sql() -> str:
    """Return SQL for the runs whose summary lacks a score that follows from their statistics, because it was stored
    before the catalogue declared the score.
    """
    scores = ", ".join(
        f"({', '.join(map(literal, (score.name, score.statistic, score.normaliser or score.statistic)))})"
        for score in SCORES.values()
    )
    return f"""
        SELECT run_id FROM (VALUES {scores}) AS declared(score, statistic, normaliser)
        JOIN (SELECT run_id, site, list(measure) AS measured, list(measure) FILTER (thresholds IS NOT NULL) AS scored
            FROM measure_pools GROUP BY run_id, site) ON list_has_all(measured, [statistic, normaliser])
        WHERE NOT coalesce(list_contains(scored, score), false)
    """


def is_summarised(connection: duckdb.DuckDBPyConnection, run_id: str) -> bool:
    """Return True if the store has the summary of a run."""
    stored = connection.execute("SELECT 1 FROM head_summaries WHERE run_id = ? LIMIT 1", [run_id])
    return bool(stored.fetchall())


def site_summaries(
    connection: duckdb.DuckDBPyConnection, run_id: str, names: Sequence[str] = SUMMARISED
) -> list[SiteSummary]:
    """Return the summaries of a run's sites, self-attention first: as stored, else computed from all rows."""
    sites = sites_of(connection, run_id)
    if is_summarised(connection, run_id):
        return [_stored(connection, heads, names) for heads in sites]
    bounded = bounded_keys(connection, run_id)
    return [summarise_site(connection, heads, bounded, names) for heads in sites]


def _stored(connection: duckdb.DuckDBPyConnection, heads: SiteHeads, names: Sequence[str]) -> SiteSummary:
    of_site = "WHERE run_id = ? AND site = ?"
    key = [heads.run_id, heads.site]
    pools = connection.sql(f"FROM measure_pools {of_site}", params=key).to_arrow_table().to_pylist()
    rows = connection.sql(
        f"SELECT * EXCLUDE (run_id, site, shares) FROM head_summaries {of_site} AND histogram IS NOT NULL"
        " ORDER BY measure, layer, head",
        params=key,
    ).to_arrow_table()
    kinds = np.array(rows["measure"].to_pylist(), dtype=object)
    spreads = {}
    for pool in pools:
        start = int(np.searchsorted(kinds, pool["measure"]))
        spreads[pool["measure"]] = _stored_spread(pool, rows.slice(start, len(heads)))
    return SiteSummary(heads, {name: spreads[name] for name in names if name in spreads})


def _stored_spread(pool: Mapping[str, Any], rows: pa.Table) -> Spread:
    def column(name: str) -> np.ndarray:
        return column_values(rows[name]).astype(np.float64)

    persistence = None
    if pool["inactive_heads"] is not None:
        persistence = Persistence(*(pool[f"inactive_heads{end}"] for end in ("", "_low", "_high")))
    counts = np.from_dlpack(rows["histogram"].combine_chunks().flatten()).reshape(rows.num_rows, HEAD_BINS)
    return Spread(
        measured=column("measured").astype(np.int64),
        mean=column("mean"),
        std=column("std"),
        quantiles=np.array([column(name) for name in ("p10", "median", "p90")]),
        inactive=None if persistence is None else column("inactive"),
        counts=counts,
        pool=np.array(pool["histogram"]),
        long_mean=column("long_mean"),
        far_mean=column("far_mean"),
        low=pool["low"],
        high=pool["high"],
        thresholds=dict(pool["thresholds"] or ()),
        persistence=persistence,
        picks=dict(pool["picks"] or ()),
    )


def pool_quantiles(
    connection: duckdb.DuckDBPyConnection, run_id: str, site: str, name: str, levels: Sequence[float]
) -> list[float] | None:
    """Return quantiles of a measure over all heads and sequences of a site; None if the run did not measure it."""
    heads = next((each for each in sites_of(connection, run_id) if each.site == site), None)
    return None if heads is None else site_quantiles(connection, heads, name, levels)
