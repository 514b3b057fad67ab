"""Comparisons of scores, each against the same thing worked out with numpy and scipy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import wasserstein_distance

from headscan.catalog import SCORES
from headscan.errors import StoreError, UnknownNameError
from headscan.ranking.comparisons import ComparisonError, mask_overlap, score_distance, score_overlap
from headscan.ranking.head_ranking import rank_heads, select_heads
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.store.views import pool_quantile
from tests.numbers.conftest import HEADS, LAYERS, SEQUENCES, Scan, head_table, make_stats, scan_record, sequence_table
from tests.numbers.conftest import write_scan as write

OTHER_SEQUENCES = 31


def score_of(stats: dict[str, np.ndarray], name: str) -> np.ndarray:
    """(sequences, layers, heads) in double precision."""
    score = SCORES[name]
    values = stats[score.statistic].astype(np.float64)
    if score.normaliser is None:
        return values
    below = stats[score.normaliser].astype(np.float64)
    return values / (below if score.over == "head" else below.mean(axis=-1, keepdims=True))


def picked(stats: dict[str, np.ndarray], name: str, quantile: float) -> np.ndarray:
    values = score_of(stats, name)
    limit = np.quantile(values, pool_quantile(SCORES[name], quantile))
    return values < limit if SCORES[name].inactive == "low" else values > limit


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Scan, Scan]]:
    """A store with two scans of different lengths and levels; the second lacks entropy."""
    path = tmp_path_factory.mktemp("two") / "s.duckdb"
    first = write(path, make_stats(0), "f0")
    stats = {name: 1.3 * values for name, values in make_stats(1, OTHER_SEQUENCES).items() if name != "entropy"}
    second = write(path, stats, "f1")
    with first.store.reading():
        yield first.store, first, second


@pytest.mark.parametrize("quantile", [0.1, 0.35])
def test_rules_overlap_as_their_sets_do(two: tuple[Store, Scan, Scan], quantile: float) -> None:
    store, scan, _ = two
    rows = score_overlap(store, scan.run_id[:6], quantile).to_pylist()
    assert [(row["score_a"], row["score_b"]) for row in rows] == list(combinations(SCORES, 2))
    for row in rows:
        a, b = (picked(scan.stats, row[side], quantile) for side in ("score_a", "score_b"))
        assert (row["picked_a"], row["picked_b"], row["both"]) == (a.sum(), b.sum(), (a & b).sum())
        assert row["overlap"] == pytest.approx((a & b).sum() / (a | b).sum())
    assert len({row["overlap"] for row in rows}) > 10  # or there would be nothing to see


def test_masks_overlap_as_selected_heads_do(two: tuple[Store, Scan, Scan]) -> None:
    store, scan, _ = two
    masks = {name: set(select_heads(rank_heads(store, scan.run_id, name), share=0.3)) for name in SCORES}
    rows = mask_overlap(store, scan.run_id, 0.3).to_pylist()
    assert [(row["score_a"], row["score_b"]) for row in rows] == list(combinations(SCORES, 2))
    for row in rows:
        a, b = masks[row["score_a"]], masks[row["score_b"]]
        assert (row["picked_a"], row["picked_b"], row["both"]) == (len(a), len(b), len(a & b))
        assert row["overlap"] == pytest.approx(len(a & b) / len(a | b))


def test_a_score_that_was_not_measured_has_no_overlap(two: tuple[Store, Scan, Scan]) -> None:
    store, _, second = two
    measured = [name for name in SCORES if not name.startswith("entropy")]
    for table in (score_overlap(store, second.run_id), mask_overlap(store, second.run_id)):
        pairs = [(row["score_a"], row["score_b"]) for row in table.to_pylist()]
        assert pairs == list(combinations(measured, 2))


def test_a_site_is_compared_alone(tmp_path: Path) -> None:
    """The cross attention agrees with itself; mixed with the other site's numbers it would not."""
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    run_id = store.begin_run(scan_record()).run_id
    stats = make_stats(3)
    same = dict.fromkeys(stats, stats["output_norm"])
    heads = pa.concat_tables([head_table(stats, 0, SEQUENCES), head_table(same, 0, SEQUENCES, "cross")])
    store.add_shards(run_id, [ShardToWrite(ShardRecord(0, "c0"), sequence_table(0, SEQUENCES), heads)])
    low = {name for name, score in SCORES.items() if score.inactive == "low" and score.over is None}
    for table in (score_overlap(store, run_id, 0.2, site="cross"), mask_overlap(store, run_id, 0.2, site="cross")):
        assert {r["overlap"] for r in table.to_pylist() if {r["score_a"], r["score_b"]} <= low} == {1.0}
    mixed = score_overlap(store, run_id, 0.2).to_pylist()
    assert min(r["overlap"] for r in mixed if {r["score_a"], r["score_b"]} <= low) < 1
    assert score_distance(store, run_id, run_id, scores=["entropy"], site="cross")["distance"].to_pylist() == [0.0]


def test_distances_are_scipy_s(two: tuple[Store, Scan, Scan]) -> None:
    """Of unequal sizes: 23 sequences against 31."""
    store, first, second = two
    table = score_distance(store, first.run_id[:6], second.run_id[:6])
    rows = {row["score"]: row for row in table.to_pylist()}
    assert set(rows) == {name for name in SCORES if not name.startswith("entropy")}
    for name, row in rows.items():
        a, b = score_of(first.stats, name).ravel(), score_of(second.stats, name).ravel()
        assert row["distance"] == pytest.approx(wasserstein_distance(a, b), rel=1e-9)
        std = np.sqrt(((len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)) / (len(a) + len(b) - 2))
        assert row["relative_distance"] == pytest.approx(row["distance"] / std)
        assert (row["mean_a"], row["mean_b"]) == pytest.approx((a.mean(), b.mean()))
        assert (row["values_a"], row["values_b"]) == (len(a), len(b))
    relative = table["relative_distance"].to_pylist()
    assert relative == sorted(relative, reverse=True)
    back = score_distance(store, second.run_id, first.run_id, scores=["output_norm"]).to_pylist()[0]
    assert back["distance"] == pytest.approx(rows["output_norm"]["distance"], rel=1e-12)
    assert (back["mean_a"], back["values_a"]) == (rows["output_norm"]["mean_b"], rows["output_norm"]["values_b"])


def test_distances_layer_by_layer(two: tuple[Store, Scan, Scan]) -> None:
    store, first, second = two
    names = ["first_token_weight_ln", "last_output_norm_hn"]
    rows = score_distance(store, first.run_id, second.run_id, scores=names, by_layer=True).to_pylist()
    assert {(row["score"], row["layer"]) for row in rows} == {
        (name, layer) for name in names for layer in range(LAYERS)
    }
    for row in rows:
        a, b = (score_of(scan.stats, row["score"])[:, row["layer"]].ravel() for scan in (first, second))
        assert row["distance"] == pytest.approx(wasserstein_distance(a, b), rel=1e-9)
        assert (row["values_a"], row["values_b"]) == (SEQUENCES * HEADS, OTHER_SEQUENCES * HEADS)


def test_ties_and_a_constant_score_are_at_a_distance(tmp_path: Path) -> None:
    """Values in common, one value alone (no deviation to divide by), and equal sizes."""
    path = tmp_path / "s.duckdb"
    stats = [{name: np.round(values, 1) for name, values in make_stats(seed).items()} for seed in (0, 1)]
    for these, level in zip(stats, (2.0, 5.0), strict=True):
        these["value_norm"][:] = level
    first, second = (write(path, these, f"f{i}") for i, these in enumerate(stats))
    store = first.store
    names = ["output_norm", "value_norm"]
    rows = {row["score"]: row for row in score_distance(store, first.run_id, second.run_id, scores=names).to_pylist()}
    a, b = (these["output_norm"].astype(np.float64).ravel() for these in stats)
    assert rows["output_norm"]["distance"] == pytest.approx(wasserstein_distance(a, b), rel=1e-9)
    assert (rows["value_norm"]["distance"], rows["value_norm"]["relative_distance"]) == (3.0, None)
    itself = score_distance(store, first.run_id, first.run_id, scores=names)
    assert itself["distance"].to_pylist() == [0.0, 0.0]


def test_macros_run_in_read_only_sql(two: tuple[Store, Scan, Scan]) -> None:
    """The macros give the same numbers in `headscan sql`, and have comments."""
    store, first, second = two
    ours = score_distance(store, first.run_id, second.run_id).sort_by("score")
    theirs = store.query(f"FROM score_distance('{first.run_id}', '{second.run_id}') ORDER BY score")
    assert theirs["score"] == ours["score"]
    assert theirs["distance"].to_pylist() == pytest.approx(ours["distance"].to_pylist())
    overlap = store.query(f"FROM mask_overlap('{first.run_id}', 0.3)")
    assert overlap.equals(mask_overlap(store, first.run_id, 0.3))
    comments = store.query("SELECT function_name, any_value(comment) AS said FROM duckdb_functions() GROUP BY ALL")
    said = dict(zip(*comments.to_pydict().values(), strict=True))
    for macro in ("score_overlap", "mask_overlap", "score_distance", "layer_distance"):
        assert "Columns" in said[macro]


def test_comparison_errors(two: tuple[Store, Scan, Scan]) -> None:
    store, first, second = two
    for quantile in (0.0, 1.0, float("nan")):
        with pytest.raises(ComparisonError, match=r"out of range: .*limit above 0, below 1"):
            score_overlap(store, first.run_id, quantile)
    with pytest.raises(ComparisonError, match="site 'cross'"):
        mask_overlap(store, first.run_id, site="cross")
    with pytest.raises(ComparisonError, match='at site "it\'s"'):
        score_distance(store, first.run_id, second.run_id, site="it's")
    with pytest.raises(UnknownNameError, match="unknown score 'entrpy'"):
        score_distance(store, first.run_id, second.run_id, scores=["entrpy"])
    with pytest.raises(ComparisonError, match="no common score"):
        score_distance(store, first.run_id, second.run_id, scores=["entropy"])
    with pytest.raises(StoreError, match="zzz"):
        score_distance(store, first.run_id, "zzz")
