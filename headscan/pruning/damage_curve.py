"""The damage of removing heads of one layer, after the best linear repair.

A removed head is predicted from the remaining ones by least squares, and its part of the output projection moves to
them. What stays is an error of the layer's output; its damage is its expected square, weighted by the Fisher
information of the loss (as in OBS, Hassibi and Stork 1993, and in ZipLM for whole structures, arXiv 2302.04089). It
ranks the subsets of a layer; the best are measured, only where a choice needs it.

Shapes: B sequences, N tokens, M real tokens, H query heads, Dv width of a head's output, U units (heads, or groups of
heads), F = H Dv columns of the output projection's input, E width of its output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscan.gradients.backward import backward
from headscan.gradients.losses import NextTokenLoss
from headscan.grid import AttentionSite, Head
from headscan.long_work import KnownNumbers, Steps, unseen_steps
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration, CalibrationBatch
from headscan.pruning.edited_model import NO_EDITS, Edits, LayerEdits, edited, read_weight, turned
from headscan.pruning.repair import Repaired
from headscan.pruning.value_repair import ridge


@dataclass(frozen=True)
class LayerMoments:
    """Second moments of one layer, as means over tokens, float32: of the input of the output projection (F, F), and of
    the derivative of the loss by its output (E, E), the weight of an error.
    """

    gram: Tensor
    fisher: Tensor


def layer_moments(
    lm: LoadedModel, calibration: Calibration, edits: Edits = NO_EDITS, steps: Steps = unseen_steps
) -> dict[int, LayerMoments]:
    """Return the moments of every layer with heads, by the summed loss of all tokens (empirical Fisher information)."""
    grams: dict[int, Tensor] = {}
    fishers: dict[int, Tensor] = {}
    total = 0.0
    batches = list(calibration.batches(lm.device))
    with torch.inference_mode(False), edited(lm, edits), steps("moments of all layers", len(batches), "batch") as done:
        for batch in batches:
            total += _add_moments(lm, batch, grams, fishers)
            done()
    return {layer: LayerMoments(grams[layer] / total, fishers[layer] / total) for layer in grams}


def _add_moments(
    lm: LoadedModel, batch: CalibrationBatch, grams: dict[int, Tensor], fishers: dict[int, Tensor]
) -> float:
    """Add the weighted moments of a batch to the sums of every layer; return the sum of the weights of the inputs."""
    real_BN = batch.real_BN
    weights_M, of_gradients_M = batch.weights_BN[real_BN], batch.weights.repeat_interleave(batch.lengths)

    def on_heads(site: AttentionSite, outputs_BNHD: Tensor, _: Tensor) -> None:
        _add(grams, site.layer, outputs_BNHD.flatten(2)[real_BN.to(outputs_BNHD.device)], weights_M)

    def on_outputs(site: AttentionSite, out: Tensor, gradient: Tensor) -> None:
        # Some models call their projections with flat tokens.
        flat = gradient.reshape(real_BN.numel(), -1)
        _add(fishers, site.layer, flat[real_BN.flatten().to(flat.device)], of_gradients_M)

    loss = NextTokenLoss.at(batch.ids, batch.lengths.tolist(), batch.scoring_BN, summed=True)
    backward(lm, loss, on_heads=on_heads, on_outputs=on_outputs)
    return float(weights_M.sum())


def _add(sums: dict[int, Tensor], layer: int, values_MF: Tensor, weights_M: Tensor) -> None:
    """Add the weighted second moments (F, F) of tokens to the sum of a layer."""
    values = values_MF.float()
    moments = (values.T * weights_M.to(values)) @ values
    sums[layer] = sums[layer] + moments if layer in sums else moments


@dataclass(frozen=True)
class Subset:
    """Units of one layer, sorted, that are removed together, and their damage: the expected increase of the loss in
    nats per token by the second-order estimate, which ranks subsets of one layer and is too small by a factor of 2 to
    4.
    """

    units: tuple[int, ...]
    damage: float


def best_subsets(
    moments: LayerMoments, weight_EF: Tensor, units: Sequence[Sequence[int]], *, most: int, width: int = 3
) -> list[list[Subset]]:
    """Return the subsets with the least damage by number of removed units, from 0 to the smaller of U and ``most``.

    The search is a beam: each of the ``width`` best subsets is extended by every unit. ``weight_EF`` is that of the
    output projection, ``units`` are the columns of each unit.
    """
    fisher = moments.fisher.double()
    columns = [torch.tensor(list(each), device=moments.gram.device) for each in units]
    precision = torch.linalg.inv(ridge(moments.gram))
    beam = [_State((), 0.0, precision, weight_EF.to(precision))]
    by_count = [[Subset((), 0.0)]]
    for _ in range(min(most, len(units))):
        candidates: dict[tuple[int, ...], tuple[float, _State, int]] = {}
        for state in beam:
            for unit in set(range(len(units))) - set(state.units):
                damage = state.damage + state.cost(columns[unit], fisher)
                key = tuple(sorted((*state.units, unit)))
                if key not in candidates or damage < candidates[key][0]:
                    candidates[key] = damage, state, unit
        best = sorted(candidates.items(), key=lambda each: each[1][0])[:width]
        by_count.append([Subset(key, damage) for key, (damage, _, _) in best])
        beam = [state.without(unit, columns[unit], damage) for _, (damage, state, unit) in best]
    return by_count


def _as_numbers(by_count: Sequence[Sequence[Subset]]) -> NDArray[np.float64]:
    """Return subsets by number of units as numbers: before those of each number, how many there are."""
    numbers: list[float] = []
    for subsets in by_count:
        numbers.append(len(subsets))
        for subset in subsets:
            numbers += [*subset.units, subset.damage]
    return np.array(numbers)


def _as_subsets(numbers: NDArray[np.float64]) -> list[list[Subset]]:
    """Return the subsets of `_as_numbers`."""
    left = iter(numbers.tolist())
    subsets: list[list[Subset]] = []
    for count in left:
        size = len(subsets)
        subsets.append([Subset(tuple(int(next(left)) for _ in range(size)), next(left)) for _ in range(int(count))])
    return subsets


@dataclass(frozen=True)
class _State:
    """A layer with some units removed and the others repaired: the inverse Gram matrix of the columns that remain, with
    zeros for removed ones, and the repaired weight (E, F).
    """

    units: tuple[int, ...]
    damage: float
    precision: Tensor
    weight: Tensor

    def cost(self, columns: Tensor, fisher: Tensor) -> float:
        """Return the damage of removing columns, half of ``tr(F W C W')``; C is the covariance that others cannot
        predict.
        """
        part = self.weight[:, columns]
        residual = torch.linalg.inv(self.precision[columns][:, columns])
        return 0.5 * float(((part.T @ fisher @ part) * residual).sum())

    def without(self, unit: int, columns: Tensor, damage: float) -> _State:
        inverse = torch.linalg.inv(self.precision[columns][:, columns])
        gain = inverse @ self.precision[columns]
        weight = self.weight - self.weight[:, columns] @ gain
        precision = self.precision - self.precision[:, columns] @ gain
        weight[:, columns] = 0.0
        precision[columns] = 0.0
        precision[:, columns] = 0.0
        return _State((*self.units, unit), damage, precision, weight)


def repaired_weight(gram: Tensor, weight_EF: Tensor, removed: Tensor) -> Tensor:
    """Return the weight (E, F), float32, whose remaining columns best replace the removed ones, which become zero."""
    state = _State((), 0.0, torch.linalg.inv(ridge(gram)), weight_EF.to(gram.device, torch.float64))
    return state.without(0, removed, 0.0).weight.float()


#: Subsets of each size that are measured.
_MEASURED = 2
#: By how many units a further stage may lower, and at least raise, the number of a layer.
_FEWER, _LEAST_MORE = 1, 3


class DamageCurve:
    """One layer, with the repaired model ``before`` around it; without removed heads, the original.

    Args:
        more: Largest number of further units.
        known: Has the best subsets, if they were found before.
        allowed: Numbers of units that the layer may lose; None allows any.

    Attributes:
        now: Number of units that the layer lacks in the repaired model.
        least: The smallest number that can be chosen; `damages` begins with it.
        counts: The numbers that can be chosen, ascending.
    """

    def __init__(
        self,
        lm: LoadedModel,
        site: AttentionSite,
        moments: LayerMoments,
        units: Sequence[tuple[Head, ...]],
        before: Repaired,
        more: int,
        known: KnownNumbers | None = None,
        allowed: Collection[int] | None = None,
    ) -> None:
        self._site, self._units, self._before = site, units, before.edits
        self._module = module = lm.module(site.output_projection)
        self._name = f"{site.output_projection}.weight"
        old = turned(module, read_weight(module)).to(moments.gram.device)
        sums = before.sums.get(site.layer)
        self._weight = old if sums is None else sums.solve(old)
        self._gram = moments.gram if sums is None else sums.gram
        self._elsewhere = tuple(head for head in self._before.removed if head.layer != site.layer)
        width = site.value_dim
        self._columns = [[head * width + at for _, head in unit for at in range(width)] for unit in units]
        gone = set(self._before.removed)
        self.now = sum(gone.issuperset(unit) for unit in units)
        self.least, most = 0, min(len(units), more)
        if gone:
            self.least = max(0, self.now - _FEWER)
            most = min(len(units), self.now + min(more, max(_LEAST_MORE, len(units) // 5)))
        if allowed is not None:
            # The nearest allowed numbers lie within reach.
            self.least = max((n for n in allowed if n < self.now), default=self.now) if gone else 0
            most = max(most, min((n for n in allowed if n > self.now), default=most))
        numbers = (known or KnownNumbers()).measured(
            ("best subsets of the heads of a layer", site.layer, units, most, self._before.removed),
            lambda: _as_numbers(
                best_subsets(LayerMoments(self._gram, moments.fisher), self._weight, self._columns, most=most)
            ),
        )
        self._subsets = _as_subsets(numbers)[self.least :]
        self.counts = [n for n in range(self.least, most + 1) if allowed is None or n in {*allowed, self.now}]
        self._best: dict[int, tuple[float, Subset]] = {}
        if not gone:
            self._best[0] = 0.0, self._subsets[0][0]  # the original itself

    @property
    def damages(self) -> tuple[float, ...]:
        """Divergence in nats per token with ``least``, ``least + 1``, ... units removed. Where nothing was measured:
        the estimate, scaled to the measured damage of the next smaller number.
        """
        damages: list[float] = []
        scale = 1.0
        for count, subsets in enumerate(self._subsets, self.least):
            estimate = subsets[0].damage
            if count in self._best:
                measured = self._best[count][0]
                scale = measured / estimate if estimate > 0 else scale
                damages.append(measured)
            else:
                damages.append(max(scale * estimate, damages[-1] if damages else 0.0))
        return tuple(damages)

    def is_measured(self, count: int) -> bool:
        return count in self._best

    def around(self, count: int) -> list[int]:
        """Return the number that can be chosen before one, that one, and the number after it; at the ends that one."""
        at = self.counts.index(count)
        return [self.counts[max(0, at - 1)], count, self.counts[min(len(self.counts) - 1, at + 1)]]

    def unmeasured(self, counts: Iterable[int]) -> list[int]:
        """Return the numbers that were not measured."""
        return sorted(count for count in set(counts) if not self.is_measured(count))

    def candidates(self, counts: Iterable[int]) -> list[Subset]:
        """Return the best subsets of some numbers of units, to be measured."""
        return [subset for count in counts for subset in self._subsets[count - self.least][:_MEASURED]]

    def add(self, subsets: Iterable[Subset], damages: Iterable[float]) -> None:
        """Take measured damages of subsets in nats per token."""
        for subset, damage in zip(subsets, damages, strict=True):
            count = len(subset.units)
            if count not in self._best or damage < self._best[count][0]:
                self._best[count] = damage, subset

    def heads(self, count: int) -> tuple[Head, ...]:
        return self._heads(self._best[count][1])

    def candidate(self, subset: Subset) -> LayerEdits:
        """Return the model with a subset removed."""
        return LayerEdits(self._heads(subset), partial(self.edits, subset))

    def _heads(self, subset: Subset) -> tuple[Head, ...]:
        return tuple(head for unit in subset.units for head in self._units[unit])

    def edits(self, subset: Subset) -> Edits:
        """Return all edits with a subset removed, and the output projection repaired from the moments."""
        gone = torch.tensor([c for unit in subset.units for c in self._columns[unit]], device=self._weight.device)
        weight = repaired_weight(self._gram, self._weight, gone.long())
        edit = turned(self._module, weight).contiguous()
        return Edits((*self._elsewhere, *self._heads(subset)), {**self._before.weights, self._name: edit})
