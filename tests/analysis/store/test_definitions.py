"""A store whose tables, views or functions are not those of the schema is refused, by name."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from headscan.analysis.errors import NotAStoreError, StoreChangedError
from headscan.analysis.schema.views import VIEWS
from headscan.pipelines.cli.main import main
from tests.analysis.conftest import Scan, scan_record


def alter(path: Path, *statements: str) -> None:
    with duckdb.connect(str(path)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        (["CREATE OR REPLACE VIEW head_summary AS FROM read_text('{secret}')"], "view head_summary differs"),
        (["DROP VIEW head_scores"], "view head_scores is missing"),
        (["CREATE OR REPLACE MACRO task_scopes(task, recall) AS [task]"], "function task_scopes differs"),
        (["CREATE MACRO avg(x) AS 42"], "function avg is not part of the schema"),
        (["CREATE MACRO runs() AS TABLE SELECT 1"], "function runs is not part of the schema"),
        (["CREATE MACRO duckdb_views() AS TABLE SELECT 1"], "function duckdb_views is not part of the schema"),
        (["CREATE TYPE JSON AS INTEGER"], "type JSON is not part of the schema"),
        (["ALTER TABLE runs ADD COLUMN mine INTEGER"], "column runs.mine is not part of the schema"),
        (["ALTER TABLE runs ALTER report TYPE VARCHAR"], "column runs.report differs"),
        (["ALTER TABLE runs ALTER report SET DEFAULT '{}'"], "column runs.report differs"),
        (["CREATE INDEX mine ON shards (tokens)"], "index mine of shards is not part of the schema"),
        (
            ["DROP TABLE shards", "CREATE VIEW shards AS SELECT content AS run_id FROM read_text('{secret}')"],
            "table shards is missing",
        ),
        (
            ["DROP TABLE responses", "CREATE TABLE responses (arm_id VARCHAR NOT NULL)"],
            "column responses.request is missing",
        ),
        (
            [
                'CREATE SCHEMA scan."system"',
                'CREATE SCHEMA scan."system".main',
                'CREATE MACRO scan."system".main.duckdb_views() AS TABLE SELECT 1',
            ],
            "function duckdb_views is not part of the schema",
        ),
    ],
)
def test_a_changed_definition_is_named(
    scan: Scan, tmp_path: Path, capsys: pytest.CaptureFixture[str], statements: list[str], named: str
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret words")
    path = scan.store.path
    alter(path, *(statement.replace("{secret}", str(secret)) for statement in statements))
    before = path.read_bytes()
    attempts = (
        scan.store.runs,
        lambda: scan.store.begin_run(scan_record()),
        lambda: scan.store.export_parquet(tmp_path),
    )
    for attempt in attempts:
        with pytest.raises(StoreChangedError) as caught:
            attempt()
        assert named in str(caught.value) and "\n" not in str(caught.value)
    for verb in (["status"], ["sql", "FROM head_summary"], ["rank"], ["report", "--out", str(tmp_path / "r.html")]):
        assert main([*verb, "--store", str(path)]) == 2
        out, err = capsys.readouterr()
        assert named in err and "secret words" not in out + err and "Traceback" not in err
    assert path.read_bytes() == before


def test_a_store_that_changes_between_two_queries_is_compared_again(scan: Scan) -> None:
    assert scan.store.query("FROM runs").num_rows == 1
    alter(scan.store.path, "PRAGMA disable_checkpoint_on_shutdown", "CREATE MACRO avg(x) AS 42")
    with pytest.raises(StoreChangedError, match="function avg is not part of the schema"):
        scan.store.query("FROM runs")
    alter(scan.store.path, "DROP MACRO avg")
    assert scan.store.query("FROM runs").num_rows == 1


def test_a_store_that_changes_between_two_writes_is_compared_again(scan: Scan) -> None:
    scan.store.add_mask("one", [(0, 0)], site="self", config={})
    alter(scan.store.path, "PRAGMA disable_checkpoint_on_shutdown", "CREATE MACRO avg(x) AS 42")
    with pytest.raises(StoreChangedError, match="function avg is not part of the schema"):
        scan.store.add_mask("two", [(0, 1)], site="self", config={})
    alter(scan.store.path, "DROP MACRO avg")
    scan.store.add_mask("two", [(0, 1)], site="self", config={})


def test_a_long_list_of_differences_is_cut(scan: Scan) -> None:
    alter(scan.store.path, *(f"DROP VIEW {view}" for view in reversed(VIEWS)))
    with pytest.raises(StoreChangedError, match=rf"is missing and {len(VIEWS) - 5} more\. Use a copy"):
        scan.store.runs()


def test_tables_and_views_of_ones_own_may_be_there(scan: Scan) -> None:
    alter(
        scan.store.path,
        "CREATE TABLE notes (text VARCHAR DEFAULT 'none', length INTEGER CHECK (length > 0))",
        "CREATE INDEX by_length ON notes (length)",
        "CREATE VIEW mine AS SELECT model FROM runs",
        "CREATE SCHEMA other",
        "CREATE MACRO other.avg(x) AS 42",
    )
    assert scan.store.query("FROM mine").to_pylist() == [{"model": "tiny"}]
    assert scan.store.query("SELECT avg(sequences) AS mean FROM head_summary").to_pylist() == [{"mean": 23.0}]
    scan.store.begin_run(scan_record("another"))
    assert len(scan.store.runs()) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW meta AS SELECT content AS key, filename AS value FROM read_text('{secret}')",
        "CREATE VIEW meta AS SELECT 'format' AS key, error('boom') AS value",
        "CREATE TABLE meta (key INTEGER[], value BLOB)",
        "CREATE TABLE meta AS SELECT 'format' AS key, 'headscan store' AS value",
        "CREATE TABLE meta AS FROM (VALUES ('format', 'headscan store'), ('schema_version', '-1')) rows(key, value)",
        "CREATE TABLE meta AS FROM (VALUES ('format', 'headscan store'), ('schema_version', NULL)) rows(key, value)",
    ],
)
def test_a_file_whose_meta_is_something_else_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str
) -> None:
    path = tmp_path / "other.duckdb"
    (tmp_path / "secret.txt").write_text("secret words")
    alter(path, "CREATE TABLE runs (a INTEGER)", statement.replace("{secret}", str(tmp_path / "secret.txt")))
    assert main(["sql", "FROM runs", "--store", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headscan: ") and "is a DuckDB file but not a headscan store" in err
    assert err.count("\n") == 1


def test_views_of_another_duckdb_are_rewritten(scan: Scan) -> None:
    """DuckDB 1.5 and 2.0 write the SQL of one view differently."""
    before = scan.store.query("FROM head_summary ORDER BY layer, head")
    alter(
        scan.store.path,
        "CREATE OR REPLACE VIEW head_summary AS SELECT 'in the words of another version' AS words",
        "UPDATE meta SET value = '1.5.6' WHERE key = 'duckdb_version'",
    )
    assert scan.store.query("FROM head_summary ORDER BY layer, head") == before
    versions = scan.store.query("SELECT value FROM meta WHERE key = 'duckdb_version'")["value"].to_pylist()
    assert versions == [duckdb.__version__]
    assert [p.name for p in scan.store.path.parent.iterdir()] == [scan.store.path.name], "views need no backup"


def test_not_even_an_old_store_runs_its_own_functions(scan: Scan) -> None:
    alter(
        scan.store.path,
        "CREATE MACRO avg(x) AS 42",
        "CREATE MACRO list_transform(a, b) AS error('boom')",
        "CREATE TYPE JSON AS INTEGER",
        "DELETE FROM meta WHERE key = 'duckdb_version'",
    )
    with pytest.raises(StoreChangedError, match="type JSON is not part of the schema"):
        scan.store.runs()
    alter(scan.store.path, "DROP TYPE JSON")
    assert scan.store.query("SELECT avg(sequences) AS mean FROM head_summary").to_pylist() == [{"mean": 23.0}]


def test_a_file_that_is_damaged_ends_in_one_line(scan: Scan) -> None:
    content = bytearray(scan.store.path.read_bytes())
    content[12288 : len(content) // 2] = bytes(len(content) // 2 - 12288)
    scan.store.path.write_bytes(content)
    with pytest.raises((NotAStoreError, Exception)) as caught:
        scan.store.runs()
    assert type(caught.value).__module__ == "headscan.analysis.errors" and "\n" not in str(caught.value)
