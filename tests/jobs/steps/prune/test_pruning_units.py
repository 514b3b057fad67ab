"""Units of heads, budgets, and orders from outside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import headscan
from headscan.errors import PruningError
from headscan.grid import Head
from headscan.model_spec import ModelSpec
from headscan.ranking.head_roles import find_mask
from headscan.runs.head_orders import imported_heads
from headscan.runs.model_identity import identify
from headscan.steps.prune.model_costs import columns_to_solve
from headscan.steps.prune.pruning_units import (
    BudgetSearch,
    BytesBudget,
    LossBudget,
    ShareBudget,
    all_units,
    first_units,
    rounding_note,
    skipped_by,
)
from headscan.store.store import Store
from headscan.text_tables import percent
from tests.numbers.conftest import scan_record
from tests.small_models import make_loaded, make_model

NOTHING = BudgetSearch(lambda tokens: [], lambda count, tokens: 0, lambda count: 0.0)


@pytest.fixture(scope="module")
def grid() -> headscan.HeadGrid:
    from headscan.attention.discovery import discover

    return discover(make_model("llama"))


def test_units_hold_every_head_once_and_follow_an_order(grid: headscan.HeadGrid) -> None:
    every = sorted(grid.heads())
    for unit, count in (("head", len(every)), ("group", sum(s.num_key_value_heads for s in grid.sites)), ("layer", 3)):
        units = all_units(grid, unit)  # type: ignore[arg-type]
        assert len(units) == count
        assert sorted(head for heads in units for head in heads) == every
    site = grid.sites[0]
    group = site.num_attention_heads // site.num_key_value_heads
    assert all(len({head.head // group for head in heads}) == 1 for heads in all_units(grid, "group"))
    heads = all_units(grid, "head")
    order = [(2, 1), (0, 3), (1, 0)]
    assert first_units(heads, order, 2) == (Head(0, 3), Head(2, 1))
    groups = all_units(grid, "group")
    best = groups[3]
    assert first_units(groups, [*best, (0, 0)], 1) == best
    assert skipped_by(grid, [*all_units(grid, "layer")[1], Head(2, 0)]) == (1,)


def test_shares_are_rounded_to_whole_units(grid: headscan.HeadGrid) -> None:
    assert ShareBudget(0.4).count(48, NOTHING) == 19
    assert ShareBudget(0.01).count(48, NOTHING) == 1
    groups = all_units(grid, "group")
    total = len(list(grid.heads()))
    budget = ShareBudget(1.4 / len(groups))
    removed = groups[0]
    note = rounding_note(budget, "group", groups, removed)
    of_all = f"{len(removed)} heads ({percent(len(removed) / total)})"
    assert note.endswith(f"removed: 1 of {len(groups)} KV groups, with {of_all}")
    short = rounding_note(budget, "group", groups, removed, "divisors")
    assert short == f"{note}; a layer's KV heads divide its query heads, so the share can be less by up to one step"
    assert rounding_note(ShareBudget(len(removed) / total), "group", groups, removed) == ""
    for share in (0.0, 1.0, 1.2):
        with pytest.raises(PruningError, match=r"share=.* \(limit (above 0|below 1|finite)"):
            ShareBudget(share)
    with pytest.raises(PruningError, match=r"removes all 3 units \(limit 2\)"):
        ShareBudget(0.9).count(3, NOTHING)


def test_bytes_take_the_fewest_units_that_fit() -> None:
    search = BudgetSearch(
        lambda tokens: [128 * tokens] * 24, lambda count, tokens: (24 - count) * 128 * tokens, lambda count: 0.0
    )
    assert BytesBudget(20 * 128 * 1000, 1000).count(24, search) == 4
    assert BytesBudget(20 * 128 * 1000 - 1, 1000).count(24, search) == 5
    with pytest.raises(PruningError, match=r"limit 128000, with one unit left"):
        BytesBudget(100, 1000).count(24, search)
    with pytest.raises(PruningError, match=r"the KV cache has 3072000 bytes already"):
        BytesBudget(3072000, 1000).count(24, search)
    # Of units of 1 and 3 bytes, small ones are chosen first here.
    uneven = BudgetSearch(lambda tokens: [3, 1, 1, 3], lambda count, tokens: [8, 7, 6, 3][count], lambda count: 0.0)
    assert [BytesBudget(bytes_, 1).count(4, uneven) for bytes_ in (7, 6, 5, 3)] == [1, 2, 3, 3]
    with pytest.raises(PruningError, match=r"method entropy at 1 tokens: 3 bytes .* with one unit left \(limit 2\)"):
        BytesBudget(2, 1).count(4, replace(uneven, method="entropy"))


def test_losses_are_met_with_the_most_units() -> None:
    asked: list[int] = []

    def loss(count: int) -> float:
        asked.append(count)
        return 0.001 * count**2

    search = BudgetSearch(lambda tokens: [], lambda count, tokens: 0, loss)
    found = LossBudget(0.1).count(48, search)
    assert found == max(count for count in range(48) if 0.001 * count**2 <= 0.1) and len(asked) <= 6
    with pytest.raises(PruningError, match=r"`max_divergence=1e-06` .*limit 0.001, with one unit removed"):
        LossBudget(1e-6).count(48, search)


def test_imported_lists(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    for content in ([[2, 1], [0, 3]], {"heads": [[2, 1], [0, 3]]}):
        path.write_text(json.dumps(content))
        assert imported_heads(path) == [(2, 1), (0, 3)]
        path.write_text(json.dumps(content), encoding="utf-16")
        assert imported_heads(path) == [(2, 1), (0, 3)]
    for content, words in (([], "names 0 heads"), ([[1]], r"\[1\] is no head"), ([[1, "2"]], "is no head"), (3, "0")):
        path.write_text(json.dumps(content))
        with pytest.raises(PruningError, match=words):
            imported_heads(path)
    path.write_text("{")
    with pytest.raises(PruningError, match="cannot read the heads of"):
        imported_heads(path)


def test_masks_of_other_models_are_refused(spec: ModelSpec, store: Store) -> None:
    identity = identify(spec)
    foreign = store.begin_run(scan_record("foreign", model_config_hash="other", weights_hash="w")).run_id
    ours = store.begin_run(scan_record("ours", **{k: v for k, v in identity.columns().items() if k != "model"})).run_id
    store.add_mask("foreign", [(0, 1)], run_id=foreign)
    store.add_mask("mine", [(0, 1), (2, 3)], run_id=ours)
    model = identity.columns()
    assert find_mask(store, "mine", model).heads == ((0, 1), (2, 3))
    with pytest.raises(headscan.HeadscanError, match="mask foreign is of tiny, another model than tiny-llama"):
        find_mask(store, "foreign", model)
    with pytest.raises(headscan.HeadscanError, match="no mask absent"):
        find_mask(store, "absent", model)


def test_the_widest_projection_is_read_from_the_weights() -> None:
    """The configuration of GPT-2 names no width of the MLP."""
    lm = make_loaded("gpt2")
    widths = [weight.shape[0] for name, weight in lm.model.named_parameters() if name.endswith("mlp.c_proj.weight")]
    assert columns_to_solve(lm, ("down",)) == max(widths)
