from __future__ import annotations

import dataclasses
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headscan.errors import QueryError, StoreError
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.store.tables import TABLES
from tests.numbers.conftest import (
    HEADS,
    LAYERS,
    SEQUENCES,
    Scan,
    head_table,
    make_profiles,
    scan_record,
    sequence_table,
    write_scan,
)


def _rows(store: Store, table: str) -> int:
    return store.query(f"FROM {table}").num_rows


def test_a_stored_scan_is_read_back_unchanged(scan: Scan) -> None:
    run = scan.store.resolve_run()
    assert (run["run_id"], run["model"], run["corpus"], run["status"]) == (scan.run_id, "tiny", "texts", "finished")
    assert (run["report"], run["total_shards"], run["corpus_hash"]) == ({"empty": 1}, 2, "corpus")
    assert run["finished_shards"] == 2 and run["finished_at"] >= run["started_at"]
    shards = scan.store.query("FROM shards ORDER BY shard").to_pylist()
    assert [(s["sequences"], s["head_rows"]) for s in shards] == [(15, 15 * 12), (8, 8 * 12)]
    assert [s["tokens"] for s in shards] == [sum(10 + n for n in r) for r in (range(15), range(15, 23))]
    rows = scan.store.query("SELECT * FROM head_statistics ORDER BY sequence, layer, head")
    for name, values in scan.stats.items():
        np.testing.assert_array_equal(rows[name].to_numpy().reshape(SEQUENCES, LAYERS, HEADS), values)
    assert rows["relative_entropy"].null_count == 1


def test_the_same_run_is_resumed_and_another_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "new.duckdb")
    first = store.begin_run(scan_record(config={"sink": 4}, grid=[{"site": "self", "layer": 0}]))
    assert (first.resumed, first.status, first.shards) == (False, "running", {})
    store.add_shards(first.run_id, [ShardToWrite(ShardRecord(3, "c3"), sequence_table(0, 2), pa.table(_no_heads()))])
    again = store.begin_run(scan_record())
    assert (again.run_id, again.resumed, again.status, again.shards) == (first.run_id, True, "running", {3: "c3"})
    assert store.resolve_run(first.run_id)["config"] == {"sink": 4}
    others = [store.begin_run(r) for r in (scan_record("f1"), dataclasses.replace(scan_record(), kind="evaluate"))]
    assert len({first.run_id, *(o.run_id for o in others)}) == 3
    assert not any(o.resumed or o.shards for o in others)


def _no_heads() -> dict[str, pa.Array]:
    return {c: pa.array([], pa.int32()) for c in ("sequence", "layer", "head", "kv_head")} | {
        "site": pa.array([], pa.string())
    }


def test_a_failed_run_resumes_and_a_finished_one_stays_finished(scan: Scan) -> None:
    assert scan.store.begin_run(scan_record()).status == "finished"
    assert scan.store.resolve_run()["status"] == "finished"
    scan.store.finish_run(scan.run_id, status="failed")
    assert scan.store.resolve_run()["report"] == {"empty": 1}
    assert scan.store.begin_run(scan_record()).status == "running"
    run = scan.store.resolve_run()
    assert run["status"] == "running" and run["finished_at"] is None


def test_a_shard_is_counted_once(scan: Scan) -> None:
    before = scan.store.query("FROM head_summary ORDER BY layer, head")
    record = ShardRecord(0, "c0")
    scan.store.add_shards(scan.run_id, [ShardToWrite(record, sequence_table(0, 15), head_table(scan.stats, 0, 15))])
    assert (_rows(scan.store, "sequences"), _rows(scan.store, "shards")) == (SEQUENCES, 2)
    assert scan.store.query("FROM head_summary ORDER BY layer, head") == before
    with pytest.raises(StoreError, match=r"hash changed \(stored c0\)"):
        scan.store.add_shards(
            scan.run_id, [ShardToWrite(ShardRecord(0, "changed"), sequence_table(0, 15), head_table(scan.stats, 0, 15))]
        )


@pytest.mark.parametrize("fault", ["unknown", "missing", "too large", "too long", "no run"])
def test_a_shard_that_does_not_fit_leaves_nothing(scan: Scan, fault: str) -> None:
    heads = head_table(scan.stats, 0, 1)
    run_id = scan.run_id
    if fault == "unknown":
        heads, message = heads.append_column("surprise", pa.array([1.0] * len(heads))), "Add or remove surprise"
    elif fault == "missing":
        heads, message = heads.drop_columns(["kv_head"]), "Add or remove kv_head"
    elif fault == "too large":
        heads, message = heads.set_column(2, "layer", pa.array([10**6] * len(heads))), "out of range"
    elif fault == "too long":
        heads = heads.append_column("mass_by_distance", pa.array([[0.05] * 21] * len(heads)))
        message = "length 21 to .* length 20"
    else:
        run_id, message = "nobody", "no run nobody"
    with pytest.raises(StoreError, match=message):
        scan.store.add_shards(run_id, [ShardToWrite(ShardRecord(5, "c5"), sequence_table(90, 1), heads)])
    assert (_rows(scan.store, "sequences"), _rows(scan.store, "shards")) == (SEQUENCES, 2)


def test_shards_are_written_together_or_not_at_all(scan: Scan) -> None:
    def shard_to_write(number: int, heads: pa.Table) -> ShardToWrite:
        return ShardToWrite(ShardRecord(number, f"c{number}"), sequence_table(90 + number, 1), heads)

    heads = head_table(scan.stats, 0, 1)
    with pytest.raises(StoreError, match="Add or remove kv_head"):
        scan.store.add_shards(
            scan.run_id, [shard_to_write(5, heads), shard_to_write(6, heads.drop_columns(["kv_head"]))]
        )
    assert list(scan.store.begin_run(scan_record()).shards) == [0, 1]
    assert _rows(scan.store, "head_statistics") == SEQUENCES * LAYERS * HEADS
    scan.store.add_shards(scan.run_id, [shard_to_write(5, heads), shard_to_write(5, heads), shard_to_write(6, heads)])
    assert list(scan.store.begin_run(scan_record()).shards) == [0, 1, 5, 6]
    assert _rows(scan.store, "head_statistics") == (SEQUENCES + 2) * LAYERS * HEADS


def test_encoded_strings_are_taken(scan: Scan) -> None:
    heads = head_table(scan.stats, 0, 1)
    heads = heads.set_column(1, "site", heads["site"].dictionary_encode())
    scan.store.add_shards(scan.run_id, [ShardToWrite(ShardRecord(2, "c2"), sequence_table(23, 1), heads)])
    assert scan.store.query("SELECT DISTINCT site FROM head_statistics").to_pylist() == [{"site": "self"}]
    assert _rows(scan.store, "head_statistics") == (SEQUENCES + 1) * LAYERS * HEADS


def test_profiles_come_back_and_go_out_as_they_were(scan: Scan, tmp_path: Path) -> None:
    profiles = make_profiles(0, 3)
    profiles["argmax_offsets"][1, 2, 3, 4] = np.nan
    profiles["mass_by_distance"][2, 0, 0, 0] = np.inf
    other = write_scan(scan.store.path, profiles, "profiles")
    names = ", ".join(profiles)
    rows = scan.store.query(
        f"SELECT {names} FROM head_statistics WHERE run_id = ? ORDER BY sequence, layer, head", [other.run_id]
    )
    scan.store.export_parquet(tmp_path / "out")
    exported = pq.read_table(tmp_path / "out" / "head_statistics", filters=[("run_id", "=", other.run_id)])
    exported = exported.set_column(exported.schema.get_field_index("layer"), "layer", exported["layer"].cast("int16"))
    exported = exported.sort_by([("sequence", "ascending"), ("layer", "ascending"), ("head", "ascending")])
    for table in (rows, exported):
        for name, values in profiles.items():
            expected = [
                row.tolist() if np.isfinite(row).all() else None for row in values.reshape(-1, values.shape[-1])
            ]
            assert table[name].to_pylist() == expected
            assert table[name].null_count == (0 if name == "received_by_position" else 1)
    unmeasured = scan.store.query(f"SELECT {names} FROM head_statistics WHERE run_id = ?", [scan.run_id])
    assert all(unmeasured[name].null_count == len(unmeasured) for name in profiles)


def test_the_ledger_counts_rows_that_were_not_finite(scan: Scan) -> None:
    for shard, rows in ((2, 5), (3, 7)):
        record = ShardRecord(shard, f"c{shard}", nonfinite_rows=rows)
        scan.store.add_shards(scan.run_id, [ShardToWrite(record, sequence_table(30 + shard, 1), pa.table(_no_heads()))])
    assert scan.store.resolve_run()["nonfinite_rows"] == 12
    other = scan.store.begin_run(scan_record("f1")).run_id
    run = scan.store.resolve_run(other)
    assert (run["nonfinite_rows"], run["finished_shards"]) == (0, 0)


def test_runs_are_found_by_prefix_and_the_newest_finished_by_default(scan: Scan) -> None:
    newer = scan.store.begin_run(scan_record("f1")).run_id
    assert [run["run_id"] for run in scan.store.runs("scan")] == [newer, scan.run_id]
    assert scan.store.resolve_run()["run_id"] == scan.run_id
    scan.store.finish_run(newer)
    assert scan.store.resolve_run()["run_id"] == newer
    assert scan.store.resolve_run(scan.run_id[:6])["run_id"] == scan.run_id
    with pytest.raises(StoreError, match=r"has no scan run zzz\. Choose one of"):
        scan.store.resolve_run("zzz")
    with pytest.raises(StoreError, match="Run `headscan evaluate`"):
        scan.store.resolve_run(kind="evaluate")
    with scan.store.connect() as connection:
        connection.execute(
            "INSERT INTO runs BY NAME SELECT * REPLACE (run_id[:4] || 'rest' AS run_id, 'other' AS fingerprint)"
            " FROM runs WHERE run_id = ?",
            [scan.run_id],
        )
    with pytest.raises(StoreError, match=rf"2 scan runs match {scan.run_id[:4]}: .* Give more"):
        scan.store.resolve_run(scan.run_id[:4])


def test_a_recording_is_a_scan_where_it_is_named_or_alone(scan: Scan, tmp_path: Path) -> None:
    def record(store: Store) -> str:
        run_id = store.begin_run(dataclasses.replace(scan_record("prompts"), kind="recording")).run_id
        store.add_shards(
            run_id, [ShardToWrite(ShardRecord(0, "c0"), sequence_table(0, 2), head_table(scan.stats, 0, 2))]
        )
        store.finish_run(run_id)
        return run_id

    recording = record(scan.store)
    assert scan.store.resolve_run()["run_id"] == scan.run_id
    assert scan.store.resolve_run(recording[:8])["run_id"] == recording
    assert scan.store.resolve_run(None, "recording")["run_id"] == recording
    assert [run["run_id"] for run in scan.store.runs("scan")] == [scan.run_id]
    for view in ("head_scores", "head_summary"):
        assert scan.store.query(f"SELECT 1 FROM {view} WHERE run_id = ? LIMIT 1", [recording]).num_rows == 1
    alone = Store(tmp_path / "alone.duckdb")
    assert record(alone) == recording  # before that, the store was not there
    assert alone.resolve_run()["run_id"] == recording
    probe = alone.begin_run(dataclasses.replace(scan_record("probe"), kind="probe")).run_id
    with pytest.raises(StoreError, match=f"no scan run {probe}"):
        alone.resolve_run(probe)
    bare = Store(tmp_path / "bare.duckdb")
    bare.begin_run(dataclasses.replace(scan_record("probe"), kind="probe"))
    with pytest.raises(StoreError, match=r"has no recording run\. Run `headscan sweep`"):
        bare.resolve_run(kind="recording")
    with pytest.raises(StoreError, match=r"has no scan run 82e3, and no other\. Run `headscan scan` first"):
        bare.resolve_run("82e3")
    assert repr(bare) == f"Store('{bare.path}')"


def test_masks_are_kept_once(scan: Scan) -> None:
    mask_id = scan.store.add_mask("ten", [(1, 2), (0, 3), (1, 2)], run_id=scan.run_id, criterion="entropy", share=0.1)
    assert scan.store.add_mask("ten", [(0, 3), (1, 2)], run_id=scan.run_id, criterion="entropy", share=0.1) == mask_id
    for name in ("ten", mask_id):
        mask = scan.store.mask(name)
        assert (mask.heads, mask.site, mask.criterion, mask.share) == (((0, 3), (1, 2)), "self", "entropy", 0.1)
    with pytest.raises(StoreError, match="Choose another name"):
        scan.store.add_mask("ten", [(0, 0)])
    with pytest.raises(StoreError, match="has 0 heads"):
        scan.store.add_mask("none", [])
    with pytest.raises(StoreError, match=r"no mask nine\. Choose one of: ten"):
        scan.store.mask("nine")


def test_a_users_query_reads_the_store(scan: Scan) -> None:
    table = scan.store.query("FROM head_summary ORDER BY output_norm_ln LIMIT 10")
    assert table.num_rows == 10 and table["sequences"].to_pylist() == [SEQUENCES] * 10
    assert scan.store.query("SELECT report.empty::INTEGER AS n FROM runs").to_pylist() == [{"n": 1}]
    assert scan.store.query("-- nothing").num_rows == 0


def test_a_mistake_in_sql_is_reported_in_one_line(scan: Scan) -> None:
    with pytest.raises(QueryError, match=r"^the store has no table or view 'head_sumary'; near: head_summary"):
        scan.store.query("FROM head_sumary")
    with pytest.raises(QueryError, match=r"^the store has no table or view 'heads'; near: head_summary, head_scores"):
        scan.store.query("SELECT * FROM heads")
    with pytest.raises(QueryError, match=r"^Parser Error"):
        scan.store.query("SELEKT 1 FROM runs WHERE")


def test_parquet_holds_every_row(scan: Scan, tmp_path: Path) -> None:
    paths = [Path(path) for path in scan.store.export_parquet(tmp_path / "it's" / "out")]
    assert {p.stem for p in paths} == {*TABLES, "head_summary", "schema"} - {"head_importance"}  # which has no rows
    assert sorted(p.name for p in (tmp_path / "it's" / "out").iterdir()) == sorted(p.name for p in paths)
    for path in paths:
        if path.stem != "schema":
            assert pq.read_table(path).num_rows == _rows(scan.store, path.stem)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        scan.store.export_parquet(tmp_path / "file")


def test_connect_gives_a_plain_connection(scan: Scan) -> None:
    with scan.store.connect(read_only=True) as connection, pytest.raises(duckdb.InvalidInputException):
        connection.execute("DELETE FROM runs")
    assert _rows(scan.store, "runs") == 1


def test_a_block_of_one_transaction_inside_another_one_is_part_of_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    with pytest.raises(ZeroDivisionError), store.one_transaction():
        with store.one_transaction():
            store.add_mask("inner", [(0, 0)])
        store.add_mask("outer", [(0, 0)])
        raise ZeroDivisionError
    assert store.query("FROM masks").num_rows == 0
    with store.one_transaction(), store.one_transaction():
        store.add_mask("inner", [(0, 0)])
    assert store.query("FROM masks").num_rows == 1
