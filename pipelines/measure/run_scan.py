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

from headscan.catalog import MassWidths
from headscan.cluster.pool import StagedTask
from headscan.errors import NotFiniteError
from headscan.grid import HeadGrid
from headscan.measure.collect import collect, find_nonfinite, first_nonfinite
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import Batch, pad, whole_batches
from headscan.pipelines import corpora
from headscan.pipelines.measure.run_corpus import CorpusRunResult, ShardTable, run_corpus
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.settings.measure_settings import ScanConfig

#: Cost of a sequence of a scan, in forward passes.
_PASSES = 1.5


def run_scan(config: ScanConfig, run: Run) -> CorpusRunResult:
    """Measure the statistics of all heads on a corpus, and report how many rows have values that are not finite."""
    settings = {"statistics": config.measured, "keep_nonfinite": config.keep_nonfinite}
    widths = asdict(config.widths)

    def shard_item(shard: corpora.Shard) -> ScanItem:
        rope = run.identity.rope_lengths
        return ScanItem(shard, config.measured, config.widths, config.batch_tokens, config.keep_nonfinite, rope)

    result = run_corpus(
        config,
        run,
        "scan",
        measure_shard,
        shard_item,
        forward_passes=_PASSES,
        identity_settings={**settings, "widths": widths},
        stored_settings={**settings, **widths, "panel": None if config.statistics else config.panel},
        part=config.part,
    )
    if count := int(run.store.resolve_run(result.run_id, "scan")["nonfinite_rows"]):
        run.say(f"{count} rows of head_statistics hold values that came out as NaN or infinite: NULL there")
    return result


@dataclass(frozen=True)
class ScanItem:
    """One shard for one replica; with ``keep_nonfinite``, NaN and infinite values are no error."""

    shard: corpora.Shard
    statistics: tuple[str, ...]
    widths: MassWidths
    batch_tokens: int
    keep_nonfinite: bool
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"shard {self.shard.index}"


@dataclass(frozen=True)
class HeadNumbers:
    """The statistics (B, A) and profiles (B, A, bins) of a batch for A heads of one site: ``self``, ``encoder`` or
    ``cross``. ``nonfinite`` (B, A) marks values that are unexpectedly NaN or infinite.
    """

    site: str
    layer: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    values: dict[str, np.ndarray]
    nonfinite: np.ndarray

    @classmethod
    def of(cls, grid: HeadGrid, values: Mapping[str, Tensor], nonfinite: Tensor) -> HeadNumbers:
        """Select a grid's heads from arrays (B, L, H) and (B, L, H, bins)."""
        layer, head = np.array(list(grid.heads()), dtype=np.int16).reshape(-1, 2).T
        kv_head = np.array([kv_head for site in grid.sites for kv_head in site.kv_head_of], dtype=np.int16)
        columns = {name: numbers.numpy()[:, layer, head] for name, numbers in values.items()}
        return cls(grid.kind, layer, head, kv_head, columns, nonfinite.numpy()[:, layer, head])

    @classmethod
    def of_batches(cls, parts: Sequence[HeadNumbers]) -> HeadNumbers:
        """Join several batches of the same heads."""
        values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
        return replace(parts[0], values=values, nonfinite=np.concatenate([part.nonfinite for part in parts]))

    @classmethod
    def of_ranges(cls, parts: Sequence[HeadNumbers]) -> HeadNumbers:
        """Join several ranges of layers of the same batch."""
        return cls(
            parts[0].site,
            np.concatenate([part.layer for part in parts]),
            np.concatenate([part.head for part in parts]),
            np.concatenate([part.kv_head for part in parts]),
            {name: np.concatenate([part.values[name] for part in parts], axis=1) for name in parts[0].values},
            np.concatenate([part.nonfinite for part in parts], axis=1),
        )


class _MeasureShard(StagedTask[ScanItem, Batch, list[HeadNumbers], ShardTable]):
    """Pool task: measure every head on every sequence of a shard."""

    def passes(self, item: ScanItem) -> list[Batch]:
        return whole_batches(list(map(len, item.shard.sequences)), item.batch_tokens, item.rope.group)

    def run(self, lm: LoadedModel, item: ScanItem, batch: Batch) -> list[HeadNumbers]:
        texts = [item.shard.sequences[row] for row in batch.rows]
        ids, lengths = pad([text.ids for text in texts], batch.width)
        of_sites = []
        for kind in lm.grid.kinds:
            lm_at = lm.at(kind)
            # `_refuse` checks the values instead, because its message names the document.
            values = collect(lm_at, ids, lengths, statistics=item.statistics, widths=item.widths, keep_nonfinite=True)
            wrong = find_nonfinite(lm_at.grid, values, lengths, lengths)
            if not item.keep_nonfinite:
                _refuse(kind, wrong, texts)
            of_sites.append(HeadNumbers.of(lm_at.grid, values, torch.stack(list(wrong.values())).any(0)))
        return of_sites

    def size(self, batch: Batch) -> int:
        return batch.tokens

    def halves(self, batch: Batch) -> tuple[Batch, ...]:
        return batch.halves()

    def join_halves(self, halves: Sequence[list[HeadNumbers]]) -> list[HeadNumbers]:
        return [HeadNumbers.of_batches(of_site) for of_site in zip(*halves, strict=True)]

    def join(self, item: ScanItem, partials: Sequence[Sequence[list[HeadNumbers]]]) -> ShardTable:
        batches = [[HeadNumbers.of_ranges(of_site) for of_site in zip(*ranges, strict=True)] for ranges in partials]
        order = np.argsort([row for batch in self.passes(item) for row in batch.rows])
        indices = [text.index for text in item.shard.sequences]
        tables, nonfinite_rows = [], 0
        for of_site in zip(*batches, strict=True):
            numbers = HeadNumbers.of_batches(of_site)
            nonfinite_rows += int(numbers.nonfinite.sum())
            tables.append(head_table(numbers, order, indices))
        return ShardTable(pa.concat_tables(tables), nonfinite_rows)


measure_shard = _MeasureShard("measure_shard")


def _refuse(kind: str, wrong: Mapping[str, Tensor], texts: Sequence[corpora.TokenSequence]) -> None:
    """Raise for the first layer with a wrong value, because later layers follow from it."""
    first = first_nonfinite(wrong)
    if first is None:
        return
    name, layer, row = first
    text = texts[row]
    raise NotFiniteError(
        f"{name} is not finite in layer {layer}, {kind} attention, of sequence {text.index} (document {text.document}, "
        f"{text.source}), because the model's activations are NaN or infinite. Load it in another `dtype`, or set "
        "`keep_nonfinite=True` to store such values as NULL"
    )


def head_table(numbers: HeadNumbers, order: np.ndarray, indices: list[int]) -> pa.Table:
    """Return rows by sequence, layer and head. The heads are all of one kind of site; ``order`` has the position of
    each sequence in ``numbers``, ``indices`` its index in the corpus.
    """
    count, heads = len(indices), len(numbers.layer)
    columns: dict[str, Any] = {
        "sequence": np.repeat(np.asarray(indices, dtype=np.int32), heads),
        # Dictionary-encoded: one string for all rows instead of a Python object per row.
        "site": pa.DictionaryArray.from_arrays(pa.array(np.zeros(count * heads, dtype=np.int8)), [numbers.site]),
        "layer": np.tile(numbers.layer, count),
        "head": np.tile(numbers.head, count),
        "kv_head": np.tile(numbers.kv_head, count),
    }
    for name, array in sorted(numbers.values.items()):
        flat = pa.array(array[order].reshape(-1))
        columns[name] = flat if array.ndim == 2 else pa.FixedSizeListArray.from_arrays(flat, array.shape[-1])
    return pa.table(columns)
