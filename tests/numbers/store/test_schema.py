"""The schema as declared; a store with other tables, views or functions is refused, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest

from headscan.catalog import PROFILES, SCORES, STATISTICS
from headscan.cli.main import main
from headscan.errors import NotAStoreError, StoreChangedError, StoreVersionError
from headscan.store.arm_views import ARM_VIEWS
from headscan.store.connection import DIGESTS, declared, digest, schema_statements, verify
from headscan.store.macros import MACROS
from headscan.store.scan_tables import HEAD_STATISTICS, table_statement
from headscan.store.store import Store, short_hash
from headscan.store.tables import SCHEMA_VERSION, TABLES
from headscan.store.views import ALL_RUNS, VIEWS
from tests.numbers.conftest import HEADS, LAYERS, Scan, scan_record
from tests.numbers.store.write_digest import CONNECTION, with_digest
from tests.sources import ROOT


def test_head_statistics_has_the_catalogues_columns_and_their_formulas(scan: Scan) -> None:
    columns = scan.store.query(
        "SELECT column_name, data_type, comment FROM duckdb_columns() WHERE table_name = 'head_statistics'"
        " ORDER BY column_index"
    ).to_pylist()
    names = [c["column_name"] for c in columns]
    assert names == ["run_id", "sequence", "site", "layer", "head", "kv_head", *STATISTICS, *PROFILES]
    for column in columns[6 : 6 + len(STATISTICS)]:
        statistic = STATISTICS[column["column_name"]]
        assert column["data_type"] == "FLOAT"
        assert statistic.formula in column["comment"] and f"[{statistic.unit}]" in column["comment"]
    for column in columns[6 + len(STATISTICS) :]:
        profile = PROFILES[column["column_name"]]
        assert column["data_type"] == "FLOAT[]"
        assert profile.formula in column["comment"] and all(label in column["comment"] for label in profile.bins)


def test_every_table_and_view_is_commented(scan: Scan) -> None:
    found = scan.store.query(
        "SELECT table_name AS name, comment FROM duckdb_tables() WHERE NOT internal"
        " UNION ALL SELECT view_name, comment FROM duckdb_views() WHERE NOT internal"
    ).to_pylist()
    assert {row["name"] for row in found} == {*TABLES, *VIEWS}
    assert all(row["comment"] for row in found)


def test_every_function_and_every_column_of_an_evaluation_is_commented(scan: Scan) -> None:
    functions = scan.store.query(
        "SELECT function_name AS name, comment FROM duckdb_functions() WHERE NOT internal"
    ).to_pylist()
    assert {macro.name for macro in MACROS} <= {row["name"] for row in functions}
    assert all(row["comment"] for row in functions)
    tables = [*TABLES, *ARM_VIEWS, *(ALL_RUNS + view for view in ARM_VIEWS)]
    columns = scan.store.query(
        "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE list_contains(?, table_name)", [tables]
    ).to_pylist()
    assert {row["table_name"] for row in columns} == set(tables)
    assert [row for row in columns if not row["comment"]] == []


def test_views_name_their_columns_as_the_user_types_them(scan: Scan) -> None:
    scores = scan.store.query("FROM head_scores LIMIT 0").column_names
    assert scores == ["run_id", "sequence", "site", "layer", "head", "kv_head", *SCORES]
    summary = scan.store.query("FROM head_summary LIMIT 0").column_names
    plain = [name for name in STATISTICS if name not in SCORES]
    first = ["run_id", "model", "corpus", "site", "layer", "head", "kv_head", "sequences", *SCORES, *plain]
    assert summary[: len(first)] == first
    rest = {f"{n}_{s}" for n in (*SCORES, *plain) for s in ("std", "p10", "median", "p90")}
    assert set(summary[len(first) :]) == rest | {f"{s}_inactive" for s in SCORES}
    assert len(summary) == len(set(summary))


def test_keys_refuse_a_second_row() -> None:
    connection = duckdb.connect()
    for statement in schema_statements():
        connection.execute(statement)
    row = "INSERT INTO shards VALUES ('r', 0, 'h', 1, 1, 0, 1, NULL, NULL, now())"
    connection.execute(row)
    with pytest.raises(duckdb.ConstraintException):
        connection.execute(row)
    with pytest.raises(duckdb.ConstraintException):
        connection.execute("INSERT INTO mask_heads (mask_id, site, layer) VALUES ('m', 'self', 0)")


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
        (["CREATE TYPE JSON AS INTEGER"], "type JSON is not part of the schema"),
        (["ALTER TABLE runs ADD COLUMN mine INTEGER"], "column runs.mine is not part of the schema"),
        (["ALTER TABLE runs ALTER report SET DEFAULT '{}'"], "column runs.report differs"),
        (["CREATE INDEX mine ON shards (tokens)"], "index mine of shards is not part of the schema"),
        (
            ["DROP TABLE shards", "CREATE VIEW shards AS SELECT content AS run_id FROM read_text('{secret}')"],
            "table shards is missing",
        ),
        (["DROP TABLE units", "CREATE TABLE units (run_id VARCHAR NOT NULL)"], "column units.unit is missing"),
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
    verbs = (["status"], ["sql", "FROM head_summary"], ["rank"], ["report", "--out", str(tmp_path / "r.html")])
    # What reads a file is refused everywhere; for the other changes, writing and one verb say that they are noticed.
    everywhere = any("{secret}" in statement for statement in statements)
    for attempt in attempts if everywhere else attempts[1:2]:
        with pytest.raises(StoreChangedError) as caught:
            attempt()
        assert named in str(caught.value) and "\n" not in str(caught.value)
    for verb in verbs if everywhere else verbs[1:2]:
        assert main([*verb, "--store", str(path)]) == 2
        out, err = capsys.readouterr()
        assert named in err and "secret words" not in out + err and "Traceback" not in err
    assert path.read_bytes() == before


def test_a_change_of_tables_raises_the_schema_version() -> None:
    """Columns of the catalogue need none; see below."""
    fixed = tuple(c for c in HEAD_STATISTICS.columns if c.name not in (*STATISTICS, *PROFILES))
    tables = {**TABLES, HEAD_STATISTICS.name: replace(HEAD_STATISTICS, columns=fixed)}
    found = SCHEMA_VERSION, short_hash(*map(table_statement, tables.values()))
    assert found == (1, "543ac60d9ff3"), "the tables have changed: raise SCHEMA_VERSION, and write both numbers here"


def test_the_digest_of_the_definitions_is_that_of_the_schema() -> None:
    assert DIGESTS.get(duckdb.__version__) == digest(declared()), "run `make schema`"


def test_a_written_digest_replaces_those_of_an_earlier_schema() -> None:
    source = CONNECTION.read_text(encoding="utf-8")
    assert with_digest(source, duckdb.__version__, digest(declared())) == source

    def table(**digests: str) -> str:
        entries = [f'"{each}": "{value}"' for each, value in digests.items()]
        several = "\n" + "".join(f"    {entry},\n" for entry in entries)
        return f"DIGESTS: Mapping = {{{entries[0] if len(entries) == 1 else several}}}\n"

    assert with_digest(table(a="1"), "a", "1") == table(a="1")
    assert with_digest(table(a="1"), "b", "2") == table(a="1", b="2")
    assert with_digest(table(a="1", b="2"), "b", "3") == table(b="3")


def test_a_store_with_the_known_digest_is_not_compared_with_a_new_schema(
    scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscan.store.connection.declared", lambda: pytest.fail("the schema was made"))
    with scan.store.connect(read_only=True) as connection:
        verify(connection, scan.store.path)


@pytest.mark.parametrize(
    "use", [lambda store: store.query("FROM runs"), lambda store: store.add_mask("one", [(0, 0)], site="self")]
)
def test_a_store_that_changes_between_two_uses_is_compared_again(scan: Scan, use: Callable[[Store], object]) -> None:
    use(scan.store)
    alter(scan.store.path, "PRAGMA disable_checkpoint_on_shutdown", "CREATE MACRO avg(x) AS 42")
    with pytest.raises(StoreChangedError, match="function avg is not part of the schema"):
        use(scan.store)
    alter(scan.store.path, "DROP MACRO avg")
    use(scan.store)


def test_a_long_list_of_differences_is_cut(scan: Scan) -> None:
    alter(scan.store.path, *(f"DROP VIEW {view}" for view in reversed(VIEWS)))
    with pytest.raises(
        StoreChangedError, match=rf"is missing and {len(VIEWS) - 5} more\. If a newer headscan wrote it"
    ):
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


@pytest.mark.parametrize("other", ["duckdb_version", "views"])
def test_views_of_another_duckdb_or_headscan_are_rewritten(scan: Scan, other: str) -> None:
    """DuckDB 1.5 and 2.0 write the SQL of one view differently."""
    before = scan.store.query("FROM head_summary ORDER BY layer, head")
    alter(
        scan.store.path,
        "CREATE OR REPLACE VIEW head_summary AS SELECT 'in the words of another version' AS words",
        "DROP VIEW all_head_summary",
        f"UPDATE meta SET value = '1.5.6' WHERE key = '{other}'",
    )
    assert scan.store.query("FROM head_summary ORDER BY layer, head") == before
    assert scan.store.query("SELECT value FROM meta WHERE value = '1.5.6'").num_rows == 0


def test_not_even_a_store_with_old_views_runs_its_own_functions(scan: Scan) -> None:
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


def test_a_score_that_is_new_is_computed_for_finished_scans(scan: Scan) -> None:
    """In a process whose catalogue has three more scores of one statistic: with its name, another, and a normaliser."""
    code = """if True:
        import json, sys
        from headscan import catalog
        for name, denominator in (
            ("self_weight", {}), ("weight_on_itself", {}),
            ("self_weight_ln", {"normaliser": "self_weight", "over": "layer"}),
        ):
            catalog.SCORES[name] = catalog.Score(
                name, paper_name="-", statistic="self_weight", **denominator, inactive="high", source="test"
            )
        from headscan.ranking.head_ranking import rank_heads, thresholds
        from headscan.store.store import Store
        store = Store(sys.argv[1])
        more = "('self_weight_ln', 'weight_on_itself')"
        def count(): return store.query(f"FROM head_summaries WHERE measure NOT IN {more}").num_rows
        answers, counts = [], []
        for step in ("before", "after"):
            counts.append(count())
            for name in ("self_weight", "weight_on_itself", "self_weight_ln"):
                heads = [head.value for head in rank_heads(store, "RUN", name)]
                answers.append([heads, thresholds(store, "RUN", name, [0.05, 0.33])])
            store.summarise("RUN")
        print(json.dumps([counts, answers]))
    """.replace("RUN", scan.run_id)

    stored = scan.store.query("FROM head_summaries").num_rows
    words = [sys.executable, "-c", code, str(scan.store.path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    counts, answers = json.loads(done.stdout)
    assert counts == [0, stored]
    values = scan.stats["self_weight"].astype(np.float64)
    scores = [values, values, values / values.mean(axis=2, keepdims=True)]
    for (heads, limits), score in zip(answers, scores * 2, strict=True):
        assert heads == pytest.approx(np.sort(score.mean(axis=0), axis=None)[::-1])
        assert limits == pytest.approx(np.quantile(score, [0.95, 0.67]))


def test_a_statistic_that_is_new_has_its_column_without_a_version(scan: Scan) -> None:
    """In a process whose catalogue has one more statistic and profile. This process is then the headscan without."""
    code = """if True:
        import sys
        from headscan import catalog
        catalog.STATISTICS["marks"] = catalog.Statistic("marks", "-", "share", "attention", "test")
        catalog.PROFILES["marked"] = catalog.Profile("marked", "-", ("0", "1"), "test")
        from headscan.store.store import Store
        store = Store(sys.argv[1])
        numbers = "count(*) AS rows, count(marks) + count(marked) AS values"
        (row,) = store.query(f"SELECT {numbers} FROM head_statistics").to_pylist()
        print(*row.values(), store.query("SELECT marks FROM head_summary").num_rows)
    """
    before = scan.store.query("FROM head_statistics")
    words = [sys.executable, "-c", code, str(scan.store.path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(before.num_rows), "0", str(LAYERS * HEADS)]
    content = scan.store.path.read_bytes()
    with pytest.raises(StoreChangedError, match=r"head_statistics\.marks is not part of .* newer headscan .* install"):
        scan.store.runs()
    assert scan.store.path.read_bytes() == content
    with duckdb.connect(str(scan.store.path), read_only=True) as connection:
        assert connection.sql("SELECT * EXCLUDE (marks, marked) FROM head_statistics").to_arrow_table() == before


#: As another version of DuckDB leaves a store.
OF_ANOTHER_DUCKDB = (
    "CREATE OR REPLACE VIEW head_summary AS SELECT 'in the words of another version' AS words",
    "UPDATE meta SET value = '1.5.6' WHERE key = 'duckdb_version'",
)


def test_views_of_a_store_with_changed_tables_stay(scan: Scan) -> None:
    alter(scan.store.path, *OF_ANOTHER_DUCKDB, "ALTER TABLE shards DROP worker")
    with pytest.raises(StoreChangedError, match=r"column shards\.worker is missing"):
        scan.store.runs()
    with duckdb.connect(str(scan.store.path), read_only=True) as connection:
        assert connection.execute("FROM head_summary").fetchall() == [("in the words of another version",)]


def test_views_of_a_read_only_store_need_a_copy(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can write to read-only files, so `os.access` is replaced."""
    alter(scan.store.path, *OF_ANOTHER_DUCKDB)
    monkeypatch.setattr("headscan.store.connection.os.access", lambda path, mode: False)
    content = scan.store.path.read_bytes()
    with pytest.raises(StoreVersionError, match=r"read-only\. Copy the store to a folder that you can write to"):
        scan.store.runs()
    assert scan.store.path.read_bytes() == content


def test_two_processes_rewrite_views_at_once(scan: Scan) -> None:
    alter(scan.store.path, *OF_ANOTHER_DUCKDB)
    code = "import sys; from headscan.store.store import Store; print(len(Store(sys.argv[1]).runs()))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(scan.store.path)], cwd=ROOT, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120) for process in processes] == [("1\n", "")] * 2
    assert scan.store.query("FROM head_summary").num_rows == LAYERS * HEADS


def test_a_file_that_is_damaged_ends_in_one_line(scan: Scan) -> None:
    content = bytearray(scan.store.path.read_bytes())
    content[12288 : len(content) // 2] = bytes(len(content) // 2 - 12288)
    scan.store.path.write_bytes(content)
    with pytest.raises((NotAStoreError, Exception)) as caught:
        scan.store.runs()
    assert type(caught.value).__module__ == "headscan.errors" and "\n" not in str(caught.value)
