"""The allocation against all allocations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headscan.errors import PruningError
from headscan.grid import Head
from headscan.pruning.head_selection import allocate_ranked, allocate_units


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


@pytest.mark.parametrize("seed", range(10))
def test_allowed_numbers_are_the_best_of_all_and_fall_short_by_less_than_a_step(seed: int) -> None:
    random = np.random.default_rng(seed)
    curves = {layer: [0.0, *np.cumsum(random.random(8) ** 3)] for layer in range(3)}
    allowed = {0: (0, 4, 6, 7), 1: (0, 4, 6, 7, 8), 2: (0, 4, 6, 7, 8)}
    every = list(product(*allowed.values()))
    for budget, counts in enumerate(allocate_units(curves, 23, allowed)):
        assert all(count in allowed[layer] for layer, count in counts.items())
        reached = max(sum(each) for each in every if sum(each) <= budget)
        assert sum(counts.values()) == reached > budget - 4
        total = sum(curves[layer][count] for layer, count in counts.items())
        damages = [sum(curves[layer][n] for layer, n in enumerate(each)) for each in every if sum(each) == reached]
        assert total == pytest.approx(min(damages))


def test_ranked_units_go_in_allowed_numbers() -> None:
    units = {layer: [(Head(layer, head),) for head in range(4)] for layer in range(2)}
    of_layers = {0: [7, 3, 0, 8], 1: [2, 4, 5, 1]}
    ranks = {(Head(layer, head),): rank for layer, row in of_layers.items() for head, rank in enumerate(row)}
    steps = {0: (0, 2, 3), 1: (0, 2, 3, 4)}
    assert allocate_ranked(units, ranks, 1, steps) == ()
    assert allocate_ranked(units, {**ranks, (Head(0, 1),): 2.5}, 2, steps) == ((0, 1), (0, 2))
    assert allocate_ranked(units, ranks, 3, steps) == ((1, 0), (1, 1), (1, 3))
    assert allocate_ranked(units, ranks, 7, steps) == ((0, 0), (0, 1), (0, 2), *((1, head) for head in range(4)))
    assert allocate_ranked(units, ranks, 3, {}) == ((0, 2), (1, 0), (1, 3))
