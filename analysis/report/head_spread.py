"""Spread of each head's statistics and scores over the sequences of a scan.

A view over all columns would keep every value of the run in memory; these functions read one column after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headscan.analysis.store.store import Store
from headscan.analysis.store.views import INACTIVE_QUANTILE, PLAIN_STATISTICS, pool_quantile
from headscan.catalog import SCORES, Score


@dataclass(frozen=True)
class SiteHeads:
    """The query heads of one site of a run, (H,) in order of layer and head, and the number of stored sequences."""

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
    """Return a statistic of the catalogue as float32 (H, S), sequences in order; NaN where it was not measured.
    Sequences of unfinished shards are left out.
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
    """Yield name and values (H, S) of each measured score, then of each other measured statistic. Scores are computed
    as in the view ``head_scores``: ratios within one sequence, undefined where the denominator is zero.
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


#: Quantiles over the sequences of a head.
QUANTILES = (0.1, 0.5, 0.9)

#: Shares of the pool of (sequence, head) beyond the thresholds of a score.
THRESHOLDS = (0.05, INACTIVE_QUANTILE, 0.2)

#: Bins of the histogram of a head, and of all heads and sequences together.
HEAD_BINS, POOL_BINS = 16, 80

#: A histogram spans these quantiles of the pool, because a few extreme values would hide the others.
_SPAN = (0.002, 0.998)

#: A head is inactive by a score if it is so in at least this share of the sequences.
MOSTLY = 0.5

_RESAMPLES = 200
_LARGEST_COUNT = 255


@dataclass(frozen=True)
class Persistence:
    """Number of heads that are inactive in most sequences, with its 95 % interval (bootstrap of whole sequences, with
    the threshold fixed); None for a single sequence.
    """

    heads: int
    low: int | None
    high: int | None


@dataclass(frozen=True)
class Spread:
    """One measure of all heads (H,) of a site.

    Attributes:
        quantiles: The `QUANTILES` over the sequences (3, H).
        inactive: Share of sequences beyond the pool's quantile; None without an inactive direction.
        histogram: Sequences by bin, uint8 (H, HEAD_BINS), scaled to at most 255.
        pool: Number of (sequence, head) by bin (POOL_BINS,).
        low, high: Outer ends of the first and last bins, which also hold the values beyond.
        thresholds: By share of `THRESHOLDS`, the value beyond which that share of the pool lies.
    """

    mean: np.ndarray
    std: np.ndarray
    quantiles: np.ndarray
    inactive: np.ndarray | None
    histogram: np.ndarray
    pool: np.ndarray
    low: float
    high: float
    thresholds: dict[float, float]
    persistence: Persistence | None


def mean_over_sequences(values: np.ndarray) -> np.ndarray:
    """Return the mean over the measured sequences (H,)."""
    finite = np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(finite, values, 0).sum(axis=1, dtype=np.float64) / finite.sum(axis=1)


def spread_of(name: str, values: np.ndarray, seed: int = 0) -> Spread:
    """Summarise a measure (H, S), NaN where it was not measured; at least one value is a number."""
    ordered = np.sort(values, axis=1)  # NaN last
    counts = np.isfinite(ordered).sum(axis=1)
    flat = np.sort(values[np.isfinite(values)].astype(np.float64))
    low, high = (float(value) for value in np.quantile(flat, _SPAN))
    if low == high:
        low, high = low - 0.5, high + 0.5
    finite = np.isfinite(values)
    mean = mean_over_sequences(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = (np.where(finite, values - mean[:, None], 0) ** 2).sum(axis=1)
        std = np.where(counts > 1, np.sqrt(squares / (counts - 1)), np.nan)
    score = SCORES.get(name)
    thresholds: dict[float, float] = {}
    inactive, persistence = None, None
    if score is not None:
        thresholds = {share: float(np.quantile(flat, pool_quantile(score, share))) for share in THRESHOLDS}
        limit = thresholds[INACTIVE_QUANTILE]
        beyond = values < limit if score.inactive == "low" else values > limit
        with np.errstate(invalid="ignore"):
            inactive = np.where(counts > 0, beyond.sum(axis=1) / counts, np.nan)
        persistence = _persistence(beyond, finite, seed)
    return Spread(
        mean,
        std,
        np.array([_row_quantile(ordered, counts, q) for q in QUANTILES]),
        inactive,
        _histogram(values, low, high),
        _binned(flat, low, high, POOL_BINS),
        low,
        high,
        thresholds,
        persistence,
    )


def _row_quantile(ordered: np.ndarray, counts: np.ndarray, quantile: float) -> np.ndarray:
    """Return a quantile of each row of sorted numbers, by linear interpolation."""
    place = quantile * np.maximum(counts - 1, 0)
    below = np.floor(place).astype(int)
    above = np.minimum(below + 1, np.maximum(counts - 1, 0))
    rows = np.arange(len(ordered))
    first, second = ordered[rows, below].astype(np.float64), ordered[rows, above]
    return np.where(counts > 0, first + (place - below) * (second - first), np.nan)


def _bin(values: np.ndarray, low: float, high: float, bins: int) -> np.ndarray:
    places = (np.nan_to_num(values, nan=low) - low) * (bins / (high - low))
    return np.clip(places, 0, bins - 1).astype(np.intp)


def _binned(flat: np.ndarray, low: float, high: float, bins: int) -> np.ndarray:
    return np.bincount(_bin(flat, low, high, bins), minlength=bins)


def _histogram(values: np.ndarray, low: float, high: float) -> np.ndarray:
    finite = np.isfinite(values)
    places = _bin(values, low, high, HEAD_BINS) + HEAD_BINS * np.arange(len(values))[:, None]
    counts = np.bincount(places[finite], minlength=HEAD_BINS * len(values)).reshape(-1, HEAD_BINS)
    largest = int(counts.max())
    if largest > _LARGEST_COUNT:
        counts = np.ceil(counts * (_LARGEST_COUNT / largest))
    return counts.astype(np.uint8)


def _persistence(beyond: np.ndarray, finite: np.ndarray, seed: int) -> Persistence:
    """Count heads that are inactive in most sequences, with an interval over resampled sequences."""
    sequences = beyond.shape[1]
    found = _inactive_heads(beyond.sum(axis=1), finite.sum(axis=1))
    if sequences < 2:
        return Persistence(int(found), None, None)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(sequences, np.full(sequences, 1 / sequences), _RESAMPLES).T.astype(np.float32)
    hits = beyond.astype(np.float32) @ weights
    asked = np.full_like(hits, sequences) if finite.all() else finite.astype(np.float32) @ weights
    low, high = np.quantile(_inactive_heads(hits, asked), [0.025, 0.975], method="nearest")
    return Persistence(int(found), int(min(low, found)), int(max(high, found)))


def _inactive_heads(hits: np.ndarray, asked: np.ndarray) -> np.ndarray:
    return ((hits >= MOSTLY * asked) & (asked > 0)).sum(axis=0)


def persistence_text(found: Persistence, heads: int) -> str:
    """Return a count of heads with its share and interval."""
    text = f"{found.heads:,} of {heads:,} heads ({found.heads / heads:.1%})"
    return text if found.low is None else f"{text} [{found.low:,}, {found.high:,}]"


def inactive_counts(spreads: Mapping[str, Spread]) -> list[tuple[str, Persistence]]:
    """Return the number of mostly inactive heads by score."""
    return [(name, spread.persistence) for name, spread in spreads.items() if spread.persistence is not None]
