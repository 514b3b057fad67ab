"""Least squares from sums over tokens, pulled towards the old weights.

Shapes: M tokens, F columns of a projection's input, E width of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Ridge of a regression, as a share of the mean diagonal of its Gram matrix.
RIDGE = 0.01


def ridge(gram: Tensor) -> Tensor:
    """Return a Gram matrix with `RIDGE` added to its diagonal, float64."""
    wide = gram.double()
    strength = RIDGE * wide.diagonal().mean().clamp_min(1e-12)
    return wide + strength * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)


class LeastSquares:
    """The weight (E, F) that reproduces targets from inputs, summed batch by batch in float32."""

    def __init__(self) -> None:
        self._gram: Any = 0.0
        self._cross: Any = 0.0
        self.tokens = 0

    def add(self, inputs_MF: Tensor, targets_ME: Tensor) -> None:
        """Add tokens."""
        inputs, targets = inputs_MF.float(), targets_ME.float()
        self._gram = self._gram + inputs.T @ inputs
        self._cross = self._cross + targets.T @ inputs
        self.tokens += len(inputs)

    @property
    def gram(self) -> Tensor:
        """Second moments of the inputs as means over tokens (F, F)."""
        mean: Tensor = self._gram / self.tokens
        return mean

    def solve(self, old_EF: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the weight in float64 arithmetic, as float32; columns that are not kept are zero.

        Args:
            old_EF: The old weight; the ridge pulls to it.
            kept: Columns that remain, bool (F,); None keeps all.
        """
        gram, cross = self._gram.double(), self._cross.double()
        old = old_EF.to(gram)
        kept = torch.ones(len(gram), dtype=torch.bool, device=gram.device) if kept is None else kept.to(gram.device)
        gram, cross, pull = gram[kept][:, kept], cross[:, kept], old[:, kept]
        with_ridge = ridge(gram)
        strength = with_ridge[0, 0] - gram[0, 0]
        weight = torch.zeros_like(old)
        weight[:, kept] = torch.linalg.solve(with_ridge, (cross + strength * pull).T).T
        return weight.float()
