"""Methods of plans, and plans of models with groups of different sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headscan.plans import (
    DamageCalibration,
    DamageTexts,
    KeepScores,
    PlanError,
    WindowHeads,
    allocate,
    damage_scores,
    load_plan,
    make_plan,
    planned_model,
    retrieval_scores,
)
from headscan.plans.scan_scores import distant_mass_scores
from headscan.store.store import Store
from tests.numbers.plan_fixtures import everything, masses, site, write_scan
from tests.numbers.plans.test_budgets import run_row
from tests.stores import write_behaviours

GRID = [site(0, 4, 2), site(1, 4, 2)]


def write_probe(path: Path, grid: list[dict] = GRID, **behaviours: list[list[float]]) -> Store:
    """A finished probe with (layers, heads) values by behaviour."""
    store = Store(path / "p.duckdb")
    values = {name: np.array(of_heads) for name, of_heads in behaviours.items()}
    write_behaviours(store, values, grid=grid, dtype="bfloat16", model_config_hash="c0ffee")
    return store


def test_a_kv_head_is_kept_if_any_of_its_query_heads_retrieves(tmp_path: Path) -> None:
    store = write_probe(
        tmp_path,
        retrieval_score=[[0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.25, 0.125]],
        induction_score=[[0.0, 0.0, 0.0, 0.5], [0.25, 0.0, 0.0, 0.0]],
    )
    scores = retrieval_scores(store, None)
    assert dict(scores.scores) == {(0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 0.25}
    assert scores.order == ((1, 0), (0, 1), (1, 1), (0, 0)), "induction breaks the tie"
    plan = make_plan(store, None, method="retrieval_score", window_share=0.5)
    assert plan.window_heads == [(0, 1), (1, 0)] and plan.method == "retrieval_score"
    assert plan.calibration.kind == "probe"
    assert plan.calibration.behaviours == ("retrieval_score", "induction_score")
    assert plan.query_heads[0].retrieval_score == 0.5
    assert load_plan(plan.save(tmp_path / "plan.json")) == plan


def test_a_probe_without_needles_uses_induction(tmp_path: Path) -> None:
    store = write_probe(tmp_path, induction_score=[[0.0, 0.1, 0.0, 0.5], [0.25, 0.0, 0.0, float("nan")]])
    scores = retrieval_scores(store, None)
    assert dict(scores.scores) == pytest.approx({(0, 0): 0.1, (0, 1): 0.5, (1, 0): 0.25})
    assert any("induction_score takes its place" in note for note in scores.notes)
    assert any("1 KV heads are protected: not all" in note for note in scores.notes)


def test_probes_that_order_nothing_are_refused(tmp_path: Path) -> None:
    store = write_probe(tmp_path, previous_token_score=[[0.5] * 4] * 2)
    with pytest.raises(PlanError, match=r"has neither retrieval_score nor induction_score.*with all `behaviours`"):
        retrieval_scores(store, None)
    (tmp_path / "b").mkdir()
    store = write_probe(tmp_path / "b", retrieval_score=[[0.0] * 4] * 2)
    with pytest.raises(PlanError, match="of all heads of tiny are 0"):
        retrieval_scores(store, None)


def test_methods_and_inputs_go_together(tmp_path: Path) -> None:
    store, run_id = write_scan(tmp_path / "s.duckdb", GRID, masses(np.full((2, 4), 0.5), [64]), [64])
    with pytest.raises(PlanError, match="no budget is given"):
        make_plan(store, run_id)
    with pytest.raises(PlanError, match="two budgets"):
        make_plan(store, run_id, window_share=0.5, budget=WindowHeads(1))
    with pytest.raises(PlanError, match="method imported needs a pattern"):
        make_plan(store, run_id, method="imported", window_share=0.5)
    with pytest.raises(PlanError, match="method measured does not follow from a store"):
        make_plan(store, run_id, method="measured", window_share=0.5)
    one, two = (make_plan(store, run_id, method="random", window_share=0.5, seed=seed) for seed in (0, 1))
    assert one.window_heads != two.window_heads and one.calibration.kind == "random"


MODEL, _ = planned_model(run_row([site(0, 4, 2), site(1, 4, 2), site(2, 4, 2, window=32)]))
NAN = float("nan")
CALIBRATION = DamageCalibration(
    texts=(
        DamageTexts("text", "novels", "c0de", 48, 48 * 512, (1.0, 2 / 3, 1 / 3, 0.0)),
        DamageTexts("copying", "random tokens", "f00d", 16, 16 * 512, (1.0,)),
    ),
    sink=4,
    recent=60,
    dtype="float32",
    attention_path="interface",
    code_version="1.0",
    seed=0,
)


def measured(text: list, recall: list | None, /, **confirmed: list) -> KeepScores:
    """Return the scores from tables (layers, KV heads)."""
    more = {name: dict(np.ndenumerate(values)) for name, values in confirmed.items()}
    recalls = None if recall is None else dict(np.ndenumerate(recall))
    return damage_scores(MODEL, dict(np.ndenumerate(text)), recalls, calibration=CALIBRATION, confirmed=more)


def test_the_score_adds_the_shares_of_the_damage_on_text_and_recall(tmp_path: Path) -> None:
    text = [[0.3, -0.2], [0.1, 0.0], [NAN, NAN]]
    recall = [[0.0, -0.1], [1.5, 0.5], [NAN, NAN]]
    scores = measured(text, recall)
    # Shares: 0.75 + 0, 0 + 0, 0.25 + 0.75, 0 + 0.25; the largest is 1.
    assert dict(scores.scores) == pytest.approx({(0, 0): 0.75, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 0.25})
    assert scores.order == ((0, 1), (1, 1), (0, 0), (1, 0))
    plan = allocate(scores, WindowHeads(2), sink=4, recent=60)
    damage = plan.heads[2].damage
    assert damage is not None and (damage.text, damage.recall, damage.confirmed_text) == (0.1, 1.5, None)
    assert damage.recent == CALIBRATION.recent
    assert plan.heads[4].head_class == "protected" and plan.heads[4].damage is None
    assert plan.calibration == CALIBRATION and plan.method == "measured"
    assert load_plan(plan.save(tmp_path / "plan.json")) == plan
    with pytest.raises(PlanError, match=r"recent of the window is too narrow: 59 \(limit 60"):
        allocate(scores, WindowHeads(2), sink=4, recent=59)


def test_raw_damages_break_ties() -> None:
    scores = measured([[-0.1, -0.3], [-0.2, 0.5], [NAN, NAN]], [[0.0, 0.0], [0.0, 1.0], [NAN, NAN]])
    assert scores.order == ((0, 1), (1, 0), (0, 0), (1, 1))
    gains = measured([[-0.1, -0.3], [-0.2, -0.4], [NAN, NAN]], None)
    assert gains.order == ((1, 1), (0, 1), (1, 0), (0, 0)) and set(gains.scores.values()) == {0.0}
    assert "recall" not in gains.score


def test_heads_with_nan_are_protected() -> None:
    scores = measured([[0.1, NAN], [0.2, 0.3], [NAN, NAN]], None)
    assert scores.candidates == {(0, 0), (1, 0), (1, 1)}
    assert "1 KV heads are protected: their damage was not measured" in scores.notes


def test_confirmed_heads_exchange_their_ranks() -> None:
    text = [[0.1, 0.2], [0.3, 0.4], [NAN, NAN]]
    scores = measured(text, None, text=[[NAN, 0.9], [0.5, NAN], [NAN, NAN]])
    assert scores.order == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert scores.scores[1, 0] == pytest.approx(0.5) and scores.scores[0, 1] == pytest.approx(0.75)
    damage = scores.damages[1, 0]
    assert (damage.text, damage.confirmed_text) == (0.3, 0.5)


def test_wrong_arrays_are_refused() -> None:
    good = [[0.1, 0.2], [0.3, 0.4], [NAN, NAN]]
    for text, recall, more, message in (
        ([[0.1, 0.2, 0.3]], None, {}, "layer 0, KV head 2 is 0.3, but that head has no unbounded"),
        ([[0.1, 0.2], [0.3, 0.4], [0.1, NAN]], None, {}, "layer 2, KV head 0 is 0.1, but that head has no unbounded"),
        ([[0.1, np.inf], [0.3, 0.4], [NAN, NAN]], None, {}, "layer 0, KV head 1 is inf"),
        (good, [[0.1, NAN], [0.3, 0.4], [NAN, NAN]], {}, "layer 0, KV head 1 has a damage on text or on recall"),
        ([[NAN, NAN]] * 3, None, {}, "no KV head of tiny can get a window.*damage was not measured"),
        (
            [[NAN, 0.2], [0.3, 0.4], [NAN, NAN]],
            None,
            {"text": good},
            "confirmed text has layer 0, KV head 0, which is no candidate",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            measured(text, recall, **more)
    with pytest.raises(PlanError, match=r"DamageCalibration.texts is a tuple of 0 \(limit at least 1 item"):
        DamageCalibration((), 4, 60, "float32", None, None, None)


UNEVEN = [site(0, 4, 2), site(1, 4, 2, kv_index=[0, 1, 1, 1])]


def test_methods_that_map_query_heads_are_refused(tmp_path: Path) -> None:
    store, run_id = write_scan(tmp_path / "s.duckdb", UNEVEN, everything(2, 4, [64, 64]), [64, 64])
    with pytest.raises(PlanError, match=r"layer 1 of tiny.*measured or random"):
        distant_mass_scores(store, run_id)
    model, recorded = planned_model(store.resolve_run(run_id, "scan"), equal_groups=False)
    assert recorded and [layer.num_key_value_heads for layer in model.layers] == [2, 2]
