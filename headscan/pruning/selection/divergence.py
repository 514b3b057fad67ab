"""Measured damage of removing heads of one layer: the divergence of the model's predictions.

Shapes: B sequences, N tokens, M real tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from headscan.layers.blocks import find_blocks
from headscan.layers.layer_range_pass import resuming_at
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited
from headscan.pruning.layer_passes import log_probabilities


class Divergence:
    """The divergence of edited models from the original, on the same texts.

    The Kullback-Leibler divergence of the next-token predictions has far less noise than a difference of losses, so a
    few thousand tokens are enough.

    Args:
        lm: The model.
        calibration: The texts; the original's predictions for them stay in memory (M, V).
    """

    def __init__(self, lm: LoadedModel, calibration: Calibration) -> None:
        self._lm = lm
        self._blocks = find_blocks(lm)
        self._batches = list(calibration.batches(lm.device))
        with torch.no_grad():
            self._expected = [log_probabilities(lm, batch) for batch in self._batches]

    @torch.no_grad()
    def measure(
        self,
        layer: int,
        edits: Sequence[Edits],
        below: Edits = NO_EDITS,
    ) -> list[float]:
        """Return the mean divergence in nats per token of several edits, which differ from a layer on.

        Args:
            layer: The layer; those below run once for all edits.
            edits: The edits, complete.
            below: The edits of the layers below, shared by all.
        """
        totals = [0.0] * len(edits)
        for batch, expected in zip(self._batches, self._expected, strict=True):
            with edited(self._lm, below), self._blocks.keep_inputs([layer]) as kept:
                run(self._lm.model, {"input_ids": batch.ids})
            for index, each in enumerate(edits):
                with edited(self._lm, each), resuming_at(self._blocks, layer, kept[layer]):
                    found = log_probabilities(self._lm, batch)
                totals[index] += float(F.kl_div(found, expected.to(found.device), reduction="sum", log_target=True))
        tokens = sum(len(expected) for expected in self._expected)
        return [total / tokens for total in totals]
