"""The pool task of an importance run: derivatives of the loss by a gate on every head, of a shard's sequences.

Shapes: B sequences, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from headscan.gradients.example_losses import Loss
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
#: Columns that are measured; a run with others is another run.
MEASURED = ("gate_gradient", "token_gradient", "entropy")


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

    def loss_of(rows: list[int]) -> Loss:
        ids, real = pad([texts[row].ids for row in rows])
        keys = [texts[row].index for row in rows]
        return default_loss(lm, ids, real, keys=keys, summed=item.reduction == "sum")

    lengths = [len(text) for text in texts]
    return measure_losses(lm, loss_of, lengths, [text.index for text in texts], item.batch_tokens, item.rope)


def measure_losses(
    lm: LoadedModel,
    loss_of: Callable[[list[int]], Loss],
    lengths: list[int],
    indices: list[int],
    batch_tokens: int,
    rope: RopeLengths,
) -> Measured:
    """Return the derivatives of the losses of sequences by a gate on every head, at every site.

    Args:
        loss_of: Makes the loss of a batch from row numbers.
        lengths: Tokens of each sequence.
        indices: Index of each sequence in its corpus or file.
        batch_tokens: Tokens of one pass, padding included.
    """

    def measure(rows: list[int]) -> list[HeadNumbers]:
        loss = loss_of(rows)
        found = []
        for kind, gradients in head_gradients(lm, loss).items():
            site = lm.at(kind)
            values = dict(zip(MEASURED, (gradients.gates, gradients.tokens, entropies(site, loss)), strict=True))
            found.append(HeadNumbers.of(site.grid, values, torch.zeros(gradients.gates.shape, dtype=torch.bool)))
        return found

    order: list[int] = []
    parts: list[list[HeadNumbers]] = []
    for batch in whole_batches(lengths, batch_tokens, rope):
        for rows, found in run_halving(list(batch.rows), measure, lengths, lm.limits["importance"]):
            order += rows
            parts.append(found)
    tables = [
        head_table(HeadNumbers.of_batches(of_site), np.argsort(order), indices) for of_site in zip(*parts, strict=True)
    ]
    return Measured(pa.concat_tables(tables), 0)
