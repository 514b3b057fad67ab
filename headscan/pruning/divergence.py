"""Measured damage of removing heads: the divergence of the model's predictions.

Shapes: B sequences, N tokens, M counted predictions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from headscan.layers.blocks import cannot_resume, find_blocks, resuming_at, running_range
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Batch, Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited, logits


class Divergence:
    """The divergence of edited models from the original, on the same texts. The Kullback-Leibler divergence of the
    next-token predictions has far less noise than a difference of losses, so a few thousand tokens are enough.

    Args:
        lm: The model.
        calibration: The texts; the original's predictions for them stay in memory (M, V).
    """

    def __init__(self, lm: LoadedModel, calibration: Calibration) -> None:
        self._lm = lm
        self._blocks = find_blocks(lm)
        attending = {site.layer for site in lm.grid.sites}
        self._behind_attention = attending - cannot_resume(self._blocks, attending, behind_attention=True).keys()
        self._batches = list(calibration.batches(lm.device))
        self._expected: list[Tensor] = []
        self._entropy = 0.0
        with torch.no_grad():
            for batch in self._batches:
                predicted = logits(lm, batch).log_softmax(-1)
                probabilities = predicted.exp()
                self._entropy -= self._weighted(batch, torch.linalg.vecdot(probabilities, predicted))
                self._expected.append(probabilities)
        self._total = float(sum((batch.scored * batch.weights).sum() for batch in self._batches))

    @torch.no_grad()
    def of(self, edits: Edits) -> float:
        """Return the mean divergence of an edited model in nats per token."""
        total = -self._entropy
        for batch, expected in zip(self._batches, self._expected, strict=True):
            with edited(self._lm, edits):
                total += self._cross_entropy(batch, expected)
        return total / self._total

    @torch.no_grad()
    def of_layers(
        self, edits: Mapping[int, Sequence[Callable[[], Edits]]], below: Edits = NO_EDITS
    ) -> dict[int, list[float]]:
        """Return the mean divergences in nats per token of models that are edited from a layer on. The layers below run
        once for all, and so does the attention of the layer.

        Args:
            edits: By layer, functions that return the complete edits of each model. In their layer they may remove
                heads and change the output projection. New weights exist while they are measured only, because those
                of all layers may not fit into memory.
            below: The edits that all of them have before that.
        """
        totals = {layer: [-self._entropy] * len(of_layer) for layer, of_layer in edits.items()}
        for batch, expected in zip(self._batches, self._expected, strict=True):
            with (
                self._blocks.keep_heads(self._behind_attention & edits.keys()) as heads,  # before any are removed
                edited(self._lm, below),
                self._blocks.keep_inputs(edits) as kept,
                running_range(self._blocks.all, 0, max(edits) + 1),
            ):
                run(self._lm.model, {"input_ids": batch.ids})
            for layer, of_layer in edits.items():
                attention = self._blocks.with_heads(layer, heads[layer]) if layer in heads else nullcontext()
                with resuming_at(self._blocks, layer, kept[layer]), attention:
                    for index, each in enumerate(of_layer):
                        with edited(self._lm, each()):
                            totals[layer][index] += self._cross_entropy(batch, expected)
        return {layer: [total / self._total for total in of_layer] for layer, of_layer in totals.items()}

    def _cross_entropy(self, batch: Batch, expected: Tensor) -> float:
        """Return the summed cross-entropy of the model's predictions to those of the original."""
        found = logits(self._lm, batch)
        expected = expected.to(found.device)
        return self._weighted(batch, found.logsumexp(-1) - torch.linalg.vecdot(expected, found))

    @staticmethod
    def _weighted(batch: Batch, values_M: Tensor) -> float:
        """Return the weighted sum of one value for each counted prediction."""
        weights = batch.weights.repeat_interleave(batch.scored).to(values_M.device)
        return float((values_M * weights).sum(dtype=torch.float64))
