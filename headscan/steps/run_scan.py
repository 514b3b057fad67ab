"""A scan: the statistics of all heads on every sequence of a corpus.

Shapes: B sequences, N tokens, L layers, H query heads of the widest layer, A existing heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headscan import texts as corpora
from headscan.catalog import MassWidths
from headscan.cluster.pool import PassTask
from headscan.errors import NotFiniteError
from headscan.grid import HeadGrid
from headscan.measure.collect import collect, find_nonfinite, first_nonfinite
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import Batch, pad, whole_batches
from headscan.runs.run_context import Run
from headscan.steps.run_corpus import CorpusMeasurement, CorpusRunResult, ShardTable, run_corpus
from headscan.steps.scan import Scan

#: Time of measuring a sequence, as a multiple of a plain forward pass; it only chooses the size of a shard.
_COST_IN_PASSES = 1.5


def run_scan(config: Scan, run: Run) -> CorpusRunResult:
    """Measure the statistics of all heads on a corpus, and report how many rows have values that are not finite."""
    settings = {"statistics": config.measured, "keep_nonfinite": config.keep_nonfinite}
    widths = asdict(config.widths)
    task = MeasureShard(
        config.measured, config.widths, run.batch_tokens, config.keep_nonfinite, run.identity.rope_lengths
    )
    measurement = CorpusMeasurement(
        "scan",
        task,
        cost_in_passes=_COST_IN_PASSES,
        identity_settings={**settings, "widths": widths},
        stored_settings={**settings, **widths, "panel": None if config.statistics else config.panel},
    )
    result = run_corpus(config, run, measurement, part=config.part)
    if nonfinite_rows := int(run.store.resolve_run(result.run_id, "scan")["nonfinite_rows"]):
        run.say(f"rows of head_statistics with NaN or infinite values, which are NULL there: {nonfinite_rows:,}")
    return result


@dataclass(frozen=True)
class HeadMeasurements:
    """The statistics (B, A) and profiles (B, A, bins) of a batch for the A heads of one kind of site: ``self``,
    ``encoder`` or ``cross``.

    Attributes:
        sequence: Index of each sequence in its corpus or file (B,).
        nonfinite: (B, A), True where a value is unexpectedly NaN or infinite.
    """

    site: str
    sequence: np.ndarray
    layer: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    values: dict[str, np.ndarray]
    nonfinite: np.ndarray

    @classmethod
    def of(
        cls, grid: HeadGrid, sequence: Sequence[int], values: Mapping[str, Tensor], nonfinite: Tensor
    ) -> HeadMeasurements:
        """Select a grid's heads from arrays (B, L, H) and (B, L, H, bins)."""
        layer, head = np.array(list(grid.heads()), dtype=np.int16).reshape(-1, 2).T
        kv_head = np.array([kv_head for site in grid.sites for kv_head in site.kv_head_of], dtype=np.int16)
        columns = {name: values_BLH.numpy()[:, layer, head] for name, values_BLH in values.items()}
        indices = np.array(sequence, dtype=np.int32)
        return cls(grid.kind, indices, layer, head, kv_head, columns, nonfinite.numpy()[:, layer, head])

    @classmethod
    def of_batches(cls, batches: Sequence[HeadMeasurements]) -> HeadMeasurements:
        """Join several batches of the same heads."""
        return replace(
            batches[0],
            sequence=np.concatenate([batch.sequence for batch in batches]),
            values={name: np.concatenate([batch.values[name] for batch in batches]) for name in batches[0].values},
            nonfinite=np.concatenate([batch.nonfinite for batch in batches]),
        )

    @classmethod
    def of_ranges(cls, ranges: Sequence[HeadMeasurements]) -> HeadMeasurements:
        """Join several ranges of layers of the same batch."""
        return replace(
            ranges[0],
            layer=np.concatenate([layer_range.layer for layer_range in ranges]),
            head=np.concatenate([layer_range.head for layer_range in ranges]),
            kv_head=np.concatenate([layer_range.kv_head for layer_range in ranges]),
            values={
                name: np.concatenate([layer_range.values[name] for layer_range in ranges], axis=1)
                for name in ranges[0].values
            },
            nonfinite=np.concatenate([layer_range.nonfinite for layer_range in ranges], axis=1),
        )


@dataclass(frozen=True)
class MeasureShard(PassTask[corpora.Shard, Batch, list[HeadMeasurements], ShardTable]):
    """Pool task: measure every head on every sequence of a shard. A pool calls it like a function
    (`PassTask.__call__`), or runs its passes by layer ranges. A partial result has an element for each kind of site.
    With ``keep_nonfinite``, NaN and infinite values are no error.
    """

    statistics: tuple[str, ...]
    widths: MassWidths
    batch_tokens: int
    keep_nonfinite: bool
    rope: RopeLengths = UNVARYING

    def passes(self, shard: corpora.Shard) -> list[Batch]:
        return whole_batches([len(sequence) for sequence in shard.sequences], self.batch_tokens, self.rope.group)

    def run(self, lm: LoadedModel, shard: corpora.Shard, batch: Batch) -> list[HeadMeasurements]:
        sequences = [shard.sequences[index] for index in batch.sequence_indices]
        corpus_indices = [sequence.index for sequence in sequences]
        ids, lengths = pad([sequence.ids for sequence in sequences], batch.width)
        measurements = []
        for kind in lm.grid.kinds:
            lm_at = lm.at(kind)
            # Values that are not finite are marked or refused below, where the error can name the document.
            values = collect(lm_at, ids, lengths, statistics=self.statistics, widths=self.widths, keep_nonfinite=True)
            nonfinite = find_nonfinite(lm_at.grid, values, lengths, lengths)
            if not self.keep_nonfinite:
                _refuse_nonfinite(kind, nonfinite, sequences)
            any_nonfinite_BLH = torch.stack(list(nonfinite.values())).any(0)
            measurements.append(HeadMeasurements.of(lm_at.grid, corpus_indices, values, any_nonfinite_BLH))
        return measurements

    def size(self, batch: Batch) -> int:
        return batch.tokens

    def halves(self, batch: Batch) -> tuple[Batch, ...]:
        return batch.halves()

    def join_halves(self, halves: Sequence[list[HeadMeasurements]]) -> list[HeadMeasurements]:
        return [HeadMeasurements.of_batches(site_halves) for site_halves in zip(*halves, strict=True)]

    def join(self, shard: corpora.Shard, partials: Sequence[Sequence[list[HeadMeasurements]]]) -> ShardTable:
        batches = [
            [HeadMeasurements.of_ranges(site_ranges) for site_ranges in zip(*ranges, strict=True)]
            for ranges in partials
        ]
        tables, nonfinite_rows = [], 0
        for site_batches in zip(*batches, strict=True):
            measurements = HeadMeasurements.of_batches(site_batches)
            nonfinite_rows += int(measurements.nonfinite.sum())
            tables.append(head_table(measurements))
        return ShardTable(pa.concat_tables(tables), nonfinite_rows)


def _refuse_nonfinite(kind: str, nonfinite: Mapping[str, Tensor], sequences: Sequence[corpora.TokenSequence]) -> None:
    """Raise for the first layer with a value that is not finite, because later layers follow from it."""
    first = first_nonfinite(nonfinite)
    if first is None:
        return
    name, layer, row = first
    sequence = sequences[row]
    raise NotFiniteError(
        f"{name} is not finite in layer {layer}, {kind} attention, of sequence {sequence.index} (document "
        f"{sequence.document}, {sequence.source}), because the model's activations are NaN or infinite. Load it in "
        "another `dtype`, or set `keep_nonfinite=True` to store such values as NULL"
    )


def head_table(measurements: HeadMeasurements) -> pa.Table:
    """Return rows by sequence, layer and head, in this order."""
    order = np.argsort(measurements.sequence)
    sequences, heads = len(order), len(measurements.layer)
    columns: dict[str, Any] = {
        "sequence": np.repeat(measurements.sequence[order], heads),
        # Dictionary-encoded: one string for all rows instead of a Python object per row.
        "site": pa.DictionaryArray.from_arrays(pa.array(np.zeros(sequences * heads, np.int8)), [measurements.site]),
        "layer": np.tile(measurements.layer, sequences),
        "head": np.tile(measurements.head, sequences),
        "kv_head": np.tile(measurements.kv_head, sequences),
    }
    for name, values in sorted(measurements.values.items()):
        flat = pa.array(values[order].reshape(-1))
        columns[name] = flat if values.ndim == 2 else pa.FixedSizeListArray.from_arrays(flat, values.shape[-1])
    return pa.table(columns)
