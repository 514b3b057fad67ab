"""All values of a store's measures, and the spread of a matrix of values, for tests that compute the same by hand."""

from __future__ import annotations

import numpy as np

from headscan.store.head_spread import Spread, resampling, summarised
from headscan.store.site_rows import MeasureValues, SiteHeads
from headscan.store.store import Store
from headscan.store.summaries import sites_of


def read_sites(store: Store, run_id: str) -> list[SiteHeads]:
    """Return the heads of each site of a scan, self-attention first."""
    with store.connect(read_only=True) as connection:
        return sites_of(connection, run_id)


def spread_of(name: str, values: np.ndarray, seed: int = 0) -> Spread:
    """Summarise a measure (H, S), NaN where it was not measured; at least one value is a number."""
    heads, sequences = values.shape
    given = MeasureValues(
        heads, sequences, lambda work: work(slice(0, heads), values), lambda step: values.ravel()[::step]
    )
    found = summarised(name, given, resampling(sequences, seed))
    assert found is not None
    return found[0]
