"""The best number of removed units in each layer, under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from headscan.errors import PruningError


def allocate_units(curves: Mapping[int, Sequence[float]], most: int) -> list[dict[int, int]]:
    """Return, for each budget, the numbers of removed units by layer with the least summed damage.

    Dynamic programming over layers: exact for damages that add up.

    Args:
        curves: By layer, the damage of removing 0, 1, 2, ... units.
        most: Largest budget in units.

    Returns:
        By number of removed units from 0 to ``most``, the number in each layer.

    Raises:
        PruningError: The layers have fewer units, or a damage is NaN or infinite.
    """
    units = sum(len(curve) - 1 for curve in curves.values())
    if most > units:
        raise PruningError(f"{most} units to remove (limit {units}, all of the curves). Remove fewer")
    if wrong := [layer for layer, curve in curves.items() if not all(isfinite(damage) for damage in curve)]:
        raise PruningError(f"layer {wrong[0]} has a damage of NaN or infinity. Load the model in another `dtype`")
    infinite = float("inf")
    best = [0.0] + [infinite] * most
    choice: list[dict[int, int]] = [{} for _ in range(most + 1)]
    for layer, curve in curves.items():
        extended = [infinite] * (most + 1)
        chosen: list[dict[int, int]] = [{} for _ in range(most + 1)]
        for total in range(most + 1):
            for count in range(min(total, len(curve) - 1) + 1):
                damage = best[total - count] + curve[count]
                if damage < extended[total]:
                    extended[total] = damage
                    chosen[total] = choice[total - count] | ({layer: count} if count else {})
        best, choice = extended, chosen
    return choice
