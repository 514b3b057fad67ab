"""A probe's rows are replaced in one transaction, and read as ranking and view."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from headscan.analysis.errors import SelectionError, StoreError
from headscan.analysis.store.behaviour_rows import behaving_heads, measured_behaviours
from headscan.analysis.store.records import RunRecord
from headscan.analysis.store.store import Store
from headscan.catalog import BEHAVIOURS


def rows(*values: float, behaviour: str = "induction_score") -> pa.Table:
    """Two heads a layer, from layer 0 on."""
    return pa.table(
        {
            "site": ["self"] * len(values),
            "layer": pa.array([i // 2 for i in range(len(values))], pa.int16()),
            "head": pa.array([i % 2 for i in range(len(values))], pa.int16()),
            "behaviour": [behaviour] * len(values),
            "value": pa.array(values, pa.float32()),
        }
    )


def test_rows_take_the_place_of_earlier_ones_and_come_back_ranked(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("probe", "p0", "tiny", 2, 2)).run_id
    store.add_behaviours(run_id, rows(0.1, 0.2, 0.3, 0.4))
    both = pa.concat_tables([rows(0.5, 0.25, 0.75, 0.5), rows(0.0, 1.0, behaviour="retrieval_score")])
    store.add_behaviours(run_id, both)
    found = [(head.layer, head.head, head.value) for head in behaving_heads(store, run_id, "induction_score")]
    assert found == [(1, 0, 0.75), (0, 0, 0.5), (1, 1, 0.5), (0, 1, 0.25)]
    assert measured_behaviours(store, run_id) == ("induction_score", "retrieval_score")
    assert store.query("from behaviour_summary").num_rows == 0, "the probe is not finished"
    store.finish_run(run_id)
    summary = store.query("from behaviour_summary order by layer, head")
    assert summary.column_names == ["run_id", "model", "site", "layer", "head", *BEHAVIOURS]
    assert summary["induction_score"].to_pylist() == [0.5, 0.25, 0.75, 0.5]
    assert summary["retrieval_score"].to_pylist() == [0.0, 1.0, None, None]
    assert summary["previous_token_score"].null_count == 4


def test_mistakes_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("probe", "p0", "tiny", 2, 2)).run_id
    with pytest.raises(SelectionError, match="has no retrieval_score"):
        behaving_heads(store, run_id, "retrieval_score")
    with pytest.raises(StoreError, match="no run 0000"):
        store.add_behaviours("0000", rows(0.5))
    with pytest.raises(StoreError, match="Add or remove layer"):
        store.add_behaviours(run_id, rows(0.5).drop_columns("layer"))
