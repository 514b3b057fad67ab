"""All values of a store's measures, and the spread of a matrix of values, for tests that compute the same by hand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headscan.store.head_spread import Spread, resampling, summarised
from headscan.store.site_rows import MeasureValues, SiteHeads, SiteRows, StoredMeasure
from headscan.store.store import Store
from headscan.store.summaries import sites_of
from headscan.store.views import SUMMARISED


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
            measure = StoredMeasure(rows, name)
            values = np.full((len(heads), rows.sequences), np.nan, np.float64 if measure.ratio else np.float32)

            def keep(layer: slice, found: np.ndarray, values: np.ndarray = values) -> None:
                values[layer] = found

            measure.values(threads).for_blocks(keep)
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
