"""The statistics and scores of a scan as arrays of heads x sequences.

A view over all columns would keep every value of the run in memory; these functions read one column after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headscan.analysis.schema.views import PLAIN_STATISTICS
from headscan.analysis.store.store import Store
from headscan.catalog import SCORES, Score


@dataclass(frozen=True)
class SiteHeads:
    """The query heads of one site of a run, in order of layer and head.

    Attributes:
        layer: Layer of each head, (H,); head and kv_head likewise.
        sequences: Number of stored sequences.
    """

    run_id: str
    site: str
    layer: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    sequences: int

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def index(self) -> np.ndarray:
        """Row of each (layer, head), -1 where there is none; (layers, heads)."""
        found = np.full((int(self.layer.max()) + 1, int(self.head.max()) + 1), -1)
        found[self.layer, self.head] = np.arange(len(self))
        return found

    def row(self, layer: int, head: int) -> int | None:
        """Return the row of a head; None if the site has no such head."""
        index = self.index
        if not (0 <= layer < index.shape[0] and 0 <= head < index.shape[1]) or index[layer, head] < 0:
            return None
        return int(index[layer, head])


def read_sites(store: Store, run_id: str) -> list[SiteHeads]:
    """Return the heads of each site of a scan, self-attention first."""
    rows = store.query(
        "SELECT site, layer, head, min(kv_head) AS kv_head, count(*) AS sequences FROM head_statistics"
        " WHERE run_id = ? GROUP BY site, layer, head ORDER BY site <> 'self', site, layer, head",
        [run_id],
    )
    names = np.array(rows["site"].to_pylist(), dtype=object)
    columns = {name: rows[name].to_numpy().astype(int) for name in ("layer", "head", "kv_head", "sequences")}
    found = []
    for site in dict.fromkeys(names.tolist()):
        of_site = names == site
        layer, head, kv_head = (columns[name][of_site] for name in ("layer", "head", "kv_head"))
        found.append(SiteHeads(run_id, site, layer, head, kv_head, int(columns["sequences"][of_site].max())))
    return found


def read_statistic(store: Store, heads: SiteHeads, name: str) -> np.ndarray:
    """Return a statistic as float32 (H, S); NaN where it was not measured.

    Args:
        name: A statistic of the catalogue. Sequences are in order; those of unfinished shards are left out.
    """
    rows = store.query(
        f"SELECT sequence, layer, head, {name} AS value FROM head_statistics WHERE run_id = ? AND site = ?",
        [heads.run_id, heads.site],
    )
    values = rows["value"].to_numpy()
    row = heads.index[rows["layer"].to_numpy().astype(int), rows["head"].to_numpy().astype(int)]
    numbers, column = np.unique(rows["sequence"].to_numpy(), return_inverse=True)
    found = np.full((len(heads), len(numbers)), np.nan, dtype=np.float32)
    found[row, column] = values
    return found


def read_measures(store: Store, heads: SiteHeads) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and values (H, S) of each measured score, then of each other measured statistic.

    Scores are computed as in the view ``head_scores``: ratios within one sequence, undefined where the denominator is
    zero.
    """
    by_statistic: dict[str, list[Score]] = {}
    for score in SCORES.values():
        by_statistic.setdefault(score.statistic, []).append(score)
    for statistic, scores in by_statistic.items():
        values = read_statistic(store, heads, statistic)
        if np.isnan(values).all():
            continue
        for score in scores:
            derived = values if score.normaliser is None else _ratio(store, heads, score, values)
            if not np.isnan(derived).all():
                yield score.name, derived
    for name in PLAIN_STATISTICS:
        values = read_statistic(store, heads, name)
        if not np.isnan(values).all():
            yield name, values


def _ratio(store: Store, heads: SiteHeads, score: Score, values: np.ndarray) -> np.ndarray:
    assert score.normaliser is not None
    same = score.normaliser == score.statistic
    below = values if same else read_statistic(store, heads, score.normaliser)
    denominator = below.astype(np.float64) if score.over == "head" else layer_means(heads, below)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator == 0, np.nan, values / denominator)


def layer_means(heads: SiteHeads, values: np.ndarray) -> np.ndarray:
    """Return the mean over the measured heads of each head's layer, float64 (H, S)."""
    means = np.empty(values.shape, dtype=np.float64)
    for layer in np.unique(heads.layer):
        rows = heads.layer == layer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a layer may have no measured head in a sequence
            means[rows] = np.nanmean(values[rows].astype(np.float64), axis=0)
    return means
