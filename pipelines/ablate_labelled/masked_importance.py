"""Importance of heads while others are ablated, on labelled examples.

Shapes: B examples, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headscan.cluster.tasks.pool import Pool
from headscan.gradients.head_importance import head_gradients
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.models.token_batches import run_halving
from headscan.pipelines.ablate_labelled.site_arms import SiteHeads, ablated
from headscan.pipelines.labelled.labelled_loss import labelled_loss
from headscan.pipelines.labelled.labelled_texts import Answers, LabelledText
from headscan.pipelines.scoring.batching import whole_batches

#: Examples of one item of a pool.
_GROUP = 256


@dataclass(frozen=True)
class MaskedItem:
    """Examples whose loss is differentiated with heads ablated.

    Attributes:
        batch_tokens: Tokens of one pass, padding included.
    """

    texts: tuple[LabelledText, ...]
    answers: Answers
    heads: SiteHeads
    batch_tokens: int
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"importance from example {self.texts[0].index}"


def summed_importance(lm: LoadedModel, item: MaskedItem) -> dict[str, np.ndarray]:
    """Pool task: sum the absolute derivative by a gate on each head over examples.

    Returns:
        (L, H) by kind of site; NaN where a layer lacks the head.
    """
    lengths = [text.longest for text in item.texts]

    def measure(rows: list[int]) -> dict[str, np.ndarray]:
        loss = labelled_loss(lm, item.answers, [item.texts[row] for row in rows])
        return {kind: found.double().abs().sum(0).numpy() for kind, found in head_gradients(lm, loss).items()}

    total: dict[str, np.ndarray] = {}
    with ablated(lm, item.heads):
        for batch in whole_batches(lengths, item.batch_tokens, item.rope):
            for _, found in run_halving(list(batch.rows), measure, lengths, lm.limits["importance"]):
                total = {kind: table + total.get(kind, 0) for kind, table in found.items()}
    return total


def mean_importance(pool: Pool, item: MaskedItem) -> dict[str, np.ndarray]:
    """Return the mean absolute derivative of all examples of an item, (L, H) by kind of site."""
    groups = [item.texts[start : start + _GROUP] for start in range(0, len(item.texts), _GROUP)]
    parts = {
        done.item.texts[0].index: done.value
        for done in pool.map(summed_importance, [replace(item, texts=group) for group in groups])
    }
    ordered = [parts[group[0].index] for group in groups]  # a sum depends on its order
    return {kind: _sum([part[kind] for part in ordered]) / len(item.texts) for kind in ordered[0]}


def _sum(tables: Sequence[np.ndarray]) -> np.ndarray:
    total = np.zeros_like(tables[0])
    for table in tables:
        total = total + table
    return total
