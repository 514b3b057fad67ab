"""One stage of the choice: the best numbers of units by layer, given the heads that other layers lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Stage:
    """The best choices around a model with some units removed.

    Attributes:
        units: Number of units that this model lacks.
        curves: Damage by layer.
        choices: By number of further units, the numbers of all removed units by layer.
    """

    units: int
    curves: Mapping[int, DamageCurve]
    choices: tuple[Counts, ...]

    @property
    def most(self) -> int:
        """Largest number of removed units that this stage can choose."""
        return self.units + len(self.choices) - 1

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


def measure_stage(
    lm: LoadedModel,
    moments: Mapping[int, LayerMoments],
    divergence: Divergence,
    units: Mapping[int, Sequence[tuple[Head, ...]]],
    before: Repaired,
    more: int,
) -> Stage:
    """Return the best choices for up to ``more`` further units.

    Each layer is chosen again, given what the other layers lack. Its damage is measured for the numbers of units that
    the best choices use and for their neighbours, until no other number is used.

    Args:
        moments: Moments of the repaired model by layer.
        units: Units by layer.
        before: The repaired model, with the sums of all layers; without removed heads, the original.
    """
    curves = {
        site.layer: DamageCurve(lm, site, moments[site.layer], units[site.layer], before, more)
        for site in lm.grid.sites
        if units[site.layer]
    }
    removed = sum(curve.now for curve in curves.values())
    spare = removed - sum(curve.least for curve in curves.values())
    # A stage adds a few units a layer, so many layers with few units may allow fewer than wanted.
    most = min(spare + more, sum(len(curve.damages) - 1 for curve in curves.values()))
    while True:
        allocated = [
            {layer: curve.least + added.get(layer, 0) for layer, curve in curves.items()}
            for added in allocate_units({layer: curve.damages for layer, curve in curves.items()}, most)[spare:]
        ]
        missing = {
            layer: curve.candidates(curve.unmeasured(each[layer] + step for each in allocated for step in (-1, 0, 1)))
            for layer, curve in curves.items()
        }
        missing = {layer: candidates for layer, candidates in missing.items() if candidates}
        if not missing:
            break
        edits = {layer: [each.edits for each in candidates] for layer, candidates in missing.items()}
        for layer, damages in divergence.of_layers(edits, before.edits).items():
            curves[layer].add(missing[layer], damages)
    return Stage(removed, curves, tuple(allocated))
