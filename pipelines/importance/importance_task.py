"""The pool task of an importance run: derivatives of the loss by a gate on every head, of a shard's sequences.

Shapes: B sequences, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from headscan.gradients.head_importance import default_loss, entropies, head_gradients
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.models.token_batches import run_halving
from headscan.pipelines import corpora
from headscan.pipelines.scan.shard_task import HeadNumbers, Measured, head_table
from headscan.pipelines.scoring.batching import pad, whole_batches

#: Loss of a sequence: the mean or the sum of the losses of its tokens.
Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")


@dataclass(frozen=True)
class ImportanceItem:
    """One shard for one replica.

    Attributes:
        batch_tokens: Tokens of one pass, padding included.
        rope: Sequence lengths at which the model's rotary frequencies change; a batch never mixes them.
    """

    shard: corpora.Shard
    reduction: Reduction
    batch_tokens: int
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"shard {self.shard.index}"


def measure_importance(lm: LoadedModel, item: ImportanceItem) -> Measured:
    """Pool task: measure the importance of every head on every sequence of a shard.

    Raises:
        NotFiniteError: A derivative is NaN or infinite.
        UnsupportedModelError: The model has no loss on plain text, or gives no derivatives.
    """
    texts = item.shard.sequences
    lengths = [len(text) for text in texts]

    def measure(rows: list[int]) -> list[HeadNumbers]:
        ids, real = pad([texts[row].ids for row in rows])
        keys = [texts[row].index for row in rows]
        loss = default_loss(lm, ids, real, keys=keys, summed=item.reduction == "sum")
        found = []
        for kind, gradients in head_gradients(lm, loss).items():
            site = lm.at(kind)
            values = {"gate_gradient": gradients, "entropy": entropies(site, loss)}
            found.append(HeadNumbers.of(site.grid, values, torch.zeros(gradients.shape, dtype=torch.bool)))
        return found

    order: list[int] = []
    parts: list[list[HeadNumbers]] = []
    for batch in whole_batches(lengths, item.batch_tokens, item.rope):
        for rows, found in run_halving(list(batch.rows), measure, lengths, lm.limits["importance"]):
            order += rows
            parts.append(found)
    indices = [text.index for text in texts]
    tables = [
        head_table(HeadNumbers.of_batches(of_site), np.argsort(order), indices) for of_site in zip(*parts, strict=True)
    ]
    return Measured(pa.concat_tables(tables), 0)
