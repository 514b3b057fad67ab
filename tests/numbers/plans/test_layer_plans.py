"""Plans by layer: scores, budgets in whole layers, controls, and the forms of serving engines."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from headscan.plans import (
    BudgetRequest,
    DamageCalibration,
    DamageTexts,
    HeadPlan,
    KVBytes,
    PlanError,
    PlannedModel,
    WindowHeads,
    WindowShare,
    allocate,
    by_layer,
    cache_windows,
    damage_scores,
    load_plan,
    make_plan,
    plan_schema,
    planned_bytes,
    planned_model,
    random_plan,
    random_scores,
    sliding_layers,
)
from headscan.plans.keep_scores import KeepScores
from headscan.windows import Window
from tests.numbers.plan_fixtures import RECENT, SINK, masses, site, write_scan
from tests.numbers.plans.test_budgets import LARGE, SMALL, run_row

#: Full layers of 2, 3 and 2 KV heads; layer 2 is bounded by the model, and layer 4 has no attention.
GRID = [site(0, 4, 2), site(1, 6, 3), site(2, 4, 2, window=32), site(3, 4, 2, dim=16)]
MODEL, _ = planned_model(run_row(GRID) | {"num_layers": 5})
PLAIN, _ = planned_model(run_row([site(layer, 4, 2, max_tokens=512) for layer in range(4)]))


def scored(*values: float, model: PlannedModel = MODEL) -> KeepScores:
    """Keep-scores by head, as a method gives them."""
    scores = random_scores(model, 0)
    chosen = dict(zip(sorted(scores.scores), values, strict=True))
    return dataclasses.replace(scores, scores=chosen, order=tuple(sorted(chosen, key=lambda p: (chosen[p], p))))


#: The largest scores of the layers are 0.5, 0.5 and 0.4; layer 1 has the smaller sum of the first two.
SCORES = by_layer(scored(0.5, 0.4, 0.1, 0.5, 0.1, 0.3, 0.4))
LAYERS = (3, 1, 0)


def layers_of(plan: HeadPlan) -> set[int]:
    """Return the layers with windows; all their KV heads have one."""
    windowed = {layer for layer, _ in plan.window_heads}
    expected = [(h.layer, h.kv_head) for h in plan.heads if h.layer in windowed]
    assert plan.window_heads == expected
    return windowed


def plan_of(budget: BudgetRequest, sink: int = 0, recent: int = 12) -> HeadPlan:
    return allocate(SCORES, budget, sink=sink, recent=recent)


def test_a_layer_has_the_largest_score_of_its_heads_and_the_sum_breaks_ties() -> None:
    assert SCORES.granularity == "layer" and "the largest of the layer's KV heads" in SCORES.score
    assert list(dict.fromkeys(layer for layer, _ in SCORES.order)) == list(LAYERS)
    assert [SCORES.scores[layer, 0] for layer in LAYERS] == [0.4, 0.5, 0.5]


def test_layers_with_protected_heads_are_protected() -> None:
    scores = scored(0.5, 0.4, 0.1, 0.5, 0.1, 0.3, 0.4)
    partly = dataclasses.replace(
        scores,
        scores={place: score for place, score in scores.scores.items() if place != (1, 2)},
        order=tuple(place for place in scores.order if place != (1, 2)),
    )
    found = by_layer(partly)
    assert {layer for layer, _ in found.order} == {0, 3}
    assert found.notes[-1] == "2 KV heads are protected: others of their layers are"


@pytest.mark.parametrize(("wanted", "layers"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 3)])
def test_numbers_of_windows_are_rounded_to_whole_layers(wanted: int, layers: int) -> None:
    plan = plan_of(WindowHeads(wanted))
    assert layers_of(plan) == set(LAYERS[:layers]) and plan.granularity == "layer"
    assert plan.budget.window_heads == len(plan.window_heads)
    assert plan.summary()[0].startswith(f"{layers} of 4 layers with attention: ")


def test_shares_and_bytes_count_in_whole_layers() -> None:
    assert layers_of(plan_of(WindowShare(0.01))) == {3}
    assert layers_of(plan_of(WindowShare(0.7))) == {3, 1}
    sizes = [planned_bytes(plan_of(WindowHeads(count)), 100) for count in (0, 2, 5, 7)]
    saved = [2 * LARGE * 88, 3 * SMALL * 88, 2 * SMALL * 88]
    assert [before - after for before, after in pairwise(sizes)] == saved
    for layers, size in enumerate(sizes):
        assert layers_of(plan_of(KVBytes(size, 100))) == set(LAYERS[:layers])
        if layers:
            assert layers_of(plan_of(KVBytes(size + 1, 100))) == set(LAYERS[:layers])
            assert layers_of(plan_of(KVBytes(sizes[layers - 1] - 1, 100))) == set(LAYERS[:layers])
    with pytest.raises(PlanError, match=r"out of reach: .* \(limit .* windows on all 7 candidates\)"):
        plan_of(KVBytes(sizes[-1] - 1, 100))


def test_a_plan_by_layer_survives_its_file_and_mixed_layers_do_not(tmp_path: Path) -> None:
    plan = plan_of(WindowHeads(5))
    assert load_plan(plan.save(tmp_path / "p.json")) == plan
    jsonschema.Draft202012Validator(plan_schema()).validate(json.loads(plan.to_json()))
    full = dataclasses.replace(plan.heads[2], window=None)
    heads = (*plan.heads[:2], full, *plan.heads[3:])
    budget = dataclasses.replace(plan.budget, window_heads=4, window_share=4 / 9)
    with pytest.raises(PlanError, match="the KV heads of layer 1 keep different tokens"):
        dataclasses.replace(plan, heads=heads, budget=budget)
    assert dataclasses.replace(plan, heads=heads, budget=budget, granularity="kv_head").granularity == "kv_head"
    with pytest.raises(PlanError, match=r"drops no KV heads: 1 in `dropped`"):
        allocate(SCORES, WindowHeads(2), dropped={(0, 0): "verdict"})
    with pytest.raises(PlanError, match="KV heads of layer 0 have several scores or places"):
        dataclasses.replace(scored(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6), granularity="layer")


def test_random_plans_by_layer_window_whole_layers_of_the_same_bytes() -> None:
    scores = by_layer(scored(*np.linspace(0, 1, 8), model=PLAIN))
    plan = allocate(scores, WindowHeads(4), sink=0, recent=12)
    found = set()
    for seed in range(20):
        control = random_plan(plan, seed)
        assert control.granularity == "layer" and planned_bytes(control, 100) == planned_bytes(plan, 100)
        found.add(tuple(sorted(layers_of(control))))
    assert {len(layers) for layers in found} == {2} and len(found) == 6
    # Layers of other sizes exchange nothing.
    assert all(layers_of(random_plan(plan_of(WindowHeads(2)), seed)) == {3} for seed in range(5))


def test_methods_of_a_store_score_layers(tmp_path: Path) -> None:
    need = np.array([[0.9, 0.0, 0.0, 0.0], [0.3, 0.4, 0.31, 0.3]])
    store, _ = write_scan(tmp_path / "s.duckdb", [site(0, 4, 2), site(1, 4, 2)], masses(need, [64, 200]), [64, 200])
    plan = make_plan(store, None, window_share=0.5, sink=SINK, recent=RECENT, granularity="layer")
    assert plan.method == "distant_mass" and layers_of(plan) == {1}
    drawn = {
        frozenset(layers_of(make_plan(store, None, method="random", window_share=0.5, seed=seed, granularity="layer")))
        for seed in range(8)
    }
    assert drawn == {frozenset({0}), frozenset({1})}
    scores = random_scores(MODEL, 0, granularity="layer")
    assert len(set(scores.scores.values())) == 3 and scores.granularity == "layer"


CALIBRATION = DamageCalibration((DamageTexts("text", "t", "h", 1, 9, ()),), 0, 12, "float32", None, None, 0)


def test_damages_of_layers_count_once() -> None:
    """Layer 1 has more KV heads than the others, which would count its damage more often."""
    text, recall = {(0, 0): 0.2, (1, 0): 0.3, (3, 0): 0.5}, {(0, 0): 3.0, (1, 0): 1.0, (3, 0): 0.0}
    scores = damage_scores(MODEL, text, recall, calibration=CALIBRATION, granularity="layer")
    shares = {0: 0.2 + 0.75, 1: 0.3 + 0.25, 3: 0.5}
    assert [scores.scores[layer, 1] for layer in shares] == pytest.approx([each / 0.95 for each in shares.values()])
    assert list(dict.fromkeys(layer for layer, _ in scores.order)) == [3, 1, 0]
    damage = scores.damages[1, 2]
    assert (damage.text, damage.recall) == (0.3, 1.0)
    chosen = [(0, 0)]
    moved = damage_scores(MODEL, text, recall, calibration=CALIBRATION, granularity="layer", chosen=chosen)
    assert layers_of(allocate(moved, WindowHeads(2), sink=0, recent=12)) == {0}


def windowed(*heads: tuple[int, int], sink: int = 0, **options: object) -> HeadPlan:
    """Return a plan by head with windows on these heads of the plain model."""
    places = [(layer, kv_head) for layer in range(4) for kv_head in range(2)]
    order = (*heads, *(place for place in places if place not in heads))
    scores = random_scores(PLAIN, 0)
    scores = dataclasses.replace(scores, scores={place: at / 8 for at, place in enumerate(order)}, order=order)
    return allocate(scores, WindowHeads(len(heads)), sink=sink, recent=12, **options)  # type: ignore[arg-type]


def test_whole_layers_become_layer_types_and_windows_of_tensorrt() -> None:
    plan = windowed((0, 0), (0, 1), (3, 0), (3, 1))
    found = sliding_layers(plan)
    assert found["layer_types"] == ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert found["sliding_window"] == 12
    assert cache_windows(plan) == {"max_attention_window": [12, 512, 512, 12]}
    with_sinks = cache_windows(windowed((0, 0), (0, 1), sink=4))
    assert with_sinks == {"max_attention_window": [16, 512, 512, 512], "sink_token_length": 4}
    two = windowed((0, 0), (0, 1), (3, 0), (3, 1), windows={(0, 0): Window(0, 60), (0, 1): Window(0, 60)})
    assert cache_windows(two)["max_attention_window"] == [60, 512, 512, 12]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (windowed((1, 0), (2, 0), (2, 1)), r"layer 1 has windows on 1 of 2 KV heads .* Make the plan by layer"),
        (windowed((0, 0), (0, 1), windows={(0, 1): Window(0, 60)}), r"KV heads of layer 0 have 2 windows .* by layer"),
        (windowed((0, 0), (0, 1), dropped={(2, 1): "verdict"}), r"layer 2 drops 1 of 2 KV heads .* Prune the model"),
        (windowed(), "the plan has no windows"),
    ],
)
def test_plans_that_no_engine_holds_are_refused(plan: HeadPlan, words: str) -> None:
    for form in (sliding_layers, cache_windows):
        with pytest.raises(PlanError, match=words) as caught:
            form(plan)
        assert "\n" not in str(caught.value)


def test_layer_types_have_one_width_without_sinks_and_models_without_windows() -> None:
    layers = [(0, 0), (0, 1), (3, 0), (3, 1)]
    with pytest.raises(
        PlanError, match=r"windows keep 4 first tokens \(limit 0 with layer types\). Make the plan with"
    ):
        sliding_layers(windowed(*layers, sink=4))
    two = windowed(*layers, windows={(0, 0): Window(0, 60), (0, 1): Window(0, 60)})
    with pytest.raises(PlanError, match=r"windows of 2 widths: 12, 60 \(limit 1"):
        sliding_layers(two)
    with pytest.raises(PlanError, match="layer 2 of tiny has a sliding window of its own"):
        sliding_layers(plan_of(WindowHeads(2)))


def test_tensorrt_needs_one_number_of_sinks_attention_everywhere_and_positions() -> None:
    mixed = windowed((0, 0), (0, 1), (3, 0), (3, 1), windows={(0, 0): Window(4, 8), (0, 1): Window(4, 8)})
    with pytest.raises(PlanError, match=r"different numbers of first tokens: 0, 4"):
        cache_windows(mixed)
    with pytest.raises(PlanError, match="layer 4 of tiny has no attention"):
        cache_windows(plan_of(WindowHeads(2)))
    unlimited = dataclasses.replace(PLAIN, max_tokens=None)
    with pytest.raises(PlanError, match="no known number of positions"):
        cache_windows(dataclasses.replace(windowed((0, 0), (0, 1)), model=unlimited))
