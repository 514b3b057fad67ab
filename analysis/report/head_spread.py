"""Spread of each head's statistics and scores over the sequences of a scan, as `headscan.analysis.store.summaries`
computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headscan.analysis.store.store import Store
from headscan.analysis.store.summaries import (
    QUANTILES,
    Measure,
    MeasureValues,
    Persistence,
    SiteHeads,
    SiteRows,
    Spread,
    resampling,
    sites_of,
    summarised,
)
from headscan.analysis.store.verdict_limits import HEAD_BINS, MOSTLY, POOL_BINS, THRESHOLDS
from headscan.analysis.store.views import SUMMARISED

__all__ = [
    "HEAD_BINS",
    "MOSTLY",
    "POOL_BINS",
    "QUANTILES",
    "THRESHOLDS",
    "Persistence",
    "SiteHeads",
    "Spread",
    "inactive_counts",
    "persistence_text",
    "read_measures",
    "read_sites",
    "spread_of",
]


def read_sites(store: Store, run_id: str) -> list[SiteHeads]:
    """Return the heads of each site of a scan, self-attention first."""
    with store.connect(read_only=True) as connection:
        return sites_of(connection, run_id)


def read_measures(store: Store, heads: SiteHeads) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and values (H, S), sequences in order, of each measured score, then of each other measured statistic;
    NaN where it was not measured or is undefined.
    """
    with store.connect(read_only=True) as connection, ThreadPoolExecutor(1) as threads:
        rows = SiteRows(connection, heads)
        for name in SUMMARISED:
            measure = Measure(rows, name)
            values = np.full((len(heads), rows.sequences), np.nan, np.float64 if measure.ratio else np.float32)

            def keep(layer: slice, found: np.ndarray, values: np.ndarray = values) -> None:
                values[layer] = found

            measure.values(threads).each(keep)
            if not np.isnan(values).all():
                yield name, values


def spread_of(name: str, values: np.ndarray, seed: int = 0) -> Spread:
    """Summarise a measure (H, S), NaN where it was not measured; at least one value is a number."""
    heads, sequences = values.shape
    given = MeasureValues(
        heads, sequences, lambda work: work(slice(0, heads), values), lambda step: values.ravel()[::step]
    )
    found = summarised(name, given, resampling(sequences, seed))
    assert found is not None
    return found[0]


def persistence_text(found: Persistence, heads: int) -> str:
    """Return a count of heads with its share and interval."""
    text = f"{found.heads:,} of {heads:,} heads ({found.heads / heads:.1%})"
    return text if found.low is None else f"{text} [{found.low:,}, {found.high:,}]"


def inactive_counts(spreads: Mapping[str, Spread]) -> list[tuple[str, Persistence]]:
    """Return the number of mostly inactive heads by score."""
    return [(name, spread.persistence) for name, spread in spreads.items() if spread.persistence is not None]
