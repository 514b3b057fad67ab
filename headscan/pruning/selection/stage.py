"""One stage of the choice: damage curves of every layer, given the heads that other layers lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.pytorch_utils import Conv1D

from headscan.grid import AttentionSite, Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import Edits, read_weight
from headscan.pruning.repair.least_squares import LeastSquares
from headscan.pruning.repair.repair import Repaired
from headscan.pruning.selection.allocate_units import allocate_units
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.layer_moments import LayerMoments, layer_moments
from headscan.pruning.selection.subset_damage import Subset, best_subsets, repaired_weight

#: Subsets of each size that are measured.
_MEASURED = 2
#: By how many units a further stage may lower, and at least raise, the number of a layer.
_FEWER, _LEAST_MORE = 1, 3


@dataclass(frozen=True)
class Stage:
    """The best choices around a model with some units removed.

    Attributes:
        units: Number of units that this model lacks.
        choices: By number of further units, all heads to remove.
    """

    units: int
    choices: tuple[tuple[Head, ...], ...]

    @property
    def most(self) -> int:
        """Largest number of removed units that this stage can choose."""
        return self.units + len(self.choices) - 1


@dataclass(frozen=True)
class _Curve:
    """The damage of a layer by its number of removed units.

    Attributes:
        least: The smallest number.
        damage: Divergence in nats per token with ``least``, ``least + 1``, ... units removed.
        removed: The best heads found for each number.
    """

    least: int
    damage: tuple[float, ...]
    removed: tuple[tuple[Head, ...], ...]


def measure_stage(
    lm: LoadedModel,
    calibration: Calibration,
    divergence: Divergence,
    units: Mapping[int, Sequence[tuple[Head, ...]]],
    before: Repaired,
    more: int,
) -> Stage:
    """Return the best choices for up to ``more`` further units.

    Each layer is chosen again, given what the other layers lack: its curve is measured on the repaired model.

    Args:
        calibration: Texts of the moments.
        units: Units by layer.
        before: The repaired model, with the sums of all layers; without removed heads, the original.
    """
    moments = layer_moments(lm, calibration, before.edits)
    layers = {}
    for site in lm.grid.sites:
        if units[site.layer]:
            sums = before.sums.get(site.layer)
            layers[site.layer] = _Layer(lm, site, moments[site.layer], sums, units[site.layer], before.edits)
    curves = {layer: each.curve(divergence, more) for layer, each in layers.items()}
    removed = sum(each.now for each in layers.values())
    spare = removed - sum(curve.least for curve in curves.values())
    # A stage adds a few units a layer, so many layers with few units may allow fewer than wanted.
    most = min(spare + more, sum(len(curve.damage) - 1 for curve in curves.values()))
    allocated = allocate_units({layer: curve.damage for layer, curve in curves.items()}, most)
    choices = tuple(
        tuple(sorted(h for layer, curve in curves.items() for h in curve.removed[counts.get(layer, 0)]))
        for counts in allocated[spare:]
    )
    return Stage(removed, choices)


class _Layer:
    """One layer, with the repaired model around it.

    Attributes:
        now: Number of units that it lacks.
    """

    def __init__(
        self,
        lm: LoadedModel,
        site: AttentionSite,
        moments: LayerMoments,
        sums: LeastSquares | None,
        units: Sequence[tuple[Head, ...]],
        before: Edits,
    ) -> None:
        self._site, self._units, self._before = site, units, before
        module = lm.module(site.output_projection)
        self._name = f"{site.output_projection}.weight"
        self._by_columns = isinstance(module, Conv1D)
        old = read_weight(module)
        old = (old.T if self._by_columns else old).to(moments.gram.device)
        self._weight = old if sums is None else sums.solve(old)
        self._moments = moments if sums is None else LayerMoments(sums.gram, moments.fisher)
        self._elsewhere = tuple(head for head in before.removed if head.layer != site.layer)
        gone = set(before.removed)
        self.now = sum(gone.issuperset(unit) for unit in units)

    def curve(self, divergence: Divergence, more: int) -> _Curve:
        """Return the measured curve around the present number of removed units."""
        columns = [[self._column(head, at) for _, head in unit for at in range(self._width)] for unit in self._units]
        if self.now or self._elsewhere:
            least, most = (
                max(0, self.now - _FEWER),
                min(len(self._units), self.now + min(more, max(_LEAST_MORE, len(self._units) // 5))),
            )
        else:
            least, most = 0, min(len(self._units), more)
        subsets = best_subsets(self._moments, self._weight, columns, most=most)[least:]
        measured = [subset for each in subsets for subset in each[:_MEASURED]]
        below = Edits(self._elsewhere, self._before.weights)
        found = divergence.measure(self._site.layer, [self._edits(subset, columns) for subset in measured], below)
        damage: list[float] = []
        removed: list[tuple[Head, ...]] = []
        for each in subsets:
            count = len(each[0].units)
            of_size = [(v, s) for v, s in zip(found, measured, strict=True) if len(s.units) == count]
            value, best = min(of_size, key=lambda pair: pair[0])
            damage.append(value)
            removed.append(self._heads(best))
        return _Curve(least, tuple(damage), tuple(removed))

    @property
    def _width(self) -> int:
        return self._site.value_dim

    def _column(self, head: int, at: int) -> int:
        return head * self._width + at

    def _heads(self, subset: Subset) -> tuple[Head, ...]:
        return tuple(head for unit in subset.units for head in self._units[unit])

    def _edits(self, subset: Subset, columns: Sequence[Sequence[int]]) -> Edits:
        """Return all edits with a subset removed, and the output projection repaired from the moments."""
        gone = torch.tensor([c for unit in subset.units for c in columns[unit]], device=self._weight.device)
        weight = repaired_weight(self._moments.gram, self._weight, gone.long())
        edit = weight.T.contiguous() if self._by_columns else weight
        return Edits((*self._elsewhere, *self._heads(subset)), {**self._before.weights, self._name: edit})
