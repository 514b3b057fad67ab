"""What a replica does with a shard: every number of every head, as rows for the store.

Shapes: B sequences, N tokens, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

import headscan
from headscan.errors import NotFiniteError
from headscan.grid import HeadGrid
from headscan.loading import LoadedModel
from headscan.requests import MassWidths
from headscan.summaries import undefined
from pipelines import corpora
from pipelines.batching import batches, pad, run_halving


@dataclass(frozen=True)
class ShardItem:
    """One shard on its way to a replica.

    Attributes:
        statistics: Names of statistics and profiles.
        keep_nonfinite: What comes out as NaN or infinite is no error.
    """

    shard: corpora.Shard
    statistics: tuple[str, ...]
    widths: MassWidths
    batch_tokens: int
    keep_nonfinite: bool

    @property
    def name(self) -> str:
        return f"shard {self.shard.index}"


class Measured(NamedTuple):
    """A shard's rows by site, sequence, layer and head, and in how many of them something was NaN or infinite."""

    heads: pa.Table
    nonfinite_rows: int


def measure_shard(lm: LoadedModel, item: ShardItem) -> Measured:
    """A pool task: measure every head of every site on every sequence of a shard.

    Raises:
        NotFiniteError: A number is NaN or infinite, and ``keep_nonfinite`` is off.
    """
    texts = item.shard.sequences
    sites = [lm.at(kind) for kind in lm.grid.kinds]

    def measure(rows: list[int]) -> list[dict[str, Tensor]]:
        ids, lengths = pad([texts[row].ids for row in rows])
        found = []
        for site in sites:
            # The check is ours: it knows which document a sequence is of.
            values = headscan.collect(
                site, ids, lengths, statistics=item.statistics, widths=item.widths, keep_nonfinite=True
            )
            wrong = _nonfinite(site.grid, values, lengths)
            if not item.keep_nonfinite:
                _refuse(site.grid.kind, wrong, [texts[row] for row in rows])
            values["nonfinite"] = torch.stack(list(wrong.values())).any(0)
            found.append(values)
        return found

    parts = [
        part for batch in batches(list(map(len, texts)), item.batch_tokens) for part in run_halving(batch, measure)
    ]
    order = np.argsort([row for rows, _ in parts for row in rows])
    indices = [text.index for text in texts]
    tables, nonfinite_rows = [], 0
    for number, site in enumerate(sites):
        of_site = [found[number] for _, found in parts]
        values = {name: torch.cat([part[name] for part in of_site]).numpy()[order] for name in of_site[0]}
        nonfinite_rows += int(values.pop("nonfinite").sum())
        tables.append(_head_table(site.grid, indices, values))
    return Measured(pa.concat_tables(tables), nonfinite_rows)


def _nonfinite(grid: HeadGrid, values: Mapping[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
    """Where a head has a number that ought to be one and is NaN or infinite: bool (B, L, H) for each name."""
    exists = torch.zeros(grid.shape, dtype=torch.bool)
    for head in grid.heads():
        exists[head] = True
    by_definition = undefined(frozenset(values), lengths, lengths, cross=grid.kind == "cross")
    wrong = {}
    for name, numbers in values.items():
        finite = numbers.isfinite() if numbers.ndim == 3 else numbers.isfinite().all(-1)
        wrong[name] = ~finite & exists
        if name in by_definition:
            wrong[name] &= ~by_definition[name][:, None, None]
    return wrong


def _refuse(kind: str, wrong: Mapping[str, Tensor], texts: Sequence[corpora.Sequence]) -> None:
    """Raise if anything is wrong, naming the first layer where it is: the later ones only follow from it."""
    anywhere = torch.stack([where.any(2) for where in wrong.values()]).any(0)
    if not anywhere.any():
        return
    layer = int(anywhere.any(0).nonzero()[0])
    row = int(anywhere[:, layer].nonzero()[0])
    name = next(name for name, where in wrong.items() if where[row, layer].any())
    text = texts[row]
    raise NotFiniteError(
        f"{name} is not finite in layer {layer}, {kind} attention, of sequence {text.index} (document {text.document}, "
        f"{text.source}): the model's activations are NaN or infinite there; load it in another dtype (--dtype), or "
        "store such values as NULL (--keep-nonfinite)"
    )


def _head_table(grid: HeadGrid, indices: list[int], values: Mapping[str, np.ndarray]) -> pa.Table:
    """Rows by sequence, layer and head from arrays (B, L, H) or (B, L, H, bins), of the heads that there are."""
    site_of = [(site, head) for site in grid.sites for head in range(site.num_attention_heads)]
    layer = np.array([site.layer for site, _ in site_of], dtype=np.int16)
    head = np.array([head for _, head in site_of], dtype=np.int16)
    kv_head = np.array([head // site.group_size for site, head in site_of], dtype=np.int16)
    count = len(indices)
    columns: dict[str, Any] = {
        "sequence": np.repeat(np.asarray(indices, dtype=np.int32), len(site_of)),
        "site": [grid.kind] * (count * len(site_of)),
        "layer": np.tile(layer, count),
        "head": np.tile(head, count),
        "kv_head": np.tile(kv_head, count),
    }
    for name, array in sorted(values.items()):
        numbers = pa.array(array[:, layer, head].reshape(-1))
        columns[name] = numbers if array.ndim == 3 else pa.FixedSizeListArray.from_arrays(numbers, array.shape[-1])
    return pa.table(columns)
