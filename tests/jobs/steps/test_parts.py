"""A corpus scanned in parts: each part resumes, and the merged store equals that of the undivided scan."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from headscan.cli.main import main
from headscan.errors import MergeError, StoreError
from headscan.model_spec import ModelSpec
from headscan.runs.run_context import PoolFactory, Run
from headscan.steps.corpus_step import CorpusRunError
from headscan.steps.run_corpus import CorpusRunResult
from headscan.steps.run_scan import run_scan
from headscan.steps.scan import Part, Scan
from headscan.store.merge_stores import merge_stores
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from tests.jobs.conftest import of_threads, refuse
from tests.jobs.steps.killed_scans import kill_after, stored_shards

#: The tables of a scan, and the columns of each that two equal scans may have different.
SCAN_TABLES = {
    "runs": ("config", "started_at", "finished_at", "writer", "provenance"),
    "shards": ("seconds", "worker", "finished_at"),
    "sequences": (),
    "head_statistics": (),
}


@pytest.fixture(scope="session")
def config(spec: ModelSpec, corpus_folder: Path) -> Scan:
    tokens = TokenConfig(40, mode="chunk", min_tokens=5, limit_sequences=18)
    return Scan(spec, CorpusSpec(str(corpus_folder)), tokens, shard_size=2, statistics=("entropy",))


def run(config: Scan, path: Path, part: str | None = None, make_pool: PoolFactory = of_threads) -> CorpusRunResult:
    config = dataclasses.replace(config, part=None if part is None else Part.parse(part))
    return run_scan(config, Run(config.model, Store(path), make_pool, batch_tokens=150))


@pytest.fixture(scope="session")
def whole(config: Scan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "s.duckdb"
    run(config, path)
    return path


@pytest.fixture(scope="session")
def parts(config: Scan, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The stores of three parts."""
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / f"{number}.duckdb" for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        run(config, path, f"{number}/3")
    return paths


def stores(paths: list[Path]) -> list[Store]:
    return [Store(path) for path in paths]


def row_differences(one: Path, other: Path) -> dict[str, int]:
    """Return the number of rows that only one of two stores has, by table of a scan."""
    found = {}
    with duckdb.connect() as connection:
        for name, path in (("a", one), ("b", other)):
            connection.execute(f"ATTACH '{path}' AS {name} (READ_ONLY)")
        for table, different in SCAN_TABLES.items():
            columns = f"* EXCLUDE ({', '.join(different)})" if different else "*"
            a, b = (f"SELECT {columns} FROM {name}.{table}" for name in ("a", "b"))
            only = f"(({a}) EXCEPT ALL ({b})) UNION ALL (({b}) EXCEPT ALL ({a}))"
            assert connection.sql(f"SELECT count(*) FROM ({a})").fetchall() > [(0,)]
            [(found[table],)] = connection.sql(f"SELECT count(*) FROM ({only})").fetchall()
    return found


def test_merged_parts_equal_the_undivided_scan(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    into = tmp_path / "all.duckdb"
    [merged] = merge_stores(stores(parts), Store(into))
    assert (merged.status, merged.shards) == ("finished", merged.added_shards)
    assert row_differences(into, whole) == dict.fromkeys(SCAN_TABLES, 0)
    [mine], [other] = Store(into).runs(), Store(whole).runs()
    assert mine["config"].pop("parts") == ["1/3", "2/3", "3/3"]
    assert mine["config"] == other["config"]
    summary = "from head_summary order by layer, head"
    for ours, theirs in zip(
        Store(into).query(summary).to_pylist(), Store(whole).query(summary).to_pylist(), strict=True
    ):
        assert ours == pytest.approx(theirs)  # the order of a sum's terms may differ


def test_a_part_is_no_finished_scan(parts: list[Path], config: Scan, tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    first = run(config, path, "2/3")
    assert (str(first.part), first.measured > 1) == ("2/3", True)
    [found] = Store(path).runs()
    assert (found["status"], found["config"]["parts"]) == ("part", ["2/3"])
    assert found["total_shards"] > found["finished_shards"] == first.measured
    assert Store(path).query("from head_summary").num_rows == 0
    assert Store(path).query("select distinct shard % 3 as rest from shards")["rest"].to_pylist() == [1]
    assert run(config, path, "2/3", refuse).already_done


@pytest.mark.parametrize("rest", [None, "1/2"])
def test_the_rest_of_a_part_completes_the_run(rest: str | None, whole: Path, config: Scan, tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    first = run(config, path, "2/2")
    completed = run(config, path, rest)
    assert completed.part is None and completed.skipped == (first.measured if rest is None else 0)
    assert Store(path).runs()[0]["config"].get("parts") == ["1/2", "2/2"][rest is None :]
    assert row_differences(path, whole) == dict.fromkeys(SCAN_TABLES, 0)


def test_a_part_continues_a_merge_of_which_no_source_read_all(
    parts: list[Path], whole: Path, config: Scan, tmp_path: Path
) -> None:
    cut, merged = tmp_path / "cut.duckdb", tmp_path / "merged.duckdb"
    shutil.copy(parts[0], cut)
    with Store(cut).connect() as connection:
        connection.execute("UPDATE runs SET status = 'running', total_shards = NULL, report = NULL")
    merge_stores(stores([cut]), Store(merged))
    assert run(config, merged, "1/3").measured == 0
    run(config, merged, "2/3")
    run(config, merged, "3/3")
    assert row_differences(merged, whole) == dict.fromkeys(SCAN_TABLES, 0)


def test_more_parts_than_shards_are_empty_and_shards_have_one_size_everywhere(config: Scan, tmp_path: Path) -> None:
    path, empty = tmp_path / "s.duckdb", tmp_path / "empty.duckdb"
    assert run(config, empty, "500/500").measured == 0
    assert Store(empty).runs()[0]["status"] == "part"
    run(dataclasses.replace(config, shard_size=None), path, "1/2")
    [found] = Store(path).runs()
    assert found["config"]["shard_size"] == 16  # an undivided scan would have shards of 64


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "-1/8", "3/0", "a/b"])
def test_a_part_is_a_number_of_a_number(text: str) -> None:
    with pytest.raises(CorpusRunError, match=f"'{text}' is no part"):
        Part.parse(text)


def test_a_merge_of_some_parts_waits_for_the_others(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    into = tmp_path / "all.duckdb"
    [merged] = merge_stores(stores(parts[1:]), Store(into))
    assert merged.status == "part"
    assert merged.total_shards is not None and merged.shards < merged.total_shards
    [merged] = merge_stores(stores(parts), Store(into))
    assert merged.status == "finished" and merged.added_shards < merged.shards
    assert row_differences(into, whole) == dict.fromkeys(SCAN_TABLES, 0)


@pytest.mark.slow
def test_a_killed_merge_resumes(
    parts: list[Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge stops after each number of transactions in turn; what landed is whole shards."""
    monkeypatch.setattr("headscan.store.merge_stores._GROUP_ROWS", 1)
    into = tmp_path / "all.duckdb"
    opened = Store.merge_transaction
    left: Iterator[int] = iter(())

    class Killed(BaseException):
        pass

    def transaction(store: Store) -> Any:
        if next(left, None) is None:
            raise Killed
        return opened(store)

    stops = 0
    with monkeypatch.context() as patch:
        patch.setattr(Store, "merge_transaction", transaction)
        for allowed in (1, 1, 2, 3, 100):
            left = iter(range(allowed))
            try:
                [merged] = merge_stores(stores(parts), Store(into))
                break
            except Killed:
                stops += 1
                if into.exists():
                    counts = "select count(*) from (select shard, head_rows, (select count(*) from head_statistics join"
                    counts += " sequences using (run_id, sequence) where sequences.shard = s.shard) as n from shards s)"
                    assert Store(into).query(f"{counts} where n <> head_rows").to_pylist() == [{"count_star()": 0}]
    assert stops > 3
    assert merged.status == "finished"
    assert row_differences(into, whole) == dict.fromkeys(SCAN_TABLES, 0)


def test_other_rows_of_a_shard_are_a_contradiction(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.duckdb"
    changed.write_bytes(whole.read_bytes())
    with duckdb.connect(str(changed)) as connection:
        connection.execute("UPDATE head_statistics SET entropy = entropy + 1e-6 WHERE sequence = 9 AND head = 3")
    run_id = Store(whole).runs()[0]["run_id"]
    into = tmp_path / "all.duckdb"
    with pytest.raises(MergeError, match=rf"run {run_id}: shard 4 has other rows of head_statistics in .*changed"):
        merge_stores([*stores(parts), Store(changed)], Store(into))
    assert row_differences(into, whole) == dict.fromkeys(SCAN_TABLES, 0)
    with duckdb.connect(str(changed)) as connection:
        connection.execute("UPDATE shards SET content_hash = 'other' WHERE shard = 2")
    with pytest.raises(MergeError, match=rf"run {run_id}: shard 2 has other text"):
        merge_stores([Store(changed)], Store(into))


def test_parts_of_other_settings_are_refused(parts: list[Path], tmp_path: Path) -> None:
    merge_stores([Store(parts[0])], Store(tmp_path / "all.duckdb"))
    for number, (change, words) in enumerate(
        (
            ("dtype = 'bfloat16'", "other dtype bfloat16 and float32"),
            ("config = json_merge_patch(config, '{\"shard_size\": 7}')", "other shard_size 7 and 2"),
            ("corpus_hash = 'x-y'", "other corpus_hash x-y and"),
            ("total_shards = 99", "other total_shards 99 and"),
        )
    ):
        other = tmp_path / f"{number}.duckdb"
        other.write_bytes(parts[1].read_bytes())
        with duckdb.connect(str(other)) as connection:
            connection.execute(f"UPDATE runs SET {change}")
        with pytest.raises(MergeError, match=words):
            merge_stores([Store(other)], Store(tmp_path / "all.duckdb"))
    assert set(Store(tmp_path / "all.duckdb").query("from shards")["shard"].to_pylist()) == set(
        Store(parts[0]).query("from shards")["shard"].to_pylist()
    )


def test_devices_of_all_parts_are_recorded(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.duckdb"
    other.write_bytes(parts[1].read_bytes())
    with duckdb.connect(str(other)) as connection:
        connection.execute("UPDATE runs SET provenance = replace(provenance::VARCHAR, '\"cpu\"', '\"tpu\"')")
    lines: list[str] = []
    merge_stores(
        [*stores(parts[:1]), Store(other), *stores(parts[2:])], Store(tmp_path / "all.duckdb"), say=lines.append
    )
    assert any("device cpu -> tpu" in line for line in lines)
    [merged] = Store(tmp_path / "all.duckdb").runs()
    assert sorted(entry["device"] for entry in merged["provenance"]) == ["cpu", "tpu"]


def test_stores_are_named_once_and_exist(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="named twice"):
        merge_stores(stores([parts[0], parts[0]]), Store(tmp_path / "all.duckdb"))
    with pytest.raises(MergeError, match="named twice"):
        merge_stores(stores(parts), Store(parts[0]))
    with pytest.raises(StoreError, match="no store at"):
        merge_stores(stores([tmp_path / "absent.duckdb"]), Store(tmp_path / "all.duckdb"))
    assert not (tmp_path / "all.duckdb").exists()


def test_a_killed_part_resumes_and_merges(
    config: Scan, whole: Path, parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "2.duckdb"
    options = "--max-tokens 40 --mode chunk --min-tokens 5 --limit-sequences 18 --shard-size 2 --batch-tokens 150"
    command = ["scan", config.model.source, "--corpus", config.corpus.name, *options.split(), "--part", "2/3"]
    command += ["--statistics", "entropy", "--store", str(path)]
    seen = []
    kill_after(1, command, lambda: seen.append(Store(path).runs()[0]["status"]))
    assert [*seen, Store(path).runs()[0]["status"]] == ["running", "interrupted"]
    assert 1 <= stored_shards(path) < Store(parts[1]).runs()[0]["finished_shards"]
    assert main(command) == 0
    assert "part 2/3 of run" in capsys.readouterr().out
    into = tmp_path / "all.duckdb"
    assert main(["merge", str(parts[0]), str(path), str(parts[2]), "--into", str(into)]) == 0
    assert "finished" in capsys.readouterr().out
    assert row_differences(into, whole) == dict.fromkeys(SCAN_TABLES, 0)
