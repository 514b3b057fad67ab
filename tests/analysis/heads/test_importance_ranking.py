"""Importance rows are stored per sequence, summarised as the papers define it, and ranked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from headscan.analysis.errors import SelectionError, StoreError
from headscan.analysis.heads.importance_ranking import halves_agreement, rank_importance
from headscan.analysis.store.records import RunRecord, ShardRecord, ShardToWrite
from headscan.analysis.store.store import Store
from headscan.catalog import IMPORTANCES
from headscan.errors import UnknownNameError
from tests.analysis.conftest import HEADS, LAYERS, head_table, make_stats, scan_record, sequence_table

SEQUENCES = 7


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (SEQUENCES, LAYERS, HEADS)
    return {
        "gate_gradient": rng.normal(size=shape).astype(np.float32),
        "token_gradient": rng.gamma(9, size=shape).astype(np.float32),
        "entropy": rng.random(shape, np.float32),
    }


def write(path: Path, values: dict[str, np.ndarray]) -> tuple[Store, str]:
    store = Store(path)
    run_id = store.begin_run(RunRecord("importance", "i0", "tiny", LAYERS, HEADS, corpus="texts")).run_id
    for shard, first in enumerate((0, 4)):
        count = min(4, SEQUENCES - first)
        record = ShardRecord(shard, f"c{shard}", 0.5, "worker")
        store.add_shards(run_id, [ShardToWrite(record, sequence_table(first, count), head_table(values, first, count))])
    store.finish_run(run_id)
    return store, run_id


def expected(values: dict[str, np.ndarray], tokens: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return the scores (L, H) from their definitions."""
    importance = values["token_gradient"].astype(np.float64).mean(0)
    tokens = 10 + np.arange(SEQUENCES) if tokens is None else tokens
    entropy = (values["entropy"] / np.log(tokens)[:, None, None]).mean(0)

    def scaled(x: np.ndarray) -> np.ndarray:
        return (x - x.min()) / (x.max() - x.min())

    return {
        "importance": importance,
        "importance_ln": importance / np.linalg.norm(importance, axis=1, keepdims=True),
        "importance_entropy": 0.5 * scaled(importance) + 0.5 * (1 - scaled(entropy)),
        "sequence_importance": np.abs(values["gate_gradient"].astype(np.float64)).mean(0),
    }


@pytest.mark.parametrize("name", IMPORTANCES)
def test_rankings_follow_the_definitions(values: dict[str, np.ndarray], tmp_path: Path, name: str) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    numbers = expected(values)[name]
    ranked = rank_importance(store, run_id, name)
    assert [(h.layer, h.head) for h in ranked] == [divmod(int(i), HEADS) for i in np.argsort(numbers, axis=None)]
    np.testing.assert_allclose([h.value for h in ranked], np.sort(numbers, axis=None), rtol=1e-6)
    signed = values["gate_gradient"].mean(0)
    np.testing.assert_allclose([h.mean_gate_gradient for h in ranked], [signed[h.layer, h.head] for h in ranked], 1e-4)
    assert rank_importance(store, run_id, name, descending=True) == ranked[::-1]


def test_sites_are_summarised_apart(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    alone = [h.value for h in rank_importance(store, run_id, "importance_entropy")]
    cross = {name: 3 * numbers for name, numbers in values.items()}
    record = ShardRecord(9, "c9", 0.5, "worker")
    store.add_shards(run_id, [ShardToWrite(record, sequence_table(50, 3), head_table(cross, 0, 3, site="cross"))])
    assert [h.value for h in rank_importance(store, run_id, "importance_entropy")] == alone
    assert len(rank_importance(store, run_id, "importance", site="cross")) == LAYERS * HEADS


def test_a_layer_without_importance_has_no_normalised_one(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    values["token_gradient"][:, 1] = 0
    store, run_id = write(tmp_path / "s.duckdb", values)
    ranked = rank_importance(store, run_id, "importance_ln")
    assert [h.layer for h in ranked if np.isnan(h.value)] == [1] * HEADS == [h.layer for h in ranked[-HEADS:]]


def test_mistakes_are_named(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    with pytest.raises(UnknownNameError, match="importance_ln"):
        rank_importance(store, run_id, "importance_layer")
    with pytest.raises(SelectionError, match="no importance at site encoder"):
        rank_importance(store, run_id, site="encoder")
    record = ShardRecord(3, "c3", 0.5, "worker")
    with pytest.raises(
        StoreError, match=r"the heads table has wrong columns.*optional: gate_gradient, token_gradient, entropy\)"
    ):
        store.add_shards(run_id, [ShardToWrite(record, sequence_table(60, 2), head_table(make_stats(), 0, 2))])
    scan = store.begin_run(scan_record()).run_id
    with pytest.raises(StoreError, match="Add or remove gate_gradient, token_gradient"):
        store.add_shards(scan, [ShardToWrite(record, sequence_table(0, 2), head_table(values, 0, 2))])


def test_a_run_of_an_older_version_has_the_importance_by_sequence_alone(
    values: dict[str, np.ndarray], tmp_path: Path
) -> None:
    del values["token_gradient"]
    store, run_id = write(tmp_path / "s.duckdb", values)
    with pytest.raises(SelectionError, match=r"an older version measured it\. Measure again, or rank by sequence_imp"):
        rank_importance(store, run_id)
    assert len(rank_importance(store, run_id, "sequence_importance")) == LAYERS * HEADS
    assert halves_agreement(store, run_id) is None
    assert halves_agreement(store, run_id, "sequence_importance") is not None


@pytest.mark.parametrize("name", IMPORTANCES)
def test_halves_are_every_other_document(values: dict[str, np.ndarray], tmp_path: Path, name: str) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    documents = store.query("SELECT document FROM sequences ORDER BY sequence")["document"].to_pylist()
    assert documents == list(range(SEQUENCES))  # each sequence is a document
    tokens = 10 + np.arange(SEQUENCES)
    orders = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        part = {key: numbers[half] for key, numbers in values.items()}
        orders.append(expected(part, tokens[half])[name].ravel())
    found = halves_agreement(store, run_id, name)
    assert found is not None and found.sequences == (4, 3)
    assert found.spearman == pytest.approx(spearmanr(*orders).statistic, abs=1e-4)
    assert found.kendall == pytest.approx(kendalltau(*orders).statistic, abs=1e-4)


def test_halves_of_one_long_document_are_every_other_sequence(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    alone = halves_agreement(store, run_id)
    with store.connect() as connection:
        connection.execute("UPDATE sequences SET document = 0")
    assert halves_agreement(store, run_id) == alone  # sequences were documents before
    with store.connect() as connection:
        connection.execute("DELETE FROM sequences WHERE sequence > 0")
        connection.execute("DELETE FROM head_importance WHERE sequence > 0")
    assert halves_agreement(store, run_id) is None
