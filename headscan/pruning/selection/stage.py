"""One stage of the choice: the best numbers of units by layer, given the heads that other layers lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations

from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.repair.repair import Repaired
from headscan.pruning.selection.allocate_units import allocate_units
from headscan.pruning.selection.damage_curve import DamageCurve
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.layer_moments import LayerMoments

#: Numbers of removed units by layer.
Counts = Mapping[int, int]


class Stage:
    """The best choices around a model with some units removed.

    Each layer is chosen again, given what the other layers lack. Its damage is measured for the numbers of units that
    the wanted choices use and for their neighbours alone.

    Args:
        lm: The model.
        moments: Moments of the repaired model by layer.
        divergence: Measures damages.
        units: Units by layer.
        before: The repaired model, with the sums of all layers; without removed heads, the original.
        more: Largest number of further units.

    Attributes:
        units: Number of units that the model lacks before.
        curves: Damage by layer.
        more: Largest number of further units that can be chosen.
    """

    def __init__(
        self,
        lm: LoadedModel,
        moments: Mapping[int, LayerMoments],
        divergence: Divergence,
        units: Mapping[int, Sequence[tuple[Head, ...]]],
        before: Repaired,
        more: int,
    ) -> None:
        self._divergence, self._before = divergence, before.edits
        self.curves = {
            site.layer: DamageCurve(lm, site, moments[site.layer], units[site.layer], before, more)
            for site in lm.grid.sites
            if units[site.layer]
        }
        self.units = sum(curve.now for curve in self.curves.values())
        self._spare = self.units - sum(curve.least for curve in self.curves.values())
        # A stage adds a few units a layer, so many layers with few units may allow fewer than wanted.
        self.more = min(more, sum(len(curve.damages) - 1 for curve in self.curves.values()) - self._spare)

    def choose(self, further: int) -> Counts:
        """Return the best numbers of all removed units by layer, with so many further ones removed.

        Raises:
            PruningError: There are fewer units, or a damage is NaN or infinite.
        """
        while True:
            damages = {layer: curve.damages for layer, curve in self.curves.items()}
            added = allocate_units(damages, self._spare + further)[-1]
            counts = {layer: curve.least + added.get(layer, 0) for layer, curve in self.curves.items()}
            missing = {
                layer: curve.candidates(curve.unmeasured(counts[layer] + step for step in (-1, 0, 1)))
                for layer, curve in self.curves.items()
            }
            missing = {layer: subsets for layer, subsets in missing.items() if subsets}
            if not missing:
                return counts
            edits = {
                layer: [partial(self.curves[layer].edits, subset) for subset in subsets]
                for layer, subsets in missing.items()
            }
            for layer, found in self._divergence.of_layers(edits, self._before).items():
                self.curves[layer].add(missing[layer], found)

    def heads(self, counts: Counts) -> tuple[Head, ...]:
        """Return the best heads for measured numbers of units, sorted."""
        return tuple(sorted(head for layer, curve in self.curves.items() for head in curve.heads(counts[layer])))

    def near(self, counts: Counts) -> list[Counts]:
        """Return the choices that differ by one unit in two layers, least summed damage first."""
        found = []
        for fewer, more in permutations(self.curves, 2):
            other = {**counts, fewer: counts[fewer] - 1, more: counts[more] + 1}
            if all(self.curves[layer].is_measured(other[layer]) for layer in (fewer, more)):
                found.append(other)
        return sorted(found, key=self._damage)

    def _damage(self, counts: Counts) -> float:
        return sum(curve.damages[counts[layer] - curve.least] for layer, curve in self.curves.items())
