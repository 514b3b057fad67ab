"""One stage of the choice: damage curves of every layer, given the heads that are already removed.

Shapes: F columns of the output projection's input, E width of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from headscan.grid import AttentionSite, Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import Edits, read_weight
from headscan.pruning.selection.allocate_units import allocate_units
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.layer_moments import LayerMoments, layer_moments
from headscan.pruning.selection.subset_damage import Subset, best_subsets, repaired_weight

#: Subsets of each size that are measured.
_MEASURED = 2


@dataclass(frozen=True)
class LayerCurve:
    """The measured damage of removing units of one layer.

    Attributes:
        damage: Divergence in nats per token after the removal of 0, 1, 2, ... units.
        removed: The best heads found for each number.
    """

    damage: tuple[float, ...]
    removed: tuple[tuple[Head, ...], ...]


@dataclass(frozen=True)
class Stage:
    """Damage curves of every layer.

    Attributes:
        removed: Heads that are removed before.
        units: Number of units that they are.
        choices: By number of further units, the heads to remove, those before included.
    """

    removed: tuple[Head, ...]
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
    before: Edits,
    most: int,
    progress: Callable[[], None] = lambda: None,
) -> Stage:
    """Return the best further units for every number up to ``most``.

    Args:
        calibration: Texts of the moments.
        units: Units by layer.
        before: Removed heads and repaired weights.
    """
    gone = set(before.removed)
    left = {layer: [unit for unit in each if not gone.issuperset(unit)] for layer, each in units.items()}
    moments = layer_moments(lm, calibration, before)
    curves = {}
    for site in lm.grid.sites:
        if left[site.layer]:
            layer = _Layer(lm, site, moments[site.layer], left[site.layer], before)
            curves[site.layer] = layer.curve(divergence, most, progress)
    allocated = allocate_units({layer: curve.damage for layer, curve in curves.items()}, most)
    choices = tuple(
        tuple(sorted({*before.removed, *(h for layer, n in counts.items() for h in curves[layer].removed[n])}))
        for counts in allocated
    )
    return Stage(before.removed, sum(map(len, units.values())) - sum(map(len, left.values())), choices)


class _Layer:
    """One layer with the units that it still has."""

    def __init__(
        self,
        lm: LoadedModel,
        site: AttentionSite,
        moments: LayerMoments,
        units: Sequence[tuple[Head, ...]],
        before: Edits,
    ) -> None:
        self._site, self._units, self._before = site, units, before
        module = lm.module(site.output_projection)
        self._name = f"{site.output_projection}.weight"
        self._by_columns = isinstance(module, Conv1D)
        weight = before.weights.get(self._name, read_weight(module) if self._name not in before.weights else None)
        assert weight is not None
        self._weight = (weight.T if self._by_columns else weight).to(moments.gram.device)
        gone = set(before.removed)
        heads = [head for head in range(site.num_attention_heads) if (site.layer, head) not in gone]
        #: Columns of the heads that remain, in the whole input of the projection.
        self._columns = torch.cat([self._of_head(head) for head in heads]).to(moments.gram.device)
        self._place = {head: place for place, head in enumerate(heads)}
        self._moments = moments.of_columns(self._columns)

    def _of_head(self, head: int) -> Tensor:
        return torch.arange(self._site.value_dim) + head * self._site.value_dim

    def curve(self, divergence: Divergence, most: int, progress: Callable[[], None]) -> LayerCurve:
        """Return the measured curve for up to ``most`` units."""
        columns = [torch.cat([self._of_head(self._place[head]) for _, head in unit]).tolist() for unit in self._units]
        subsets = best_subsets(self._moments, self._weight[:, self._columns], columns, most=most)
        measured = [subset for each in subsets[1:] for subset in each[:_MEASURED]]
        below = self._before
        found = divergence.measure(
            self._site.layer, [below, *(self._edits(subset, columns) for subset in measured)], below, progress
        )
        damage: list[float] = [0.0]
        removed: list[tuple[Head, ...]] = [()]
        for count in range(1, len(subsets)):
            pairs = zip(found[1:], measured, strict=True)
            of_size = [(value, subset) for value, subset in pairs if len(subset.units) == count]
            value, best = min(of_size, key=lambda pair: pair[0])
            # Noise may show a gain, which no removal has.
            damage.append(max(value - found[0], 0.0))
            removed.append(tuple(head for unit in best.units for head in self._units[unit]))
        return LayerCurve(tuple(damage), tuple(removed))

    def _edits(self, subset: Subset, columns: Sequence[Sequence[int]]) -> Edits:
        """Return all edits with a subset removed and the output projection repaired from the moments."""
        gone = torch.tensor([c for unit in subset.units for c in columns[unit]], device=self._columns.device)
        weight = torch.zeros_like(self._weight, dtype=torch.float32)
        weight[:, self._columns] = repaired_weight(self._moments.gram, self._weight[:, self._columns], gone)
        heads = tuple(head for unit in subset.units for head in self._units[unit])
        edit = weight.T.contiguous() if self._by_columns else weight
        return Edits((*self._before.removed, *heads), {**self._before.weights, self._name: edit})
