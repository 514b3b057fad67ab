"""Choices near the best one, repaired and compared: damages of layers do not quite add up."""

from __future__ import annotations

from collections.abc import Callable

from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.repair.repair import RepairConfig, repaired_model
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.stage import Counts, Stage


class RepairedDamage:
    """The divergence of a model without some heads, repaired on other texts than it is measured on.

    Args:
        lm: The model.
        repairing: Texts of the repair.
        judging: Texts of the divergence.
    """

    def __init__(self, lm: LoadedModel, repairing: Calibration, judging: Calibration) -> None:
        self._lm, self._repairing = lm, repairing
        self._divergence = Divergence(lm, judging)

    def __call__(self, removed: tuple[Head, ...]) -> float:
        """Return the divergence in nats per token."""
        return self._divergence.of(
            repaired_model(self._lm, self._repairing, removed, RepairConfig(("o", "down"))).edits
        )


def best_nearby(
    stage: Stage, counts: Counts, damage: Callable[[tuple[Head, ...]], float], tries: int
) -> tuple[Head, ...]:
    """Return the heads of the best choice that moving single units between layers finds.

    Args:
        counts: Where the search begins.
        damage: Damage of removing heads.
        tries: Largest number of choices compared with it.
    """
    best = stage.heads(counts)
    least, seen = damage(best), {best}
    while True:
        for other in stage.near(counts):
            heads = stage.heads(other)
            if heads in seen:
                continue
            if len(seen) > tries:
                return best
            seen.add(heads)
            if (found := damage(heads)) < least:
                best, least, counts = heads, found, other
                break
        else:
            return best
