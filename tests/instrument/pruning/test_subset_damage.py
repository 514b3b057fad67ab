"""Damages of subsets against the definition, and the search against all subsets."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from headscan.pruning.damage_curve import LayerMoments, best_subsets, repaired_weight
from headscan.pruning.value_repair import ridge

UNITS, WIDTH, OUT = 6, 3, 7


def problem(seed: int) -> tuple[LayerMoments, Tensor, list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, UNITS * WIDTH, generator=generator) @ torch.randn(
        UNITS * WIDTH, UNITS * WIDTH, generator=generator
    )
    gradients = torch.randn(200, OUT, generator=generator) * torch.rand(OUT, generator=generator)
    moments = LayerMoments(inputs.T @ inputs / 200, gradients.T @ gradients / 200)
    weight = torch.randn(OUT, UNITS * WIDTH, generator=generator)
    return moments, weight, [list(range(u * WIDTH, u * WIDTH + WIDTH)) for u in range(UNITS)]


def plain_damage(moments: LayerMoments, weight: Tensor, gone: list[int]) -> float:
    """The definition: the Fisher-weighted error of the removed part, predicted from the rest by least squares."""
    gram, wide = ridge(moments.gram), weight.double()
    kept = [c for c in range(len(gram)) if c not in gone]
    rest = gram[gone][:, kept] @ torch.linalg.inv(gram[kept][:, kept]) @ gram[kept][:, gone] if kept else 0.0
    error = wide[:, gone] @ (gram[gone][:, gone] - rest) @ wide[:, gone].T
    return float(0.5 * (moments.fisher.double() * error).sum())


@pytest.mark.parametrize("seed", range(5))
def test_damages_equal_the_definition_and_the_search_finds_nearly_the_best(seed: int) -> None:
    moments, weight, units = problem(seed)
    found = best_subsets(moments, weight, units, most=UNITS, width=3)
    assert [len(each[0].units) for each in found] == list(range(UNITS + 1))
    exact = 0
    for count, subsets in enumerate(found[1:], 1):
        assert [s.damage for s in subsets] == sorted(s.damage for s in subsets)
        for subset in subsets:
            gone = [c for unit in subset.units for c in units[unit]]
            assert subset.damage == pytest.approx(plain_damage(moments, weight, gone), rel=1e-6)
        every = min(
            plain_damage(moments, weight, [c for u in each for c in units[u]])
            for each in combinations(range(UNITS), count)
        )
        assert subsets[0].damage <= 1.1 * every
        exact += subsets[0].damage <= every * (1 + 1e-9)
    assert exact >= UNITS - 2


def test_the_repaired_weight_minimises_the_error() -> None:
    moments, weight, units = problem(9)
    gone = torch.tensor([c for unit in (1, 4) for c in units[unit]])
    found = repaired_weight(moments.gram, weight, gone).double()
    assert not found[:, gone].any()
    gram = ridge(moments.gram)

    def error(new: Tensor) -> float:
        change = weight.double() - new
        return float((change @ gram * change).sum())

    kept = torch.ones(found.shape, dtype=torch.bool)
    kept[:, gone] = False
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        step = 1e-3 * torch.randn(found.shape, generator=generator, dtype=torch.float64)
        assert error(found + step * kept) > error(found)
