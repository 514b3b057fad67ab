from __future__ import annotations

import math

import numpy as np
import pytest

from headscan.analysis.errors import SelectionError
from headscan.analysis.heads.selection import RankedHead, random_heads, rank_heads, select_heads, thresholds
from headscan.catalog import SCORES
from tests.analysis.conftest import HEADS, LAYERS, Scan, make_stats, write_scan


def _order(values: np.ndarray) -> list[tuple[int, int]]:
    return [divmod(int(i), HEADS) for i in np.argsort(values.ravel(), kind="stable")]


def _pairs(ranked: list[RankedHead]) -> list[tuple[int, int]]:
    return [(r.layer, r.head) for r in ranked]


def test_the_most_inactive_head_is_first_in_both_directions(scan: Scan) -> None:
    low, high = (scan.stats[s].astype(np.float64).mean(axis=0) for s in ("output_norm", "first_token_weight"))
    ranked = rank_heads(scan.store, scan.run_id, "output_norm")
    assert _pairs(ranked) == _order(low)
    assert _pairs(rank_heads(scan.store, scan.run_id, "first_token_weight")) == _order(-high)
    assert _pairs(rank_heads(scan.store, scan.run_id, "output_norm", descending=True)) == _order(-low)
    first = ranked[0]
    assert first.value == pytest.approx(low.min())
    assert first.std == pytest.approx(scan.stats["output_norm"][:, first.layer, first.head].std(ddof=1), rel=1e-5)
    assert first.kv_head == first.head // 2
    pool = scan.stats["output_norm"]
    beyond = (pool < np.quantile(pool, 0.1))[:, first.layer, first.head].mean()
    assert first.inactive_share == pytest.approx(beyond)


def test_a_statistic_ranks_lowest_first_and_has_no_inactive_side(scan: Scan) -> None:
    mean = scan.stats["sink_mass"].astype(np.float64).mean(axis=0)
    ranked = rank_heads(scan.store, scan.run_id, "sink_mass")
    assert _pairs(ranked) == _order(mean)
    assert all(r.inactive_share is None for r in ranked)
    assert _pairs(rank_heads(scan.store, scan.run_id, "sink_mass", descending=True)) == _order(-mean)


def test_unknown_and_unmeasured_scores_have_distinct_errors(scan: Scan) -> None:
    with pytest.raises(SelectionError, match=r"'output_nrm_ln'\. Did you mean output_norm_ln"):
        rank_heads(scan.store, scan.run_id, "output_nrm_ln")
    with pytest.raises(SelectionError, match="Did you mean"):
        thresholds(scan.store, scan.run_id, "entropie", [0.1])
    with pytest.raises(SelectionError, match="unknown score 'sink_mass'"):
        thresholds(scan.store, scan.run_id, "sink_mass", [0.1])
    partial = write_scan(scan.store.path, {"entropy": make_stats()["entropy"]}, "partial")
    with pytest.raises(SelectionError, match="has no value_norm at site self"):
        rank_heads(scan.store, partial.run_id, "value_norm")
    with pytest.raises(SelectionError, match=r"has no site 'cross'\. Choose from self"):
        rank_heads(scan.store, partial.run_id, "entropy", site="cross")
    with pytest.raises(SelectionError, match="has no value_norm"):
        thresholds(scan.store, partial.run_id, "value_norm", [0.1])


def test_unmeasured_heads_come_last_and_are_never_selected(scan: Scan) -> None:
    entropy = make_stats()["entropy"]
    entropy[:, 1, 2] = np.nan
    ranked = rank_heads(scan.store, write_scan(scan.store.path, {"entropy": entropy}, "gap").run_id, "entropy")
    assert (ranked[-1].layer, ranked[-1].head) == (1, 2) and math.isnan(ranked[-1].value)
    assert len(select_heads(ranked, count=LAYERS * HEADS - 1)) == LAYERS * HEADS - 1
    with pytest.raises(SelectionError, match="1 to 11 measured"):
        select_heads(ranked, share=1.0)


@pytest.mark.parametrize(("share", "expected"), [(0.001, 1), (0.1, 1), (0.12, 1), (0.125, 2), (0.5, 6), (1.0, 12)])
def test_shares_round_to_the_nearest_head(share: float, expected: int) -> None:
    ranked = [RankedHead(i // 4, i % 4, 0, float(i), 0.0, 0.0) for i in range(12)]
    assert select_heads(ranked, share=share) == [divmod(i, 4) for i in range(expected)]


def test_selections_out_of_range() -> None:
    ranked = [RankedHead(0, i, 0, float(i), 0.0, 0.0) for i in range(4)]
    assert select_heads(ranked, count=3) == [(0, 0), (0, 1), (0, 2)]
    for share in (0.0, -0.1, 1.01, math.nan):
        with pytest.raises(SelectionError, match=r"out of range: .*limit above 0, at most 1"):
            select_heads(ranked, share=share)
    for count in (0, 5):
        with pytest.raises(SelectionError, match=f"{count} heads"):
            select_heads(ranked, count=count)
    for both in ({}, {"share": 0.5, "count": 1}):
        with pytest.raises(SelectionError, match="exactly one"):
            select_heads(ranked, **both)  # type: ignore[arg-type]


def test_random_heads_are_distinct_sorted_and_follow_from_the_seed() -> None:
    grid = [(layer, head) for layer in range(8) for head in range(8)]
    drawn = random_heads(grid, 16, seed=3)
    assert drawn == sorted(set(drawn)) and len(drawn) == 16 and set(drawn) <= set(grid)
    assert random_heads(reversed(grid), 16, seed=3) == drawn
    assert random_heads(grid, 16, seed=4) != drawn
    assert all(type(n) is int for pair in drawn for n in pair)
    with pytest.raises(SelectionError, match="limit 1 to 64"):
        random_heads(grid, 65, seed=0)


@pytest.mark.parametrize("quantile", [0.0, 0.05, 0.3])
def test_thresholds_are_quantiles_of_the_pool_from_the_inactive_side(scan: Scan, quantile: float) -> None:
    low = scan.stats["entropy"].astype(np.float64)
    assert thresholds(scan.store, scan.run_id, "entropy", [quantile])[0] == pytest.approx(np.quantile(low, quantile))
    high = scan.stats["first_token_weight"].astype(np.float64)
    ratio = high / high.mean(axis=2, keepdims=True)
    found = thresholds(scan.store, scan.run_id, "first_token_weight_ln", [quantile])[0]
    assert found == pytest.approx(np.quantile(ratio, 1 - quantile))
    assert SCORES["first_token_weight_ln"].inactive == "high"
    with pytest.raises(SelectionError, match="0 to 1"):
        thresholds(scan.store, scan.run_id, "entropy", [1.5])


def test_many_thresholds_are_one_query(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    query = scan.store.query
    monkeypatch.setattr(scan.store, "query", lambda sql, *rest: (asked.append(sql), query(sql, *rest))[1])
    for score in ("entropy", "first_token_weight"):
        pool, high = scan.stats[score].astype(np.float64), SCORES[score].inactive == "high"
        found = thresholds(scan.store, scan.run_id, score, (0.3, 0, 0.05))
        assert found == pytest.approx([np.quantile(pool, 1 - q if high else q) for q in (0.3, 0, 0.05)])
    assert len(asked) == 2
    with pytest.raises(SelectionError, match=r"quantile out of range: -0.1"):
        thresholds(scan.store, scan.run_id, "entropy", [0.1, -0.1])
    with pytest.raises(SelectionError, match="0 quantiles"):
        thresholds(scan.store, scan.run_id, "entropy", [])
