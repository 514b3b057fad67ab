"""Spread of each head's statistics and scores over the sequences of a scan, computed column by column.

A view would hold every value of a run in memory and sort it; here one statistic is held at a time, of as many layers
as `_MOST_VALUES` allows. Every number equals what SQL computes from all rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from headscan.analysis.store.verdict_limits import (
    HEAD_BINS,
    INACTIVE_QUANTILE,
    MOSTLY,
    POOL_BINS,
    SPAN,
    THRESHOLDS,
)
from headscan.analysis.store.views import SUMMARISED, pool_quantile
from headscan.catalog import SCORES

#: Most values (float32) of statistics in memory at one time.
_MOST_VALUES = 1 << 27
#: Most values of a task of one thread, which fit in its cache.
_TASK_VALUES = 1 << 15
#: Most threads, each of which holds the values of a layer.
_THREADS = min(8, os.cpu_count() or 1)
#: Rows of a batch that DuckDB returns.
_BATCH = 1 << 20
#: Most values of a pool's sample. A smaller pool is its own sample.
_SAMPLE = 1 << 18
#: Sequences up to which it is faster to sort all values of a head than to look into the bins of its quantiles.
_SORTED = 4096

#: Quantiles over the sequences of a head.
QUANTILES = (0.1, 0.5, 0.9)
_RESAMPLES = 200
_LARGEST_COUNT = 255


def column_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of a column, NULL as NaN. ``to_numpy`` of pyarrow would import pandas, which takes 0.3 s."""
    whole = column.combine_chunks()
    return np.array(whole.to_pylist(), dtype=np.float64) if whole.null_count else np.from_dlpack(whole)


@dataclass(frozen=True)
class SiteHeads:
    """The query heads of one site of a run, (H,) in order of layer and head, and the number of stored sequences.

    Attributes:
        counts: Number of sequences of each head.
    """

    run_id: str
    site: str
    layer: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    sequences: int
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def index(self) -> np.ndarray:
        """Row of each (layer, head), -1 where there is none; (layers, heads)."""
        rows = np.full((int(self.layer.max()) + 1, int(self.head.max()) + 1), -1)
        rows[self.layer, self.head] = np.arange(len(self))
        return rows

    def row(self, layer: int, head: int) -> int | None:
        """Return the row of a head; None if the site has no such head."""
        index = self.index
        if not (0 <= layer < index.shape[0] and 0 <= head < index.shape[1]) or index[layer, head] < 0:
            return None
        return int(index[layer, head])


class SiteRows:
    """The rows of one site in ``head_statistics``, read a statistic at a time."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, heads: SiteHeads) -> None:
        self.heads = heads
        self._connection = connection
        rows = connection.sql(
            "SELECT h.sequence, max(s.tokens) AS tokens FROM (SELECT DISTINCT sequence FROM head_statistics"
            " WHERE run_id = $1 AND site = $2) h LEFT JOIN (FROM sequences WHERE run_id = $1) s USING (sequence)"
            " GROUP BY h.sequence ORDER BY h.sequence",
            params=[heads.run_id, heads.site],
        ).to_arrow_table()
        numbers = rows["sequence"].to_numpy()
        #: Number of tokens of each sequence (S,), 0 if unknown.
        self.tokens = np.nan_to_num(rows["tokens"].to_numpy(zero_copy_only=False).astype(np.float64))
        self._column = np.zeros(int(numbers.max()) + 1, dtype=np.int64)
        self._column[numbers] = np.arange(len(numbers))
        self._held: dict[tuple[str, int, int], np.ndarray] = {}

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def measured(self, name: str) -> bool:
        """Return True if any row has a value of a statistic or profile."""
        result = self._connection.execute(
            f"SELECT 1 FROM head_statistics WHERE run_id = ? AND site = ? AND {name} IS NOT NULL LIMIT 1",
            [self.heads.run_id, self.heads.site],
        )
        return bool(result.fetchall())

    def layers(self) -> list[slice]:
        """Return the rows of each layer in ``heads``."""
        starts = [0, *(np.flatnonzero(np.diff(self.heads.layer)) + 1).tolist(), len(self.heads)]
        return [slice(a, b) for a, b in pairwise(starts)]

    def parts(self, statistics: int) -> list[list[slice]]:
        """Return groups of layers; the values of ``statistics`` statistics in one group fit in memory."""
        groups: list[list[slice]] = []
        for layer in self.layers():
            held = layer.stop - groups[-1][0].start if groups else 0
            if groups and held * self.sequences * statistics <= _MOST_VALUES:
                groups[-1].append(layer)
            else:
                groups.append([layer])
        return groups

    def read(self, name: str, part: Sequence[slice], keep: Sequence[str] = ()) -> np.ndarray:
        """Return a statistic of layers as float32 (heads of the part, S); NaN where it was not measured. The values of
        the part stay in memory until another part or a statistic outside ``keep`` is read.
        """
        rows = slice(part[0].start, part[-1].stop)
        key = (name, rows.start, rows.stop)
        if key not in self._held:
            self._held = {kept: held for kept, held in self._held.items() if kept[0] in keep and kept[1:] == key[1:]}
            self._held[key] = self._read(name, rows)
        return self._held[key]

    def _read(self, name: str, rows: slice) -> np.ndarray:
        heads = self.heads
        first, last = int(heads.layer[rows][0]), int(heads.layer[rows][-1])
        width = heads.index.shape[1]
        place = heads.index.ravel() - rows.start
        count = rows.stop - rows.start
        values = np.full((count, self.sequences), np.nan, dtype=np.float32)
        limits = "" if count == len(heads) else f" AND layer BETWEEN {first} AND {last}"
        result = self._connection.sql(
            f"SELECT sequence, layer::INTEGER * {width} + head AS place, {name} AS value FROM head_statistics"
            f" WHERE run_id = ? AND site = ? AND {name} IS NOT NULL{limits}",
            params=[heads.run_id, heads.site],
        )
        for batch in result.to_arrow_reader(_BATCH):
            sequence, cell, value = (batch.column(i).to_numpy() for i in range(3))
            if not len(sequence):
                continue
            column = self._column[sequence]
            low, high = int(column.min()), int(column.max()) + 1
            if (high - low) * count > 4 * _BATCH:  # shards in another order, or few heads
                values[place[cell], column] = value
                continue
            # Written a sequence after the other and turned round in the cache; fmax skips what is not in this batch.
            held = np.full((high - low) * count, np.nan, dtype=np.float32)
            column -= low
            column *= count
            column += place[cell]
            held[column] = value
            part = values[:, low:high]
            np.fmax(part, held.reshape(high - low, count).T, out=part)
        return values


class StoredMeasure:
    """One score or statistic of a site."""

    def __init__(self, rows: SiteRows, name: str) -> None:
        self.name = name
        self._score = SCORES.get(name)
        self._rows = rows
        score = self._score
        own = name if score is None else score.statistic
        below = None if score is None else score.normaliser
        #: The statistics that it is computed from, numerator first.
        self.statistics = (own,) if below in (None, own) else (own, below)
        #: A ratio is DOUBLE in the store, a plain number REAL.
        self.ratio = below is not None

    def values(self, threads: ThreadPoolExecutor) -> MeasureValues:
        """Return the values, which ``threads`` read."""

        def for_layers(work: Callable[[slice, np.ndarray], None]) -> None:
            for part, columns in self._parts():

                def of_layer(layer: slice, first: int = part[0].start, columns: list[np.ndarray] = columns) -> None:
                    cut = slice(layer.start - first, layer.stop - first)
                    work(layer, self._of_columns([column[cut] for column in columns]))

                list(threads.map(of_layer, part))

        def sample(step: int) -> np.ndarray:
            sampled = []
            for part, columns in self._parts():
                for i, layer in enumerate(part):
                    cut = slice(layer.start - part[0].start, layer.stop - part[0].start)
                    sampled.append(self._of_columns([column[cut, i % step :: step] for column in columns]).ravel())
            return np.concatenate(sampled)

        return MeasureValues(len(self._rows.heads), self._rows.sequences, for_layers, sample)

    def _parts(self) -> Iterator[tuple[list[slice], list[np.ndarray]]]:
        for part in self._rows.parts(len(self.statistics)):
            yield part, [self._rows.read(name, part, self.statistics) for name in self.statistics]

    def _of_columns(self, columns: list[np.ndarray]) -> np.ndarray:
        """Return the values of a layer from its statistics (h, S)."""
        if not self.ratio:
            return columns[0]
        assert self._score is not None
        exact = columns[0].astype(np.float64)
        below = exact if len(columns) == 1 else columns[1].astype(np.float64)
        denominator = below if self._score.over == "head" else layer_mean(below)
        zero = denominator == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            exact /= denominator
        if zero.any():
            exact[np.broadcast_to(zero, exact.shape)] = np.nan
        return exact


def layer_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the measured heads (S,) of values (h, S); NaN where no head was measured."""
    total = values.sum(axis=0)  # head after head, as SQL adds
    if np.isfinite(total).all():
        return total / len(values)
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0).sum(axis=0) / finite.sum(axis=0)


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
        text = f"{self.heads:,} of {heads:,} heads ({self.heads / heads:.1%})"
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


#: Calls a function with the rows and the values, float32 or float64 (h, S), of every layer, in several threads.
ForLayers = Callable[[Callable[[slice, np.ndarray], None]], None]


class MeasureValues(NamedTuple):
    """The values (H, S) of a measure, layer by layer; ``sample`` returns one in so many, in any order."""

    heads: int
    sequences: int
    for_layers: ForLayers
    sample: Callable[[int], np.ndarray]


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
        sample = values.sample(step)
        self._sample = np.sort(sample[np.isfinite(sample)])
        #: True if the sample holds every value.
        self.whole = step == 1
        # A layer's heads are alike in a sequence, so the sample is less certain than its size suggests.
        self._apart = 8 * math.isqrt(len(self._sample)) + 8
        self._bracket()

    def _bracket(self) -> None:
        last = len(self._sample) - 1
        self._brackets: list[tuple[Any, Any]] = []
        for level in self._levels:
            low, high = int(level * last) - self._apart, int(level * last) + self._apart
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
        pairs = [self._pair(i, level * (count - 1), count) for i, level in enumerate(self._levels)]
        while None in pairs:  # a bracket missed its values
            self._apart *= 8
            self._bracket()
            self._values.for_layers(lambda _, values: self.collect(values))
            pairs = [self._pair(i, level * (count - 1), count) for i, level in enumerate(self._levels)]
        return [pair for pair in pairs if pair is not None]

    def _pair(self, index: int, place: float, count: int) -> tuple[float, float] | None:
        rank, after = int(place), min(int(place) + 1, count - 1)
        near, skipped = self._sample, 0
        if not self.whole:
            near, skipped = np.sort(np.concatenate(self._inside[index])), sum(self._below[index])
        if rank < skipped or after >= skipped + len(near):
            return None
        a, b = near[rank - skipped], near[after - skipped]
        low, high, part = np.asarray(a), np.asarray(b), place - rank
        exact = between(low.astype(np.float64), high.astype(np.float64), part)
        return float(exact), float(between(low, high, part))


def resampling(sequences: int, seed: int = 0) -> np.ndarray:
    """Return how often each sequence is in each resample, float32 (S, resamples)."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(sequences, np.full(sequences, 1 / sequences), _RESAMPLES).T.astype(np.float32)


def summarised(
    name: str,
    values: MeasureValues,
    weights: np.ndarray,
    *,
    long: np.ndarray | None = None,
    far: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[Spread, np.ndarray] | None:
    """Return the summary of a measure and the bits of the (head, sequence) beyond its threshold; None without values.

    Args:
        weights: See `resampling`.
        long: Which sequences ``long_mean`` averages; None averages none.
        far: Tokens of the sequences, and those that have distant keys, for ``far_mean``; None leaves it out.
    """
    score = SCORES.get(name)
    spread = Spread.empty(values.heads, scored=score is not None, far=far is not None)
    pools = np.zeros((values.heads, POOL_BINS), dtype=np.int64)
    bits = np.zeros((values.heads, (values.sequences + 7) // 8 if score is not None else 0), dtype=np.uint8)
    levels = [*SPAN] if score is None else [*SPAN, *(pool_quantile(score, share) for share in THRESHOLDS)]
    pool = _PoolQuantiles(values, levels)

    def first(rows: slice, of_layer: np.ndarray) -> None:
        for own, block in _blocks(rows, of_layer):
            pool.collect(block)
            _moments(spread, own, block, long, far)

    values.for_layers(first)
    count = int(spread.measured.sum())
    if not count:
        return None
    ordered = pool.quantiles(count)
    (low, _), (high, _) = ordered[:2]
    spread.low, spread.high = (low - 0.5, high + 0.5) if low == high else (low, high)
    if score is not None:
        spread.thresholds = dict(zip(THRESHOLDS, (exact for exact, _ in ordered[2:]), strict=True))
    limit = None if score is None else ordered[2 + THRESHOLDS.index(INACTIVE_QUANTILE)][1]
    resampled: list[np.ndarray] = []

    def second(rows: slice, of_layer: np.ndarray) -> None:
        for own, block in _blocks(rows, of_layer):
            _count_bins(spread, pools, own, block)
        if score is not None:
            assert limit is not None
            beyond = of_layer < limit if score.inactive == "low" else of_layer > limit
            bits[rows] = np.packbits(beyond, axis=1)
            resampled.append(_inactive_heads_of(spread, rows, of_layer, beyond, weights))

    values.for_layers(second)
    spread.pool = pools.sum(axis=0)
    if spread.inactive is not None:
        mostly = int((spread.inactive >= MOSTLY).sum())
        low_count, high_count = np.quantile(np.sum(resampled, axis=0), [0.025, 0.975], method="nearest")
        several = values.sequences > 1
        spread.persistence = Persistence(
            mostly, int(min(low_count, mostly)) if several else None, int(max(high_count, mostly)) if several else None
        )
    return spread, bits


def _blocks(rows: slice, values: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield parts of the rows of a layer, with their values, that fit in the cache of a thread."""
    step = max(1, _TASK_VALUES // values.shape[1])
    for start in range(0, len(values), step):
        block = values[start : start + step]
        yield slice(rows.start + start, rows.start + start + len(block)), block


def _moments(
    spread: Spread,
    rows: slice,
    values: np.ndarray,
    long: np.ndarray | None,
    far: tuple[np.ndarray, np.ndarray] | None,
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
            of_long = mean
            if not long.all():
                of_long = exact[:, long].sum(axis=1) / np.count_nonzero(finite[:, long], axis=1)
            spread.long_mean[rows] = of_long
        if spread.far_mean is not None and far is not None and long is not None:
            tokens, queries = far
            spread.far_mean[rows] = exact[:, long] @ tokens[long] / (finite[:, long] @ queries[long])
        apart = exact - mean[:, None]
        if not complete:
            apart[~finite] = 0
        squares = np.einsum("rs,rs->r", apart, apart)
        spread.std[rows] = np.where(counts > 1, np.sqrt(squares / (counts - 1)), np.nan)
    spread.measured[rows], spread.mean[rows] = counts, mean


def _count_bins(spread: Spread, pools: np.ndarray, rows: slice, values: np.ndarray) -> None:
    """Count the bins of each row, the finer ones in ``pools`` (H, POOL_BINS); find its quantiles among the values of
    the bins that hold them.
    """
    places = values.astype(np.float64)
    places -= spread.low
    places *= POOL_BINS / (spread.high - spread.low)
    counts = spread.measured[rows]
    complete = bool((counts == values.shape[1]).all())
    if not complete:
        missing = np.isnan(places)
        places[missing] = 0
    np.clip(places, 0, POOL_BINS - 1, out=places)
    bins = places.astype(np.uint8)
    if not complete:
        bins[missing] = POOL_BINS
    for row, of_row in enumerate(bins):
        pools[rows.start + row] = np.bincount(of_row, minlength=POOL_BINS + 1)[:POOL_BINS]
    spread.counts[rows] = pools[rows].reshape(len(values), HEAD_BINS, -1).sum(axis=2)
    if values.shape[1] <= _SORTED or not complete:
        spread.quantiles[:, rows] = row_quantiles(values, counts)
        return
    for row in range(len(values)):
        ends = np.cumsum(pools[rows.start + row])
        for i, quantile in enumerate(QUANTILES):
            place = quantile * (values.shape[1] - 1)
            rank = int(place)
            first, last = (int(np.searchsorted(ends, number, "right")) for number in (rank, rank + 1))
            near = values[row][bins[row] == first]
            if last != first:
                near = np.concatenate([near, values[row][bins[row] == last]])
            near.sort()
            skipped = int(ends[first - 1]) if first else 0
            low, high = near[rank - skipped], near[rank + 1 - skipped]
            spread.quantiles[i, rows.start + row] = between(low, high, place - rank)


def row_quantiles(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the `QUANTILES` of each row (3, r) of values (r, S) with ``counts`` numbers each; NaN without any."""
    ordered = np.sort(values, axis=1)  # NaN last
    last = np.maximum(counts - 1, 0)
    rows = np.arange(len(values))
    quantiles = []
    for quantile in QUANTILES:
        place = quantile * last
        below = np.floor(place).astype(int)
        first, second = ordered[rows, below], ordered[rows, np.minimum(below + 1, last)]
        quantiles.append(np.where(counts > 0, between(first, second, place - below), np.nan))
    return np.array(quantiles)


def _inactive_heads_of(
    spread: Spread, rows: slice, values: np.ndarray, beyond: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Fill in the share of values ``beyond`` the threshold; return the number of mostly inactive heads by resample."""
    assert spread.inactive is not None
    counts = spread.measured[rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        spread.inactive[rows] = np.count_nonzero(beyond, axis=1) / counts
    hits = beyond.astype(np.float32) @ weights
    if (counts == values.shape[1]).all():
        asked = np.full_like(hits, values.shape[1])
    else:
        asked = np.isfinite(values).astype(np.float32) @ weights
    return ((hits >= MOSTLY * asked) & (asked > 0)).sum(axis=0)


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
    weights = resampling(rows.sequences)
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
                weights,
                long=long,
                far=far if measure.name == "distant_mass" else None,
            )
            if summary is not None:
                spreads[measure.name], bits[measure.name] = summary
    scores = [name for name in SCORES if name in spreads]
    common = {(a, b): _in_common(bits[a], bits[b]) for i, a in enumerate(scores) for b in scores[i:]}
    for name in scores:
        spreads[name].picks = {other: common.get((name, other), common.get((other, name), 0)) for other in scores}
    return SiteSummary(heads, {name: spreads[name] for name in names if name in spreads})


#: Number of set bits of each pair of bytes.
_SET_BITS = np.array([pair.bit_count() for pair in range(1 << 16)], dtype=np.uint8)


def _in_common(a: np.ndarray, b: np.ndarray) -> int:
    both = (a & b).ravel()
    even = np.append(both, np.uint8(0)) if len(both) % 2 else both
    return int(_SET_BITS[even.view(np.uint16)].sum(dtype=np.int64))


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

        values.for_layers(collect)
        return [exact for exact, _ in pool.quantiles(sum(counts))] if sum(counts) else None
