"""The allocation against all allocations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headscan.errors import PruningError
from headscan.pruning.head_selection import allocate_units


@pytest.mark.parametrize("seed", range(10))
def test_allocations_are_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    curves = {
        layer: [0.0, *np.cumsum(random.random(size) ** 3)] for layer, size in zip((0, 2, 5), (3, 1, 4), strict=True)
    }
    found = allocate_units(curves, 7)
    assert len(found) == 8
    for budget, counts in enumerate(found):
        assert sum(counts.values()) == budget
        total = sum(curves[layer][count] for layer, count in counts.items())
        every = [
            sum(curves[layer][n] for layer, n in zip(curves, each, strict=True))
            for each in product(range(4), range(2), range(5))
            if sum(each) == budget
        ]
        assert total == pytest.approx(min(every))


def test_what_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(PruningError, match=r"^4 units to remove \(limit 3"):
        allocate_units({0: [0.0, 1.0], 1: [0.0, 1.0, 2.0]}, 4)
    with pytest.raises(PruningError, match="layer 1 has a damage of NaN"):
        allocate_units({0: [0.0, 1.0], 1: [0.0, float("nan")]}, 1)
