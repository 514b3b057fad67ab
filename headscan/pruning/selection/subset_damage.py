"""Damage of removing heads of one layer, after the best linear repair.

A removed head is predicted from the remaining ones by least squares, and its part of the output projection moves to
them. What stays is an error of the layer's output; its damage is its expected square, weighted by the Fisher
information of the loss (as in OBS, and in ZipLM for whole structures).

Shapes: U units (heads, or groups of heads), F = HD columns of the output projection's input, E width of its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.pruning.repair.least_squares import ridge
from headscan.pruning.selection.layer_moments import LayerMoments


@dataclass(frozen=True)
class Subset:
    """Units of one layer that are removed together.

    Attributes:
        units: Their indices, sorted.
        damage: Expected increase of the loss in nats per token, by the second-order estimate; it ranks subsets of one
            layer and is too small by a factor of 2 to 4.
    """

    units: tuple[int, ...]
    damage: float


def best_subsets(
    moments: LayerMoments, weight_EF: Tensor, units: Sequence[Sequence[int]], *, most: int, width: int = 3
) -> list[list[Subset]]:
    """Return the subsets with the least damage for every number of removed units.

    The search is a beam: each of the ``width`` best subsets is extended by every unit.

    Args:
        weight_EF: Weight of the output projection (E, F).
        units: Columns of each unit (U lists).
        most: Largest number of removed units.
        width: Number of subsets of each size.

    Returns:
        By number of removed units, from 0 to the smaller of U and ``most``, the subsets found, least damage first.
    """
    fisher = moments.fisher.double()
    columns = [torch.tensor(list(each), device=moments.gram.device) for each in units]
    precision = torch.linalg.inv(ridge(moments.gram))
    beam = [_State((), 0.0, precision, weight_EF.to(precision))]
    found = [[Subset((), 0.0)]]
    for _ in range(min(most, len(units))):
        candidates: dict[tuple[int, ...], tuple[float, _State, int]] = {}
        for state in beam:
            for unit in set(range(len(units))) - set(state.units):
                damage = state.damage + state.cost(columns[unit], fisher)
                key = tuple(sorted((*state.units, unit)))
                if key not in candidates or damage < candidates[key][0]:
                    candidates[key] = damage, state, unit
        best = sorted(candidates.items(), key=lambda each: each[1][0])[:width]
        found.append([Subset(key, damage) for key, (damage, _, _) in best])
        beam = [state.without(unit, columns[unit], damage) for _, (damage, state, unit) in best]
    return found


@dataclass(frozen=True)
class _State:
    """A layer with some units removed and the others repaired.

    Attributes:
        precision: Inverse Gram matrix of the columns that remain; removed ones have zeros.
        weight: Repaired weight (E, F).
    """

    units: tuple[int, ...]
    damage: float
    precision: Tensor
    weight: Tensor

    def cost(self, columns: Tensor, fisher: Tensor) -> float:
        """Return the damage that removing the columns adds: half of ``tr(F W C W')``.

        C is the covariance of the columns that the others cannot predict.
        """
        part = self.weight[:, columns]
        residual = torch.linalg.inv(self.precision[columns][:, columns])
        return 0.5 * float(((part.T @ fisher @ part) * residual).sum())

    def without(self, unit: int, columns: Tensor, damage: float) -> _State:
        """Return the state with the columns removed and repaired."""
        inverse = torch.linalg.inv(self.precision[columns][:, columns])
        gain = inverse @ self.precision[columns]
        weight = self.weight - self.weight[:, columns] @ gain
        precision = self.precision - self.precision[:, columns] @ gain
        weight[:, columns] = 0.0
        precision[columns] = 0.0
        precision[:, columns] = 0.0
        return _State((*self.units, unit), damage, precision, weight)


def repaired_weight(gram: Tensor, weight_EF: Tensor, removed: Tensor) -> Tensor:
    """Return the weight (E, F), float32, whose remaining columns replace the removed ones best.

    Args:
        gram: Second moments (F, F) of the projection's input.
        removed: Indices of removed columns; they are zero in the result.
    """
    state = _State((), 0.0, torch.linalg.inv(ridge(gram)), weight_EF.to(gram.device, torch.float64))
    return state.without(0, removed, 0.0).weight.float()
