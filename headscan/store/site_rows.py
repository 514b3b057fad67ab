"""Values of the statistics and scores of one site, read from the rows of a run a statistic at a time.

A view would hold every value of a run in memory; here one statistic is held at a time, of as many layers as
`_MOST_VALUES` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from headscan.catalog import SCORES

#: Most values (float32) of statistics in memory at one time.
_MOST_VALUES = 1 << 27
#: Most values of a block, which fit in the cache of a thread.
_TASK_VALUES = 1 << 16
#: Heads whose values are transposed at one time, so that they stay in the cache.
_TILE = 64
#: Rows of a batch that DuckDB returns.
_BATCH = 1 << 20


def column_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of a column, NULL as NaN. ``to_numpy`` of pyarrow would import pandas, which takes 0.3 s."""
    whole = column.combine_chunks()
    return np.array(whole.to_pylist(), dtype=np.float64) if whole.null_count else np.from_dlpack(whole)


@dataclass(frozen=True)
class SiteHeads:
    """The query heads of one site of a run, (H,) in order of layer and head, and the numbers of stored sequences of the
    site and, ``counts``, of each head.
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
        place = "NULL"  # the rows of a view, as in a Parquet data set, have no order
        if connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'head_statistics'").fetchall():
            place = f"rowid - {heads.index.ravel().tolist()}[layer::INTEGER * {heads.index.shape[1]} + head + 1]"
        rows = connection.sql(
            "SELECT h.sequence, any_value(first) AS first, bool_and(ordered) AS ordered, max(s.tokens) AS tokens FROM"
            f" (SELECT sequence, min({place}) AS first, first = max({place}) AND count(*) = $3 AS ordered"
            " FROM head_statistics WHERE run_id = $1 AND site = $2 GROUP BY sequence) h"
            " LEFT JOIN (FROM sequences WHERE run_id = $1) s USING (sequence) GROUP BY h.sequence ORDER BY h.sequence",
            params=[heads.run_id, heads.site, len(heads)],
        ).to_arrow_table()
        numbers = rows["sequence"].to_numpy()
        #: Columns of the sequences in the order of their rows (S,) if the rows of each are those of all heads in order,
        #: as scans write them; otherwise None.
        self._stored = np.argsort(rows["first"].to_numpy()) if all(rows["ordered"].to_pylist()) else None
        #: Number of tokens of each sequence (S,), 0 if unknown.
        self.tokens = np.nan_to_num(rows["tokens"].to_numpy(zero_copy_only=False).astype(np.float64))
        self._column = np.zeros(int(numbers.max()) + 1, dtype=np.int64)
        self._column[numbers] = np.arange(len(numbers))
        self._held: dict[tuple[str, int, int], np.ndarray] = {}
        self._layer_means: dict[str, np.ndarray] = {}

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
            self._held[key] = self._values_of(name, rows)
        return self._held[key]

    def layer_means(self, name: str) -> np.ndarray:
        """Return the mean of a statistic over the heads of each of the `layers`, float64 (layers, S)."""
        if name not in self._layer_means:
            means = []
            for part in self.parts(1):
                values = self.read(name, part)
                of_layers = (values[layer.start - part[0].start : layer.stop - part[0].start] for layer in part)
                means += [layer_mean(of_layer.astype(np.float64)) for of_layer in of_layers]
            self._layer_means = {name: np.array(means)}
        return self._layer_means[name]

    def _values_of(self, name: str, rows: slice) -> np.ndarray:
        heads = self.heads
        count, width = rows.stop - rows.start, heads.index.shape[1]
        values = np.full((count, self.sequences), np.nan, dtype=np.float32)
        columns = [name] if self._stored is not None else [name, "sequence", f"layer::INTEGER * {width} + head"]
        limits = f"layer BETWEEN {heads.layer[rows][0]} AND {heads.layer[rows][-1]}" if count < len(heads) else "true"
        batches = self._connection.sql(
            f"SELECT {', '.join(columns)} FROM head_statistics WHERE run_id = ? AND site = ? AND {limits}",
            params=[heads.run_id, heads.site],
        ).to_arrow_reader(_BATCH)
        arrays = ([column.to_numpy(zero_copy_only=False) for column in batch.columns] for batch in batches)
        if self._stored is None:
            place = heads.index.ravel() - rows.start
            for value, sequence, cell in arrays:
                values[place[cell], self._column[sequence]] = value
            return values
        done, rest = 0, np.zeros(0, dtype=np.float32)
        for (value,) in arrays:
            rest = np.concatenate([rest, value])
            whole = len(rest) // count
            block, rest = rest[: whole * count].reshape(whole, count), rest[whole * count :]
            stored = self._stored[done : done + whole]
            done += whole
            ends = np.flatnonzero(np.diff(stored, append=-1) != 1) + 1  # of runs of neighbouring columns
            for start, stop in pairwise([0, *ends.tolist()]):
                to = slice(stored[start], stored[stop - 1] + 1)
                for head in range(0, count, _TILE):
                    values[head : head + _TILE, to] = block[start:stop, head : head + _TILE].T
        return values


#: Calls a function with the rows and the values, float32 or float64 (r, S), of every few heads, in several threads.
ForBlocks = Callable[[Callable[[slice, np.ndarray], None]], None]


class MeasureValues(NamedTuple):
    """The values (H, S) of a measure, block by block; ``sample`` returns one in so many, in any order."""

    heads: int
    sequences: int
    for_blocks: ForBlocks
    sample: Callable[[int], np.ndarray]


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
        #: The statistics whose values are in memory together.
        self._together = self.statistics[:1] if score is not None and score.over == "layer" else self.statistics

    def values(self, threads: ThreadPoolExecutor) -> MeasureValues:
        """Return the values, which ``threads`` compute."""
        sequences = self._rows.sequences
        step = max(1, _TASK_VALUES // sequences)

        def for_blocks(work: Callable[[slice, np.ndarray], None]) -> None:
            for layers in self._layers():

                def of_layer(layer: _LayerColumns) -> None:
                    for start in range(0, layer.rows.stop - layer.rows.start, step):
                        columns = [column[start : start + step] for column in layer.columns]
                        first = layer.rows.start + start
                        work(slice(first, first + len(columns[0])), self._of_columns(columns, layer.mean))

                list(threads.map(of_layer, layers))

        def sample(step: int) -> np.ndarray:
            sampled = []
            for layers in self._layers():
                for i, layer in enumerate(layers):
                    at = np.arange(i % step, layer.columns[0].size, step)
                    mean = None if layer.mean is None else layer.mean[at % sequences]
                    sampled.append(self._of_columns([column.ravel()[at] for column in layer.columns], mean))
            return np.concatenate(sampled)

        return MeasureValues(len(self._rows.heads), sequences, for_blocks, sample)

    def _layers(self) -> Iterator[list[_LayerColumns]]:
        """Yield the layers that are in memory together."""
        means = None
        if self._score is not None and self._score.over == "layer":
            means = iter(self._rows.layer_means(self.statistics[-1]))
        for part in self._rows.parts(len(self._together)):
            columns = [self._rows.read(name, part, self._together) for name in self._together]
            layers = []
            for layer in part:
                cut = slice(layer.start - part[0].start, layer.stop - part[0].start)
                mean = None if means is None else next(means)
                layers.append(_LayerColumns(layer, [column[cut] for column in columns], mean))
            yield layers

    def _of_columns(self, columns: list[np.ndarray], mean: np.ndarray | None) -> np.ndarray:
        """Return the values of sequences (..., S) from statistics (..., S) and the mean over the layer (S,)."""
        if not self.ratio:
            return columns[0]
        exact = columns[0].astype(np.float64)
        denominator = columns[-1].astype(np.float64) if mean is None else mean
        with np.errstate(divide="ignore", invalid="ignore"):
            exact /= denominator
        zero = denominator == 0
        if zero.any():
            exact[np.broadcast_to(zero, exact.shape)] = np.nan
        return exact


class _LayerColumns(NamedTuple):
    """The rows of a layer, its statistics (h, S), and its mean (S,) of the normaliser of a score over the layer."""

    rows: slice
    columns: list[np.ndarray]
    mean: np.ndarray | None


def layer_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the measured heads (S,) of values (h, S); NaN where no head was measured."""
    total = values.sum(axis=0)  # head after head, as SQL adds
    if np.isfinite(total).all():
        return total / len(values)
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0).sum(axis=0) / finite.sum(axis=0)
