"""Spread of each head's statistics and scores over the sequences of a scan, computed a statistic at a time.

Every number equals what SQL computes from all rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import duckdb
import numpy as np

from headscan.catalog import SCORES
from headscan.store.scan_tables import HEAD_BINS, INACTIVE_QUANTILE, MOSTLY, POOL_BINS, SPAN, THRESHOLDS
from headscan.store.site_rows import MeasureValues, SiteHeads, SiteRows, StoredMeasure
from headscan.store.views import SUMMARISED, pool_quantile
from headscan.text_tables import percent

#: Most threads, each of which holds the values of a layer.
_THREADS = min(8, os.cpu_count() or 1)
#: Heads whose bits are unpacked at one time.
_UNPACKED = 64
#: Most values of a pool's sample. A smaller pool is its own sample.
_SAMPLE = 1 << 18
#: Sequences up to which it is faster to sort all values of a head than to look into the bins of its quantiles.
_SORTED = 1024
#: Bins in which quantiles of a head are looked up, for each bin of the pool.
_FINER = 32

#: Quantiles over the sequences of a head.
QUANTILES = (0.1, 0.5, 0.9)
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

    def words(self, heads: int) -> str:
        """Return the count with its share of ``heads``, the number of all heads, and its interval."""
        text = f"{self.heads:,} of {heads:,} heads ({percent(self.heads / heads)})"
        return text if self.low is None else f"{text} [{self.low:,}, {self.high:,}]"


@dataclass
class Spread:
    """One measure of all heads (H,) of a site.

    Attributes:
        measured: Number of sequences with a value.
        quantiles: The `QUANTILES` over the sequences (3, H).
        inactive: Share of sequences beyond the pool's quantile; None without an inactive direction.
        counts: Number of sequences by bin (H, HEAD_BINS).
        pool: Number of (sequence, head) by bin (POOL_BINS,).
        low, high: Outer ends of the first and last bins, which also hold the values beyond.
        thresholds: By share of `THRESHOLDS`, the value beyond which that share of the pool lies.
        picks: Number of (sequence, head) beyond the threshold of `INACTIVE_QUANTILE`, by each score the number that it
            has in common with this one.
        long_mean: Mean over the sequences that are longer than sink and recent together.
        far_mean: Mean over the queries that have distant keys, of distant_mass; None for others.
    """

    measured: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    quantiles: np.ndarray
    inactive: np.ndarray | None
    counts: np.ndarray
    pool: np.ndarray
    long_mean: np.ndarray
    far_mean: np.ndarray | None
    low: float = math.nan
    high: float = math.nan
    thresholds: dict[float, float] = field(default_factory=dict)
    persistence: Persistence | None = None
    picks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, heads: int, *, scored: bool, far: bool) -> Spread:
        """Return the spread of a measure that has no value yet, ``scored`` with an inactive direction."""
        nan = np.full(heads, np.nan)
        return cls(
            measured=np.zeros(heads, dtype=np.int64),
            mean=nan.copy(),
            std=nan.copy(),
            quantiles=np.full((len(QUANTILES), heads), np.nan),
            inactive=nan.copy() if scored else None,
            counts=np.zeros((heads, HEAD_BINS), dtype=np.int64),
            pool=np.zeros(POOL_BINS, dtype=np.int64),
            long_mean=nan.copy(),
            far_mean=nan.copy() if far else None,
        )

    @property
    def histogram(self) -> np.ndarray:
        """Sequences by bin, uint8 (H, HEAD_BINS), scaled to at most 255."""
        largest = int(self.counts.max())
        if largest <= _LARGEST_COUNT:
            return self.counts.astype(np.uint8)
        return np.ceil(self.counts * (_LARGEST_COUNT / largest)).astype(np.uint8)


def inactive_counts(spreads: Mapping[str, Spread]) -> list[tuple[str, Persistence]]:
    """Return the number of mostly inactive heads by score."""
    return [(name, spread.persistence) for name, spread in spreads.items() if spread.persistence is not None]


def between(first: np.ndarray, second: np.ndarray, part: np.ndarray | float) -> np.ndarray:
    """Interpolate between neighbouring values of REAL or DOUBLE as DuckDB does, to the last bit: values may be
    compared with the result.
    """
    low, high = first.astype(np.float64), second.astype(np.float64)
    if first.dtype == np.float32:
        return _fused(high - low, part, low).astype(np.float32).astype(np.float64)
    return _fused(low, 1.0 - part, high * part)


def _fused(a: np.ndarray, b: np.ndarray | float, c: np.ndarray) -> np.ndarray:
    """Return ``a * b + c`` with one rounding (Dekker, 1971)."""
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    lost = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2
    total = product + c
    back = total - product
    return total + (lost + ((product - (total - back)) + (c - back)))


def _halves(x: np.ndarray | float) -> tuple[Any, Any]:
    """Return two numbers of half the digits whose sum is ``x``."""
    scaled = x * 134217729.0  # 2 ** 27 + 1
    high = scaled - (scaled - x)
    return high, x - high


class _PoolQuantiles:
    """Exact quantiles of all values of a measure, although only a sample and the values near them are held: the sample
    brackets each quantile, and ``collect`` keeps the values in its bracket and counts those below.
    """

    def __init__(self, values: MeasureValues, levels: Sequence[float]) -> None:
        self._values, self._levels = values, levels
        step = max(1, values.heads * values.sequences // _SAMPLE)
        while math.gcd(step, values.sequences) > 1:  # so that the heads are sampled in different sequences
            step += 1
        sample = values.sample(step)
        self._sample = np.sort(sample[np.isfinite(sample)])
        #: True if the sample holds every value.
        self.whole = step == 1
        # In standard errors of the rank, wide because heads are alike in a sequence.
        self._apart = 8
        self._bracket()

    def _bracket(self) -> None:
        last = len(self._sample) - 1
        self._brackets: list[tuple[Any, Any]] = []
        for level in self._levels:
            apart = self._apart * (math.isqrt(int(level * (1 - level) * len(self._sample))) + 1)
            low, high = int(level * last) - apart, int(level * last) + apart
            self._brackets.append(
                (self._sample[low] if low >= 0 else -np.inf, self._sample[high] if high <= last else np.inf)
            )
        self._inside: list[list[np.ndarray]] = [[] for _ in self._levels]
        self._below: list[list[int]] = [[] for _ in self._levels]

    def collect(self, values: np.ndarray) -> None:
        """Add some of the values, in any order and from any thread."""
        if self.whole:
            return
        for (low, high), inside, below in zip(self._brackets, self._inside, self._below, strict=True):
            lower = values < low
            below.append(int(np.count_nonzero(lower)))
            inside.append(values[~lower & (values <= high)])

    def quantiles(self, count: int) -> list[tuple[float, float]]:
        """Return each quantile of the ``count`` values, as DOUBLE and in the precision of the values, once all values
        are collected.
        """
        while True:
            pairs = [self._pair(i, level * (count - 1), count) for i, level in enumerate(self._levels)]
            found = [pair for pair in pairs if pair is not None]
            if len(found) == len(pairs):
                return found
            self._apart *= 8  # a bracket missed its values
            self._bracket()
            self._values.for_blocks(lambda _, values: self.collect(values))

    def _pair(self, index: int, place: float, count: int) -> tuple[float, float] | None:
        rank, after = int(place), min(int(place) + 1, count - 1)
        near, skipped = self._sample, 0
        if not self.whole:
            near, skipped = np.concatenate(self._inside[index]), sum(self._below[index])
        if rank < skipped or after >= skipped + len(near):
            return None
        ranks, part = [rank - skipped, after - skipped], place - rank
        low, high = np.partition(near, ranks)[ranks]
        exact = between(low.astype(np.float64), high.astype(np.float64), part)
        return float(exact), float(between(low, high, part))


class Resampling(NamedTuple):
    """Resamples of the sequences: how often each is in each resample, float32 (S, resamples), and the largest number of
    times that 0 to S sequences are in a resample together (S + 1,).
    """

    weights: np.ndarray
    most: np.ndarray


def resampling(sequences: int, seed: int = 0) -> Resampling:
    """Return resamples of as many sequences, the same for the same seed."""
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(sequences, np.full(sequences, 1 / sequences), _RESAMPLES).astype(np.float32)
    heaviest = np.sort(weights, axis=1)[:, ::-1].cumsum(axis=1).max(axis=0)
    return Resampling(weights.T, np.append(0, heaviest))


def summarised(
    name: str,
    values: MeasureValues,
    resamples: Resampling,
    *,
    long: np.ndarray | None = None,
    far: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[Spread, np.ndarray] | None:
    """Return the summary of a measure and the bits of the (head, sequence) beyond its threshold; None without values.
    ``long`` are the sequences that ``long_mean`` averages; ``far`` are the tokens of the sequences, and those that have
    distant keys, for ``far_mean``. Without ``long`` or ``far`` its mean is left out.
    """
    score = SCORES.get(name)
    spread = Spread.empty(values.heads, scored=score is not None, far=far is not None)
    pools = np.zeros((values.heads, POOL_BINS), dtype=np.int64)
    bits = np.zeros((values.heads, (values.sequences + 7) // 8 if score is not None else 0), dtype=np.uint8)
    levels = [*SPAN] if score is None else [*SPAN, *(pool_quantile(score, share) for share in THRESHOLDS)]
    pool = _PoolQuantiles(values, levels)

    def first(rows: slice, of_rows: np.ndarray) -> None:
        pool.collect(of_rows)
        _moments(spread, rows, of_rows, long, far)

    values.for_blocks(first)
    count = int(spread.measured.sum())
    if not count:
        return None
    ordered = pool.quantiles(count)
    (low, _), (high, _) = ordered[:2]
    spread.low, spread.high = (low - 0.5, high + 0.5) if low == high else (low, high)
    if score is not None:
        spread.thresholds = dict(zip(THRESHOLDS, (exact for exact, _ in ordered[2:]), strict=True))
    limit = None if score is None else ordered[2 + THRESHOLDS.index(INACTIVE_QUANTILE)][1]
    complete = count == values.heads * values.sequences
    measured = None if complete or score is None else np.zeros_like(bits)

    def second(rows: slice, of_rows: np.ndarray) -> None:
        _count_bins(spread, pools, rows, of_rows)
        if score is not None:
            assert limit is not None
            bits[rows] = np.packbits(of_rows < limit if score.inactive == "low" else of_rows > limit, axis=1)
        if measured is not None:
            measured[rows] = np.packbits(np.isfinite(of_rows), axis=1)

    values.for_blocks(second)
    spread.pool = pools.sum(axis=0)
    if score is not None:
        _count_inactive(spread, bits, measured, resamples)
    return spread, bits


def _moments(
    spread: Spread, rows: slice, values: np.ndarray, long: np.ndarray | None, far: tuple[np.ndarray, np.ndarray] | None
) -> None:
    exact = values.astype(np.float64)
    total = exact.sum(axis=1)
    complete = bool(np.isfinite(total).all())
    finite = np.ones((1, values.shape[1]), dtype=bool) if complete else np.isfinite(exact)
    counts = np.broadcast_to(np.count_nonzero(finite, axis=1), len(values))
    if not complete:
        exact = np.where(finite, exact, 0)
        total = exact.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total / counts
        if long is not None:
            spread.long_mean[rows] = mean if long.all() else (exact @ long) / (finite @ long.astype(np.float64))
        if spread.far_mean is not None and far is not None and long is not None:
            tokens, queries = far
            spread.far_mean[rows] = exact @ (tokens * long) / (finite @ (queries * long))
        exact -= mean[:, None]
        if not complete:
            exact[~finite] = 0
        squares = np.einsum("rs,rs->r", exact, exact)
        spread.std[rows] = np.where(counts > 1, np.sqrt(squares / (counts - 1)), np.nan)
    spread.measured[rows], spread.mean[rows] = counts, mean


def _count_bins(spread: Spread, pools: np.ndarray, rows: slice, values: np.ndarray) -> None:
    """Count the bins of each row, those of the pool in ``pools`` (H, POOL_BINS), and find its quantiles."""
    counts, (heads, sequences) = spread.measured[rows], values.shape
    # Finer bins, so that few values share one with a quantile; a power of two keeps the ends of the pool's bins.
    bins = POOL_BINS * _FINER
    places = values.astype(np.float64)
    places -= spread.low
    places *= bins / (spread.high - spread.low)
    np.clip(places, 0, bins - 1, out=places)
    if (counts < sequences).any():
        places[np.isnan(places)] = bins
    of_values = places.astype(np.intp)
    # Ranks next to each quantile (3, h), and the part of the way from one to the other.
    last = np.maximum(counts - 1, 0)
    place = np.array(QUANTILES)[:, None] * last
    below = np.floor(place).astype(int)
    after, part = np.minimum(below + 1, last), place - below
    near = np.zeros((2 * len(QUANTILES), heads), dtype=values.dtype)
    for row in range(heads):
        found = np.bincount(of_values[row], minlength=bins + 1)
        pools[rows.start + row] = found[:bins].reshape(POOL_BINS, -1).sum(axis=1)
        if sequences > _SORTED:
            ranks = np.concatenate([below[:, row], after[:, row]])
            near[:, row] = _ordered(values[row], of_values[row], found, ranks)
    spread.counts[rows] = pools[rows].reshape(heads, HEAD_BINS, -1).sum(axis=2)
    if sequences <= _SORTED:
        near = np.sort(values, axis=1)[np.arange(heads), np.concatenate([below, after])]  # NaN last
    first, second = np.split(near, 2)
    spread.quantiles[:, rows] = np.where(counts > 0, between(first, second, part), np.nan)


def _ordered(values: np.ndarray, bins: np.ndarray, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the values of ``ranks`` (n,) among the values (S,) of ``bins`` (S,), in which ``counts`` values are; only
    the values of the bins that hold them are sorted.
    """
    holding = np.searchsorted(counts.cumsum(), ranks, "right")
    wanted = np.zeros(len(counts), dtype=bool)
    wanted[holding] = True
    skipped = np.where(wanted, 0, counts).cumsum()[holding]
    return np.sort(values[wanted[bins]])[ranks - skipped]


def _count_inactive(spread: Spread, bits: np.ndarray, measured: np.ndarray | None, resamples: Resampling) -> None:
    """Fill in the share of the sequences beyond the threshold and the number of mostly inactive heads, from the bits of
    the (head, sequence) beyond the threshold, uint8 (H, S / 8), and of those with a value, None if all have one.
    """
    weights, most = resamples
    sequences = len(weights)
    beyond = _count_set(bits)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread.inactive = beyond / spread.measured
    mostly = int((spread.inactive >= MOSTLY).sum())
    if sequences == 1:
        spread.persistence = Persistence(mostly, None, None)
        return
    # If all values of a head were measured, the extreme resamples often decide.
    complete = spread.measured == sequences
    always = complete & (sequences - most[sequences - beyond] >= MOSTLY * sequences)
    unsure = ~complete | (~always & (most[beyond] >= MOSTLY * sequences))
    heads = np.full(weights.shape[1], np.count_nonzero(always))
    for rows in np.array_split(np.flatnonzero(unsure), len(bits) // _UNPACKED + 1):
        hits = _unpacked(bits[rows], sequences) @ weights
        asked = np.full_like(hits, sequences) if measured is None else _unpacked(measured[rows], sequences) @ weights
        heads += ((hits >= MOSTLY * asked) & (asked > 0)).sum(axis=0)
    low, high = np.quantile(heads, [0.025, 0.975], method="nearest")
    spread.persistence = Persistence(mostly, int(min(low, mostly)), int(max(high, mostly)))


def _unpacked(bits: np.ndarray, sequences: int) -> np.ndarray:
    """Return float32 (r, S) of the bits (r, S / 8)."""
    return np.unpackbits(bits, axis=1, count=sequences).astype(np.float32)


class SiteSummary(NamedTuple):
    """The heads of a site, and the spread of each measured score and statistic by name."""

    heads: SiteHeads
    spreads: dict[str, Spread]


def summarise_site(
    connection: duckdb.DuckDBPyConnection,
    heads: SiteHeads,
    bounded: int | None = None,
    names: Sequence[str] = SUMMARISED,
) -> SiteSummary:
    """Return the spread of each measured one of ``names``. ``bounded`` is the number of keys of sink and recent
    together; without it no long sequences are averaged.
    """
    rows = SiteRows(connection, heads)
    resamples = resampling(rows.sequences)
    long = None if bounded is None else rows.tokens > bounded
    far = None if bounded is None else (rows.tokens, rows.tokens - bounded)
    spreads: dict[str, Spread] = {}
    bits: dict[str, np.ndarray] = {}
    # Measures of one statistic follow one another, so that it is read once.
    measures = sorted((StoredMeasure(rows, name) for name in names), key=lambda measure: measure.statistics[::-1])
    with ThreadPoolExecutor(_THREADS) as threads:
        for measure in measures:
            if not all(rows.measured(name) for name in measure.statistics):
                continue
            summary = summarised(
                measure.name,
                measure.values(threads),
                resamples,
                long=long,
                far=far if measure.name == "distant_mass" else None,
            )
            if summary is not None:
                spreads[measure.name], bits[measure.name] = summary
    scores = [name for name in SCORES if name in spreads]
    common = {(a, b): int(_count_set(bits[a] & bits[b]).sum()) for i, a in enumerate(scores) for b in scores[i:]}
    for name in scores:
        spreads[name].picks = {other: common.get((name, other), common.get((other, name), 0)) for other in scores}
    return SiteSummary(heads, {name: spreads[name] for name in names if name in spreads})


#: Number of set bits of each pair of bytes.
_SET_BITS = np.array([pair.bit_count() for pair in range(1 << 16)], dtype=np.uint8)


def _count_set(bits: np.ndarray) -> np.ndarray:
    """Return the number of set bits of each row (r,)."""
    pairs = np.pad(bits, ((0, 0), (0, bits.shape[1] % 2))).view(np.uint16)
    return _SET_BITS[pairs].sum(axis=1, dtype=np.int64)


def site_quantiles(
    connection: duckdb.DuckDBPyConnection, heads: SiteHeads, name: str, levels: Sequence[float]
) -> list[float] | None:
    """Return quantiles of a measure over all heads and sequences of a site; None if it was not measured."""
    rows = SiteRows(connection, heads)
    measure = StoredMeasure(rows, name)
    if not all(rows.measured(statistic) for statistic in measure.statistics):
        return None
    with ThreadPoolExecutor(_THREADS) as threads:
        values = measure.values(threads)
        pool = _PoolQuantiles(values, levels)
        counts: list[int] = []

        def collect(_: slice, of_layer: np.ndarray) -> None:
            pool.collect(of_layer)
            counts.append(int(np.count_nonzero(np.isfinite(of_layer))))

        values.for_blocks(collect)
        return [exact for exact, _ in pool.quantiles(sum(counts))] if sum(counts) else None
