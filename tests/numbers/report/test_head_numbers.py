"""The numbers of the head map, against the store's SQL views and plain loops."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headscan.catalog import BEHAVIOURS, IMPORTANCES
from headscan.ranking.comparisons import score_overlap
from headscan.report.head_data import HeadData, read_head_data
from headscan.report.head_measures import HEAD_TABLES, packed
from headscan.store.head_spread import resampling
from headscan.store.scan_tables import MOSTLY
from headscan.store.site_rows import SiteHeads
from headscan.store.store import Store
from tests.numbers.all_values import spread_of
from tests.numbers.conftest import Scan
from tests.numbers.report.large_store import new_store, write_importance, write_large_scan, write_probe

LAYERS, HEADS = 3, 8


def test_the_interval_covers_the_true_count() -> None:
    """Ten heads are inactive in nine of ten sequences; one in about half, so that the count is 10 or 11."""
    rng = np.random.default_rng(0)
    share = np.array([0.9] * 10 + [0.5] + [0.0] * 89)[:, None]
    values = np.where(rng.random((100, 300)) < share, 0.1, 1.0) + 0.01 * rng.random((100, 300))
    found = spread_of("output_norm", values).persistence
    assert found is not None and (found.low, found.high) == (10, 11)
    assert found.words(100).endswith("[10, 11]")
    single = spread_of("output_norm", values[:, :1]).persistence
    assert single is not None and single.low is None and "[" not in single.words(100)


@pytest.mark.parametrize("measured", [1.0, 0.8])
def test_the_interval_equals_the_counts_of_all_resamples(measured: float) -> None:
    """Few heads are inactive in about half of the sequences; for the others the extreme resample decides."""
    rng = np.random.default_rng(1)
    share = np.linspace(0, 1, 300)[:, None] ** 9
    values = np.where(rng.random((300, 61)) < share, 0.1, 1.0) + 0.01 * rng.random((300, 61))
    values[rng.random(values.shape) > measured] = np.nan
    spread, weights = spread_of("output_norm", values), resampling(61).weights
    beyond, asked = (values < spread.thresholds[0.1]) @ weights, np.isfinite(values) @ weights
    counts = ((beyond >= MOSTLY * asked) & (asked > 0)).sum(axis=0)
    assert spread.persistence is not None and len(set(counts)) > 3
    assert (spread.persistence.low, spread.persistence.high) == tuple(
        np.quantile(counts, [0.025, 0.975], method="nearest")
    )


def test_overlaps_equal_the_macro(scan: Scan) -> None:
    run = scan.store.resolve_run(scan.run_id)
    data = read_head_data(scan.store, run)
    expected = score_overlap(scan.store, scan.run_id, 0.1).to_pylist()
    assert data.sites[0].overlaps() == expected and expected


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str, HeadData]]:
    store = new_store(tmp_path_factory.mktemp("numbers") / "s.duckdb")
    other = write_large_scan(store, LAYERS, HEADS, 5, fingerprint="other", seed=3, model="other")
    run_id = write_large_scan(store, LAYERS, HEADS, 6)
    write_probe(store, LAYERS, HEADS)
    write_importance(store, LAYERS, HEADS)
    with store.reading():
        scan, compared = (store.resolve_run(each) for each in (run_id, other))
        yield store, run_id, read_head_data(store, scan, compared=compared)


def test_tables_of_other_runs_are_measures_in_their_places(whole: tuple[Store, str, HeadData]) -> None:
    store, _, data = whole
    found = {measure.name: measure for measure in data.sites[0].numbers.measures}
    rows = store.query("SELECT * FROM behaviour_summary").to_pylist()
    expected = {*BEHAVIOURS, *(each.name for each in IMPORTANCES.values() if not each.on_recall)}  # it has no prompts
    assert (
        expected <= set(found) and "importance_recall" not in found and set(data.runs) == {"Behaviours", "Importance"}
    )
    for row in rows:
        for name in BEHAVIOURS:
            assert found[name].values[row["layer"] * HEADS + row["head"]] == pytest.approx(row[name])
    for row in store.query("SELECT * FROM importance_summary").to_pylist():
        place = row["layer"] * HEADS + row["head"]
        assert found["importance"].values[place] == pytest.approx(row["importance"])
        for name in ("importance", "sequence_importance"):
            std = found[name].std
            assert std is not None and std[place] == pytest.approx(row[f"{name}_std"])
    assert found["retrieval_score"].limit == 0.1
    assert {table.group for table in HEAD_TABLES} >= {"Behaviours", "Importance", "Effects", "Gates"}


def test_another_scan_gives_its_means(whole: tuple[Store, str, HeadData]) -> None:
    store, _, data = whole
    rows = store.query("SELECT entropy_ln FROM head_summary WHERE model = 'other' ORDER BY layer, head").to_pylist()
    measure = next(each for each in data.sites[0].numbers.measures if each.name == "entropy_ln")
    np.testing.assert_allclose(measure.other, [row["entropy_ln"] for row in rows], rtol=1e-5)


def test_numbers_are_packed_as_little_endian_floats() -> None:
    values = np.array([1.5, np.nan, -2e30])
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed(values)), "<f4"), values.astype("<f4"))


def test_layers_without_attention_leave_no_gap(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s.duckdb")
    run_id = write_large_scan(store, 2, 4, 2)
    heads = SiteHeads(run_id, "self", np.array([1, 1, 5]), np.array([0, 1, 1]), np.zeros(3, int), 1)
    assert [heads.row(1, 1), heads.row(5, 1), heads.row(5, 0), heads.row(9, 0)] == [1, 2, None, None]
