"""A Parquet data set answers as the store does, for headscan and for others."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import headscan
from headscan.catalog import SCORES
from headscan.errors import NotAStoreError, QueryError, StoreError, StoreMissingError, StoreVersionError
from headscan.store.output_files import OutputError
from headscan.store.parquet_store import ParquetStore, store_at
from headscan.store.store import Store
from headscan.store.tables import TABLES
from headscan.store.views import VIEWS
from headscan.verdicts.judge import judge
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.conftest import HEADS, LAYERS, Scan, make_profiles, make_stats, write_scan
from tests.numbers.sweep_fixtures import write_sweep


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """A store with two scans and a judged sweep, and the id of the sweep. The second scan's id has digits alone, as
    one in 280 has."""
    path = tmp_path_factory.mktemp("parquet") / "s.duckdb"
    store = write_scan(path, make_stats() | make_profiles()).store
    write_scan(path, make_stats(1), "other")
    sweep = write_sweep(store, scores=("entropy", "output_norm_ln"), shares=(0.1, 0.3), questions=200)
    record_verdicts(store, sweep)
    other = store.runs("scan")[0]["run_id"]
    with store.connect() as connection:
        for table in ("runs", "shards", "sequences", "head_statistics"):
            connection.execute(f"UPDATE {table} SET run_id = '012345678901' WHERE run_id = ?", [other])
    return store, sweep


@pytest.fixture(scope="module")
def folder(filled: tuple[Store, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "tables"
    filled[0].export_parquet(path)
    return path


def test_every_table_and_view_has_the_same_rows(filled: tuple[Store, str], folder: Path) -> None:
    with filled[0].reading():
        _compare_all(filled[0], store_at(folder))


def _compare_all(store: Store, parquet: Store) -> None:
    assert isinstance(parquet, ParquetStore)
    names = [*TABLES, *VIEWS]
    assert store.query("FROM head_summary").num_rows == 2 * LAYERS * HEADS
    for name in names:
        columns = {row["column_name"]: row["column_type"] for row in store.query(f"DESCRIBE {name}").to_pylist()}
        found = {row["column_name"]: row["column_type"] for row in parquet.query(f"DESCRIBE {name}").to_pylist()}
        assert found == columns, name
        # Sums of other orders differ in their last digits, so rows are paired without those.
        exact = [n for n, kind in columns.items() if kind not in ("DOUBLE", "FLOAT", "FLOAT[]")]
        order = ", ".join([*exact, *(f"round({n}, 6)" for n, kind in columns.items() if kind == "DOUBLE")])
        ours, theirs = (each.query(f"FROM {name} ORDER BY {order}") for each in (store, parquet))
        assert ours.select(exact).equals(theirs.select(exact)), name
        for column in set(columns) - set(exact):
            values = [np.array(t[column].to_pylist(), dtype=object) for t in (ours, theirs)]
            if columns[column] == "FLOAT[]":
                assert values[0].tolist() == values[1].tolist()
                continue
            a, b = (value.astype(float) for value in values)
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=f"{name}.{column}")


def test_comments_of_columns_are_there(filled: tuple[Store, str], folder: Path) -> None:
    query = (
        "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal AND comment IS NOT NULL"
        " ORDER BY ALL"
    )
    assert ParquetStore(folder).query(query).equals(filled[0].query(query))


def test_notebooks_get_the_same_tables(filled: tuple[Store, str], folder: Path) -> None:
    store, sweep = filled
    ours, theirs = headscan.open_store(store.path), headscan.open_store(folder)
    assert theirs.scores().to_arrow_table().equals(ours.scores().to_arrow_table())
    assert theirs.verdicts().to_arrow_table().equals(ours.verdicts().to_arrow_table())
    for one, other in zip(ours.heads().fetchall(), theirs.heads().fetchall(), strict=True):
        assert one == pytest.approx(other, nan_ok=True)
    assert judge(ParquetStore(folder), sweep) == judge(store, sweep)


def test_an_unfinished_run_is_summarised_from_its_rows(tmp_path: Path) -> None:
    scan = write_scan(tmp_path / "s.duckdb", make_stats())
    (stored,) = scan.store.summaries(scan.run_id)
    with scan.store.connect() as connection:
        for table in ("head_summaries", "measure_pools"):
            connection.execute(f"DELETE FROM {table}")
    scan.store.export_parquet(tmp_path / "tables")
    (computed,) = ParquetStore(tmp_path / "tables").summaries(scan.run_id)
    assert computed.spreads.keys() == stored.spreads.keys()
    for name, spread in computed.spreads.items():
        np.testing.assert_array_equal(spread.quantiles, stored.spreads[name].quantiles)
        assert (
            spread.thresholds == stored.spreads[name].thresholds
            and spread.persistence == stored.spreads[name].persistence
        )


def test_macros_work(filled: tuple[Store, str], folder: Path) -> None:
    run = filled[0].runs("scan")[0]["run_id"]
    query = f"FROM score_overlap('{run}', 0.1) ORDER BY ALL"
    assert filled[0].query(query).num_rows > len(SCORES)
    assert ParquetStore(folder).query(query).equals(filled[0].query(query))


def test_a_data_set_is_read_only_and_reaches_no_file(folder: Path, tmp_path: Path) -> None:
    store = ParquetStore(folder)
    with pytest.raises(StoreError, match="cannot be written"):
        store.finish_run("x")
    for query in (f"FROM read_parquet('{folder}/runs.parquet')", f"COPY (SELECT 1) TO '{tmp_path}/x.csv'"):
        with pytest.raises(QueryError, match="no file access"):
            store.query(query)
    assert list(tmp_path.iterdir()) == []


def test_the_schema_names_every_column(folder: Path) -> None:
    schema = json.loads((folder / "schema.json").read_text("utf-8"))
    for name, table in TABLES.items():
        declared = [(c.name, c.type, c.nullable, c.comment) for c in table.columns]
        keys = ("name", "type", "nullable", "comment")
        found = [tuple(column[key] for key in keys) for column in schema["tables"][name]["columns"]]
        assert [row[0] for row in found] == [row[0] for row in declared]
        assert [row[2:] for row in found] == [row[2:] for row in declared]
        files = [*folder.glob(schema["tables"][name]["files"])]
        assert bool(files) == (name != "head_importance")  # which has no rows
    assert schema["tables"]["head_statistics"]["partitioned_by"] == ["run_id", "layer"]
    assert len(list((folder / "head_statistics").glob("run_id=012345678901/layer=*/*.parquet"))) == LAYERS


_DUCKDB = """
import duckdb, json, sys
folder = sys.argv[1]
types = "hive_types = {'run_id': VARCHAR, 'layer': SMALLINT}"
print(json.dumps(duckdb.sql(f'''
    SELECT run_id, layer, head, avg(entropy)::DOUBLE AS entropy, count(*) AS rows
    FROM read_parquet('{folder}/head_statistics/*/*/*.parquet', hive_partitioning = true, {types})
    JOIN (SELECT run_id FROM '{folder}/runs.parquet' WHERE kind = 'scan') USING (run_id)
    GROUP BY ALL ORDER BY ALL''').fetchall()))
assert 'headscan' not in sys.modules
"""

_POLARS = """
import json, sys
import polars as pl
folder = sys.argv[1]
types = {"run_id": pl.String, "layer": pl.Int16}
found = pl.scan_parquet(f"{folder}/head_statistics/*/*/*.parquet", hive_partitioning=True, hive_schema=types)
rows = found.group_by("run_id", "layer", "head").agg(pl.col("entropy").cast(pl.Float64).mean(), pl.len().alias("rows"))
print(json.dumps([list(row) for row in rows.sort("run_id", "layer", "head").collect().rows()]))
assert 'headscan' not in sys.modules
"""


@pytest.mark.parametrize("engine", ["duckdb", "polars"])
def test_other_engines_read_it(filled: tuple[Store, str], folder: Path, engine: str) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    code = {"duckdb": _DUCKDB, "polars": _POLARS}[engine]
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    expected = filled[0].query(
        "SELECT run_id, layer, head, avg(entropy)::DOUBLE AS entropy, count(*) AS rows FROM head_statistics"
        " GROUP BY ALL ORDER BY ALL"
    )
    found = json.loads(done.stdout)
    assert len(found) == 2 * LAYERS * HEADS
    for row, other in zip(found, expected.to_pylist(), strict=True):
        assert row == pytest.approx(list(other.values()))


def test_a_url_is_written_and_read(filled: tuple[Store, str]) -> None:
    """The memory of fsspec stands for an object store."""
    url = "memory://bucket/tables"
    filled[0].export_parquet(url)
    assert store_at(url).query("FROM head_scores ORDER BY ALL").equals(filled[0].query("FROM head_scores ORDER BY ALL"))
    with pytest.raises(StoreMissingError, match=r"memory://bucket/other has no schema\.json"):
        store_at("memory://bucket/other").runs()


def test_a_missing_driver_is_named(filled: tuple[Store, str]) -> None:
    for call in (lambda url: filled[0].export_parquet(url), lambda url: store_at(url).runs()):
        with pytest.raises(StoreError, match=r"^nosuch://bucket/x needs a driver of fsspec: .*nosuch.* Install it"):
            call("nosuch://bucket/x")
        if importlib.util.find_spec("s3fs") is None:
            with pytest.raises(StoreError, match=r"^s3://bucket/x needs a driver of fsspec: .*s3fs.* Install it"):
                call("s3://bucket/x")


def test_a_new_export_replaces_the_old_one(scan: Scan, filled: tuple[Store, str], tmp_path: Path) -> None:
    filled[0].export_parquet(tmp_path)
    scan.store.export_parquet(tmp_path)
    assert {run["run_id"] for run in ParquetStore(tmp_path).runs()} == {scan.run_id}
    ours = "FROM head_statistics ORDER BY ALL"
    assert ParquetStore(tmp_path).query(ours).equals(scan.store.query(ours))


def test_files_of_others_stay(scan: Scan, tmp_path: Path) -> None:
    (tmp_path / "head_statistics").mkdir()
    (tmp_path / "head_statistics" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds .*mine\.txt"):
        scan.store.export_parquet(tmp_path)
    assert (tmp_path / "head_statistics" / "mine.txt").read_text() == "mine"


def test_an_incomplete_export_is_not_read(scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan.store.export_parquet(tmp_path)

    def broken(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.dataset.write_dataset", broken)
        with pytest.raises(StoreError, match="no space left"):
            scan.store.export_parquet(tmp_path)
    with pytest.raises(StoreMissingError, match=r"no schema\.json"):
        ParquetStore(tmp_path).runs()
    with pytest.raises(NotAStoreError, match="is a directory"):
        store_at(tmp_path).runs()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda schema: schema | {"schema_version": 10_000}, StoreVersionError),
        (lambda schema: schema | {"format": "other"}, NotAStoreError),
        (lambda schema: [], NotAStoreError),
    ],
)
def test_another_schema_is_refused(
    scan: Scan, tmp_path: Path, change: Callable[[dict[str, object]], object], error: type[StoreError]
) -> None:
    scan.store.export_parquet(tmp_path)
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(change(json.loads(path.read_text("utf-8")))))
    with pytest.raises(error):
        ParquetStore(tmp_path).runs()


def test_the_column_of_a_new_statistic_is_empty(scan: Scan, tmp_path: Path) -> None:
    """Files that were written before the catalogue declared the statistic lack its column."""
    scan.store.export_parquet(tmp_path)
    for path in (tmp_path / "head_statistics").glob("*/*/*.parquet"):
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns("self_weight"), path)
    store = ParquetStore(tmp_path)
    assert store.query("SELECT count(*) AS rows, count(self_weight) AS values FROM head_statistics").to_pylist() == [
        {"rows": scan.stats["entropy"].size, "values": 0}
    ]
    assert store.query("FROM head_summary").num_rows == LAYERS * HEADS
