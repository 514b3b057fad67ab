"""Moments that decide how well other heads can replace removed ones.

Shapes: B sequences, N tokens, M real tokens, H query heads, Dv width of a head's output, F = H Dv, E width of a hidden
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscan.gradients.backward import backward
from headscan.gradients.example_losses import NextTokenLoss
from headscan.grid import AttentionSite
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited


@dataclass(frozen=True)
class LayerMoments:
    """Second moments of one layer, as means over tokens, float32.

    Attributes:
        gram: Of the input of the output projection (F, F).
        fisher: Of the derivative of the loss by the projection's output (E, E): the weight of an error.
    """

    gram: Tensor
    fisher: Tensor


def layer_moments(
    lm: LoadedModel,
    calibration: Calibration,
    edits: Edits = NO_EDITS,
) -> dict[int, LayerMoments]:
    """Return the moments of every layer with heads, from one forward and one backward pass.

    The derivatives are those of the summed loss of all tokens (the empirical Fisher information).

    Args:
        edits: Heads that are already removed, and repaired weights.

    Raises:
        UnsupportedModelError: The model has no blocks that run one after another, or is in train mode.
    """
    sums = {site.layer: _Sums() for site in lm.grid.sites}
    with torch.inference_mode(False), edited(lm, edits):
        for batch in calibration.batches(lm.device):
            real_BN = batch.real_BN
            inputs_weights, gradients_weights = (
                batch.weights_BN[real_BN],
                batch.weights.repeat_interleave(batch.lengths),
            )

            def on_heads(
                site: AttentionSite,
                heads_BNHD: Tensor,
                _: Tensor,
                real_BN: Tensor = real_BN,
                weights_M: Tensor = inputs_weights,
            ) -> None:
                sums[site.layer].add_inputs(heads_BNHD.flatten(2)[real_BN.to(heads_BNHD.device)], weights_M)

            def on_outputs(
                site: AttentionSite,
                out: Tensor,
                gradient: Tensor,
                real_BN: Tensor = real_BN,
                weights_M: Tensor = gradients_weights,
            ) -> None:
                # Some models call their projections with flat tokens.
                flat = gradient.reshape(real_BN.numel(), -1)
                sums[site.layer].add_gradients(flat[real_BN.flatten().to(flat.device)], weights_M)

            loss = NextTokenLoss.of(batch.ids, batch.lengths.tolist(), batch.scored.tolist(), summed=True)
            backward(lm, loss, on_heads=on_heads, on_outputs=on_outputs)
    return {layer: each.means() for layer, each in sums.items()}


class _Sums:
    """Weighted sums over tokens."""

    def __init__(self) -> None:
        self._total = 0.0
        self._gram: Any = 0.0
        self._fisher: Any = 0.0

    def add_inputs(self, inputs_MF: Tensor, weights_M: Tensor) -> None:
        inputs = inputs_MF.float()
        weights = weights_M.to(inputs)
        self._total += float(weights.sum())
        self._gram = self._gram + (inputs.T * weights) @ inputs

    def add_gradients(self, gradients_ME: Tensor, weights_M: Tensor) -> None:
        gradients = gradients_ME.float()
        self._fisher = self._fisher + (gradients.T * weights_M.to(gradients)) @ gradients

    def means(self) -> LayerMoments:
        return LayerMoments(self._gram / self._total, self._fisher / self._total)
