"""The damage of one layer by its number of removed units, measured only where a choice needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers.pytorch_utils import Conv1D

from headscan.grid import AttentionSite, Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.edited_model import Edits, read_weight
from headscan.pruning.repair.repair import Repaired
from headscan.pruning.selection.layer_moments import LayerMoments
from headscan.pruning.selection.subset_damage import Subset, best_subsets, repaired_weight

#: Subsets of each size that are measured.
_MEASURED = 2
#: By how many units a further stage may lower, and at least raise, the number of a layer.
_FEWER, _LEAST_MORE = 1, 3


class DamageCurve:
    """One layer, with the repaired model around it.

    Args:
        site: The attention of the layer.
        moments: Its moments in the repaired model.
        units: Its units.
        before: The repaired model; without removed heads, the original.
        more: Largest number of further units.

    Attributes:
        now: Number of units that the layer lacks in the repaired model.
        least: The smallest number that can be chosen; `damages` begins with it.
    """

    def __init__(
        self,
        lm: LoadedModel,
        site: AttentionSite,
        moments: LayerMoments,
        units: Sequence[tuple[Head, ...]],
        before: Repaired,
        more: int,
    ) -> None:
        self._site, self._units, self._before = site, units, before.edits
        module = lm.module(site.output_projection)
        self._name = f"{site.output_projection}.weight"
        self._by_columns = isinstance(module, Conv1D)
        old = read_weight(module)
        old = (old.T if self._by_columns else old).to(moments.gram.device)
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
        moments = LayerMoments(self._gram, moments.fisher)
        self._subsets = best_subsets(moments, self._weight, self._columns, most=most)[self.least :]
        self._best: dict[int, tuple[float, Subset]] = {}
        if not gone:
            self._best[0] = 0.0, self._subsets[0][0]  # the original itself

    @property
    def damages(self) -> tuple[float, ...]:
        """Divergence in nats per token with ``least``, ``least + 1``, ... units removed.

        Where nothing was measured: the estimate, scaled to the measured damage of the next smaller number.
        """
        found: list[float] = []
        scale = 1.0
        for count, subsets in enumerate(self._subsets, self.least):
            estimate = subsets[0].damage
            if count in self._best:
                measured = self._best[count][0]
                scale = measured / estimate if estimate > 0 else scale
                found.append(measured)
            else:
                found.append(max(scale * estimate, found[-1] if found else 0.0))
        return tuple(found)

    def is_measured(self, count: int) -> bool:
        """Return True if a number of units was measured."""
        return count in self._best

    def unmeasured(self, counts: Iterable[int]) -> list[int]:
        """Return the numbers that exist and were not measured."""
        there = range(self.least, self.least + len(self._subsets))
        return sorted(count for count in set(counts) if count in there and not self.is_measured(count))

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
        """Return the best heads for a measured number of units."""
        return self._heads(self._best[count][1])

    def _heads(self, subset: Subset) -> tuple[Head, ...]:
        return tuple(head for unit in subset.units for head in self._units[unit])

    def edits(self, subset: Subset) -> Edits:
        """Return all edits with a subset removed, and the output projection repaired from the moments."""
        gone = torch.tensor([c for unit in subset.units for c in self._columns[unit]], device=self._weight.device)
        weight = repaired_weight(self._gram, self._weight, gone.long())
        edit = weight.T.contiguous() if self._by_columns else weight
        return Edits((*self._elsewhere, *self._heads(subset)), {**self._before.weights, self._name: edit})
