"""Least squares from sums over tokens, pulled towards the old weights.

Shapes: M tokens, F columns of a projection's input, E width of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Ridge of a regression, as a share of the mean diagonal of its Gram matrix.
RIDGE = 0.01


#: Ridges of which a repair takes the best; another choice is no repair.
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)


def ridge(gram: Tensor, strength: float = RIDGE) -> Tensor:
    """Return a Gram matrix with a share of its mean diagonal added to the diagonal, float64."""
    wide = gram.double()
    added = strength * wide.diagonal().mean().clamp_min(1e-12)
    return wide + added * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)


class LeastSquares:
    """The weight (E, F) that reproduces targets from inputs, summed batch by batch in float32."""

    def __init__(self) -> None:
        self._gram: Any = 0.0
        self._cross: Any = 0.0
        self._total = 0.0

    def add(self, inputs_MF: Tensor, targets_ME: Tensor, weights_M: Tensor) -> None:
        """Add tokens."""
        inputs, targets = inputs_MF.float(), targets_ME.float()
        weighted = inputs.T * weights_M.to(inputs)
        self._gram = self._gram + weighted @ inputs
        self._cross = self._cross + (weighted @ targets.to(inputs)).T
        self._total += float(weights_M.sum())

    @property
    def gram(self) -> Tensor:
        """Second moments of the inputs as means over tokens (F, F)."""
        mean: Tensor = self._gram / self._total
        return mean

    def solve(self, old_EF: Tensor, kept: Tensor | None = None, strength: float = RIDGE) -> Tensor:
        """Return the weight in float64 arithmetic, as float32; columns that are not kept are zero.

        Args:
            old_EF: The old weight; the ridge pulls to it.
            kept: Columns that remain, bool (F,); None keeps all.
            strength: The ridge, as a share of the mean diagonal.
        """
        gram, residual, weight, kept = self._of_kept(old_EF, kept)
        weight[:, kept] += torch.linalg.solve(ridge(gram, strength), residual.T).T
        return weight.float()

    def solve_for(self, judging: LeastSquares, old_EF: Tensor, kept: Tensor | None = None) -> Tensor | None:
        """Return the weight of the ridge that is best on other tokens; None if the old weight is as good there.

        The squared error on the other tokens is a quadratic function of the weight, which their sums determine.

        Args:
            judging: Sums of the other tokens.
        """
        gram, residual, weight, kept = self._of_kept(old_EF, kept)
        other_gram, other_residual, _, _ = judging._of_kept(old_EF, kept)
        most, best = 0.0, None
        for strength in STRENGTHS:
            change = torch.linalg.solve(ridge(gram, strength), residual.T).T
            gain = float((change * (2 * other_residual - change @ other_gram)).sum())
            if gain > most:
                most, best = gain, change
            elif best is not None:  # stronger ridges only shrink the change further
                break
        if best is None:
            return None
        weight[:, kept] += best
        return weight.float()

    def _of_kept(self, old_EF: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums that a change of the old weight (E, F) needs, in float64.

        Returns:
            The Gram matrix of the kept columns, their cross sums with the old weight's error, the old weight with zeros
            in the other columns, and the kept columns.
        """
        gram, cross = self._gram.double(), self._cross.double()
        kept = torch.ones(len(gram), dtype=torch.bool, device=gram.device) if kept is None else kept.to(gram.device)
        weight = old_EF.to(gram) * kept
        gram = gram[kept][:, kept]
        return gram, cross[:, kept] - weight[:, kept] @ gram, weight, kept
