"""One stage of the choice: the best numbers of units by layer, given the heads that other layers lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.repair.repair import Repaired
from headscan.pruning.selection.allocate_units import allocate_units
from headscan.pruning.selection.damage_curve import DamageCurve
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.layer_moments import layer_moments


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


def measure_stage(
    lm: LoadedModel,
    calibration: Calibration,
    divergence: Divergence,
    units: Mapping[int, Sequence[tuple[Head, ...]]],
    before: Repaired,
    more: int,
) -> Stage:
    """Return the best choices for up to ``more`` further units.

    Each layer is chosen again, given what the other layers lack. Its damage is measured for the numbers of units that
    the best choices use and for their neighbours, until no other number is used.

    Args:
        calibration: Texts of the moments.
        units: Units by layer.
        before: The repaired model, with the sums of all layers; without removed heads, the original.
    """
    moments = layer_moments(lm, calibration, before.edits)
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
            layer: curve.unmeasured(each[layer] + step for each in allocated for step in (-1, 0, 1))
            for layer, curve in curves.items()
        }
        if not any(missing.values()):
            break
        for layer, counts in missing.items():
            if counts:
                curves[layer].measure(divergence, counts)
    choices = tuple(
        tuple(sorted(head for layer, curve in curves.items() for head in curve.heads(counts[layer])))
        for counts in allocated
    )
    return Stage(removed, choices)
