"""Choices of heads, and the allocation to layers against all allocations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headscan.catalog import SET_METHODS
from headscan.errors import PruningError
from headscan.grid import Head, Unit, find_units
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.damage_curve import layer_moments
from headscan.pruning.edited_model import NO_EDITS, Divergence, Edits
from headscan.pruning.head_selection import (
    CHOICES,
    Counts,
    HeadSelection,
    RepairedDamage,
    SelectionStage,
    allocate_ranked,
    allocate_units,
    best_nearby,
)
from headscan.pruning.repair import RepairConfig, Repaired, repair
from headscan.pruning.selection_settings import SelectionConfig
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded, slow


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return make_loaded("llama")


@pytest.mark.parametrize("unit", get_args(Unit))
def test_units_are_removed_whole(lm: LoadedModel, unit: Unit) -> None:
    selection = HeadSelection(lm, random_texts(lm), unit=unit)
    sizes = {"head": 1, "group": 3, "layer": 6}
    units = [set(each) for of_layer in find_units(lm.grid, unit).values() for each in of_layer]
    for method in ("damage", "random"):
        for count in range(min(4, len(units))):
            chosen = set(selection.choose(method=method, count=count))
            assert len(chosen) == count * sizes[unit]
            assert sum(each <= chosen for each in units) == count


def test_an_unknown_unit_is_refused(lm: LoadedModel) -> None:
    with pytest.raises(PruningError, match=r"`unit='heads'` is unknown. Choose head or group or layer"):
        find_units(lm.grid, "heads")  # type: ignore[arg-type]


@pytest.mark.parametrize("tries", [0, 1, *slow(6)])
def test_layers_keep_allowed_numbers_at_every_size(tries: int) -> None:
    """Also where further stages move layers on a repaired model; every size is missed by less than one step."""
    lm = make_loaded("llama-mha")
    allowed = {0: (0, 3, 4, 5), 1: (0, 3, 4, 5, 6), 2: (0, 3, 4, 5, 6)}
    config = SelectionConfig(first_share=0.3, next_share=0.1, tries=tries, judged_tokens=300)
    selection = HeadSelection(lm, random_texts(lm), allowed=allowed, config=config)
    counts = {0: range(18), 1: (5, 9), 6: range(2, 18, 3)}[tries]
    for method in ("damage", "random"):
        reached = []
        for count in counts:
            chosen = selection.choose(method=method, count=count)
            lost = Counter(layer for layer, _ in chosen)
            assert all(number in allowed[layer] for layer, number in lost.items())
            reached.append(len(chosen))
        assert all(count - 3 < found <= count for count, found in zip(counts, reached, strict=True))
        assert reached[-1] == counts[-1] and reached == sorted(reached)
    dropped = {layer for layer, _ in selection.choose(method="layer-drop", count=2)}
    assert dropped == {1, 2}


def test_duplicated_and_silent_heads_go_first() -> None:
    lm = make_loaded("llama-mha")
    projection = lm.module(lm.grid.sites[1].output_projection)
    width = lm.grid.sites[1].value_dim
    with torch.no_grad():
        projection.weight[:, 2 * width : 3 * width] = 0.0  # head (1, 2) reaches nothing
        attention = lm.module(lm.grid.sites[0].path)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = attention.get_submodule(name).weight
            weight[4 * width : 5 * width] = weight[:width]  # heads (0, 0) and (0, 4) are equal
    chosen = HeadSelection(lm, random_texts(lm)).choose(count=2)
    assert (1, 2) in chosen
    assert {(0, 0), (0, 4)} & set(chosen)


@pytest.mark.slow
def test_the_choice_is_better_than_chance(lm: LoadedModel) -> None:
    texts = random_texts(lm, sequences=30)
    selection = HeadSelection(lm, texts)
    divergence = Divergence(lm, random_texts(lm, seed=7))

    def damage(method: str, seed: int = 0) -> float:
        removed = selection.choose(method=method, count=7, seed=seed)
        weights = repair(lm, texts, removed, RepairConfig(("o",)))
        return divergence.of(Edits(removed, weights))

    chance = sorted(damage("random", seed) for seed in range(5))
    assert damage("damage") < chance[1]


def test_wrong_choices_are_refused(lm: LoadedModel) -> None:
    selection = HeadSelection(lm, random_texts(lm))
    with pytest.raises(PruningError, match=r"^18 units to remove \(limit 17 of 18\)"):
        selection.choose(count=18)
    with pytest.raises(PruningError, match="unknown method 'best'"):
        selection.choose(method="best", count=1)
    layers = {layer for layer, _ in selection.choose(method="layer-drop", count=1)}
    assert len(layers) == 1


def test_every_method_of_sets_has_a_choice() -> None:
    assert {*CHOICES} == {*SET_METHODS}


def test_no_choice_nearby_is_better(lm: LoadedModel) -> None:
    texts = random_texts(lm, sequences=15)
    config = SelectionConfig(judged_tokens=300)
    plain, searched = (
        HeadSelection(lm, texts, config=replace(config, tries=tries)).choose(count=3) for tries in (0, 1000)
    )
    repairing, judging = texts.split(300)
    damage = RepairedDamage(lm, repairing, judging)
    stage = _first_stage(lm, texts, 3)
    stage.choose(3)
    assert damage(searched) <= damage(plain)
    counts = next(each for each in _all_counts(stage, 3) if stage.heads(each) == searched)
    assert all(damage(stage.heads(other)) >= damage(searched) for other in stage.near(counts))


def _first_stage(lm: LoadedModel, texts: Calibration, most: int) -> SelectionStage:
    """Return the stage of at most so many heads."""
    moments, divergence = layer_moments(lm, texts), Divergence(lm, texts)
    return SelectionStage(lm, moments, divergence, find_units(lm.grid, "head"), Repaired(NO_EDITS, {}), most)


def _all_counts(stage: SelectionStage, total: int) -> list[Counts]:
    measured = [[n for n in range(total + 1) if curve.is_measured(n)] for curve in stage.curves.values()]
    return [dict(zip(stage.curves, each, strict=True)) for each in product(*measured) if sum(each) == total]


def test_tries_are_limited(lm: LoadedModel) -> None:
    stage = _first_stage(lm, random_texts(lm), 5)
    asked: list[tuple[Head, ...]] = []

    def damage(heads: tuple[Head, ...]) -> float:
        asked.append(heads)
        return -float(len(asked))  # each is better than the last

    best = best_nearby(stage, stage.choose(5), damage, 3)
    assert len(asked) == len(set(asked)) == 4
    assert asked[0] == stage.heads(stage.choose(5))
    assert best == asked[-1]


@pytest.mark.parametrize(("sequences", "tokens", "others"), [(6, 100, 3), (6, 81, 3), (6, 80, 4), (2, 1000, 1)])
def test_texts_that_judge_do_not_repair(sequences: int, tokens: int, others: int) -> None:
    ids = torch.arange(sequences * 40).view(sequences, 40)
    texts = Calibration(ids, torch.full((sequences,), 40))
    repairing, judging = texts.split(tokens)
    assert len(repairing.ids) == others
    assert torch.equal(torch.cat([repairing.ids, judging.ids]), ids)


@pytest.mark.parametrize(("tokens", "judged"), [(5, 5), (1, 2), (1000, 38)])
def test_a_single_text_is_cut_in_two(tokens: int, judged: int) -> None:
    ids = torch.arange(50)[None]
    repairing, judging = Calibration(ids, torch.tensor([40])).split(tokens)
    assert judging.tokens == judged
    assert torch.equal(torch.cat([repairing.ids, judging.ids], 1), ids[:, :40])


@pytest.mark.parametrize(
    "wrong", [{"tries": -1}, {"first_share": 2.0}, {"next_share": 0.0}, {"curve_tokens": 0}, {"judged_tokens": 0}]
)
def test_an_effort_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PruningError, match=rf"`{next(iter(wrong))}="):
        SelectionConfig(**wrong)


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
