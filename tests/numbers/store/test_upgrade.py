"""A store of an older schema is brought up to date: every row stays, a backup is left, and it happens whole or not."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

import headscan.store.connection
from headscan.cli.main import main
from headscan.errors import StoreChangedError, StoreError, StoreVersionError
from headscan.store.connection import connected, migrate
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.store.tables import RENAMED, SCHEMA_VERSION, TABLES
from headscan.store.views import VIEWS
from headscan.verdicts.verdict_rows import read_verdict_rows, record_verdicts
from tests.numbers.conftest import HEADS, LAYERS, Scan, answer_table, scan_record
from tests.sources import ROOT
from tests.stores import begin_arm

DATA = ROOT / "tests/numbers/data"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The store of schema 5: a scan, a probe, a finished evaluation and a stopped one of the demo model."""
    path = tmp_path / "old.duckdb"
    path.write_bytes(gzip.decompress((DATA / "schema5.duckdb.gz").read_bytes()))
    return path


def tables_of(path: Path, names: dict[str, list[str]] | None = None) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of every table but meta (of the columns in ``names`` if given), read without headscan."""
    with duckdb.connect(str(path), read_only=True) as connection:
        names = names or columns_of(path)
        return {
            table: connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY ALL").fetchall()
            for table, columns in names.items()
        }


def columns_of(path: Path) -> dict[str, list[str]]:
    with duckdb.connect(str(path), read_only=True) as connection:
        rows = connection.execute(
            "SELECT table_name, list(column_name) FROM duckdb_columns() JOIN duckdb_tables() USING (table_name)"
            " WHERE table_name <> 'meta' GROUP BY 1"
        ).fetchall()
    return dict(rows)


def new_names(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same columns with the names of the current schema, in the same order."""
    names_of = {table: {old: new for new, old in renamed.items()} for table, renamed in RENAMED.items()}
    return {table: [names_of.get(table, {}).get(name, name) for name in columns] for table, columns in names.items()}


def version_of(path: Path) -> str:
    with duckdb.connect(str(path), read_only=True) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    assert row is not None
    return str(row[0])


def alter(path: Path, *statements: str) -> None:
    with duckdb.connect(str(path)) as connection:
        for statement in statements:
            connection.execute(statement)


def read(store: Store) -> None:
    assert len(store.runs()) == 4


def write(store: Store) -> None:
    assert not store.begin_run(scan_record("new")).resumed


@pytest.mark.parametrize("use", [read, write])
def test_every_row_stays_and_the_backup_is_the_old_file(old: Path, use: Callable[[Store], None]) -> None:
    content, names, before = old.read_bytes(), columns_of(old), tables_of(old)
    assert all(before.values()), "the old store has rows in every table"
    lines: list[str] = []
    use(Store(old, on_wait=lines.append))
    assert version_of(old) == str(SCHEMA_VERSION)
    backup = old.with_name("old.duckdb.schema5.backup")
    assert backup.read_bytes() == content
    assert lines == [f"upgrading {old} from schema 5 to {SCHEMA_VERSION}; the old file is {backup}"]
    assert sorted(old.parent.iterdir()) == [old, backup]
    assert "score" in names["arms"] and "zeroed_share" in names["responses"]
    after = tables_of(old, new_names(names))
    if use is write:
        (after["runs"],) = [[row for row in after["runs"] if row in before["runs"]]]
    assert after == before


def test_all_tables_views_and_commands_work_on_an_upgraded_store(old: Path, tmp_path: Path) -> None:
    store = Store(old)
    with store.reading():
        for name in (*TABLES, *VIEWS):
            store.query(f"FROM {name}")
        assert store.query("SELECT count(*) AS n FROM head_summary").to_pylist() == [{"n": 48}]
        assert store.query("SELECT count(DISTINCT arm) AS n FROM arm_summary").to_pylist() == [{"n": 5}]
        comments = store.query(
            "SELECT column_name FROM duckdb_columns() WHERE comment IS NULL AND table_name IN"
            " (SELECT table_name FROM duckdb_tables())"
        )
    assert comments.num_rows == 0
    out = str(tmp_path / "out")
    for verb in (
        ["status"],
        ["rank"],
        ["compare", "82e3"],
        ["report", "--out", f"{out}.html"],
        ["export", "parquet", "--out", out],
    ):
        assert main([*verb, "--store", str(old)]) == 0


def test_a_score_that_is_new_is_computed_for_finished_scans(scan: Scan) -> None:
    """In a process whose catalogue has three more scores of one statistic: with its name, another, and a normaliser.
    A scan that has all scores of the old version keeps its summary if the tables change. Neither needs a backup, as no
    row changes.
    """
    code = """if True:
        import json, sys
        from headscan import catalog
        if sys.argv[2] == "added":
            for name, denominator in (
                ("self_weight", {}), ("weight_on_itself", {}),
                ("self_weight_ln", {"normaliser": "self_weight", "over": "layer"}),
            ):
                catalog.SCORES[name] = catalog.Score(
                    name, paper_name="-", statistic="self_weight", **denominator, inactive="high", source="test"
                )
        from headscan.store import tables
        tables.SCHEMA_VERSION += int(sys.argv[3])
        from headscan.ranking.head_ranking import rank_heads, thresholds
        from headscan.store.store import Store
        store = Store(sys.argv[1])
        more = "('self_weight_ln', 'weight_on_itself')"
        def count(): return store.query(f"FROM head_summaries WHERE measure NOT IN {more}").num_rows
        answers, counts = [], []
        for step in ("before", "after"):
            counts.append(count())
            for name in ("self_weight", "weight_on_itself", "self_weight_ln") if sys.argv[2] == "added" else ():
                heads = [head.value for head in rank_heads(store, "RUN", name)]
                answers.append([heads, thresholds(store, "RUN", name, [0.05, 0.33])])
            store.summarise("RUN")
        print(json.dumps([counts, answers]))
    """.replace("RUN", scan.run_id)

    def run(scores: str, newer: int) -> Any:
        words = [sys.executable, "-c", code, str(scan.store.path), scores, str(newer)]
        return json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    stored = scan.store.query("FROM head_summaries").num_rows
    counts, answers = run("added", 0)
    assert [path.name for path in scan.store.path.parent.iterdir()] == [scan.store.path.name]
    assert counts == [0, stored]
    values = scan.stats["self_weight"].astype(np.float64)
    scores = [values, values, values / values.mean(axis=2, keepdims=True)]
    for (heads, limits), score in zip(answers, scores * 2, strict=True):
        assert heads == pytest.approx(np.sort(score.mean(axis=0), axis=None)[::-1])
        assert limits == pytest.approx(np.quantile(score, [0.95, 0.67]))
    assert run("unchanged", 1) == [[stored, stored], []]
    assert [path.name for path in scan.store.path.parent.iterdir()] == [scan.store.path.name]


def test_a_statistic_that_is_new_has_its_column_without_a_version(scan: Scan) -> None:
    """In a process whose catalogue has one more statistic and profile. This process is then the older headscan."""
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
    before = tables_of(scan.store.path)
    words = [sys.executable, "-c", code, str(scan.store.path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(before["head_statistics"])), "0", str(LAYERS * HEADS)]
    assert [path.name for path in scan.store.path.parent.iterdir()] == [scan.store.path.name], "no row changes"
    assert version_of(scan.store.path) == str(SCHEMA_VERSION)
    content = scan.store.path.read_bytes()
    with pytest.raises(StoreChangedError, match=r"head_statistics\.marks is not part of .* newer headscan .* install"):
        scan.store.runs()
    assert scan.store.path.read_bytes() == content
    names = columns_of(scan.store.path)
    names["head_statistics"] = [name for name in names["head_statistics"] if not name.startswith("mark")]
    assert tables_of(scan.store.path, names) == before


def test_an_upgraded_store_is_opened_like_a_new_one(old: Path) -> None:
    Store(old).runs()
    content = old.read_bytes()
    Store(old).runs()
    Store(old).query("FROM head_summary")
    assert old.read_bytes() == content
    assert len(list(old.parent.iterdir())) == 2


def test_rows_that_are_only_in_the_log_are_in_the_backup(old: Path) -> None:
    alter(old, "PRAGMA disable_checkpoint_on_shutdown", "UPDATE runs SET model = 'from the log'")
    assert Path(f"{old}.wal").stat().st_size > 0
    assert {run["model"] for run in Store(old).runs()} == {"from the log"}
    with duckdb.connect(f"{old}.schema5.backup", read_only=True) as connection:
        assert connection.execute("SELECT DISTINCT model FROM runs").fetchall() == [("from the log",)]


def test_a_backup_is_never_overwritten(old: Path) -> None:
    first = old.with_name("old.duckdb.schema5.backup")
    first.write_text("mine")
    content = old.read_bytes()
    Store(old).runs()
    assert first.read_text() == "mine"
    assert old.with_name("old.duckdb.schema5.2.backup").read_bytes() == content


def test_an_upgrade_that_is_interrupted_leaves_the_old_store(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [KeyboardInterrupt(), OSError(28, "No space left on device")]

    def interrupted(connection: duckdb.DuckDBPyConnection, path: Path, kinds: object = None) -> None:
        if kinds is not None:  # the check of the tables, halfway
            return
        assert connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() == (
            str(SCHEMA_VERSION),
        )
        raise errors.pop()

    content, before = old.read_bytes(), tables_of(old)
    while errors:
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, StoreError)):
            patch.setattr(headscan.store.connection, "verify", interrupted)
            Store(old).runs()
        assert (version_of(old), tables_of(old)) == ("5", before)
        assert old.read_bytes() == content
    read(Store(old))
    assert len(list(old.parent.iterdir())) == 2, "the backup of the first attempt serves the others, too"


def test_an_upgrade_that_is_killed_leaves_the_old_store(old: Path) -> None:
    before = tables_of(old)
    code = (
        "import os, sys; from headscan.store import connection, store\n"
        "connection.verify = lambda connection, path, kinds=None: kinds or os.kill(os.getpid(), 9)\n"
        "store.Store(sys.argv[1]).runs()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(old)], cwd=ROOT)
    assert done.returncode == -9
    assert (version_of(old), tables_of(old)) == ("5", before)
    read(Store(old))


def test_a_full_device_leaves_the_old_store(old: Path) -> None:
    """A limit on the size of files stands in for the device: the backup does not fit."""
    content = old.read_bytes()
    code = (
        "import resource, signal, sys; from headscan.errors import StoreFullError\n"
        "from headscan.store.store import Store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "try: Store(sys.argv[1]).runs()\n"
        "except StoreFullError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(old)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(f"cannot write {old}: no space left on its device"), done.stderr
    assert (list(old.parent.iterdir()), old.read_bytes()) == ([old], content)


def test_two_processes_upgrade_at_once(old: Path) -> None:
    code = "import sys; from headscan.store.store import Store; print(len(Store(sys.argv[1]).runs()))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(old)], cwd=ROOT, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120) for process in processes] == [("4\n", "")] * 2
    assert version_of(old) == str(SCHEMA_VERSION)
    assert len(list(old.parent.iterdir())) == 2


def test_a_read_only_store_error_has_a_fix(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can write to read-only files, so `os.access` is replaced."""
    monkeypatch.setattr(headscan.store.connection.os, "access", lambda path, mode: False)
    content = old.read_bytes()
    with pytest.raises(StoreVersionError, match=r"read-only\. Copy the store to a folder that you can write to"):
        Store(old).runs()
    assert (list(old.parent.iterdir()), old.read_bytes()) == ([old], content)


def test_recall_verdicts_by_questions_are_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    store = Store(path)
    with store.one_transaction():
        run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 2, 3)).run_id
        for name in ("baseline", "mask"):
            store.finish_arm(
                begin_arm(store, run_id, name, name), answer_table(np.array(["needle@512"] * 100), np.arange(100) < 39)
            )
        store.finish_run(run_id)
    record_verdicts(store, run_id)
    assert not any(row["informative"] for row in read_verdict_rows(store, run_id).stored if row["task"] == "needle")
    alter(
        path,
        "UPDATE meta SET value = 13 WHERE key = 'schema_version'",
        "UPDATE arm_verdicts SET informative = true WHERE task = 'needle'",
    )
    (needle,) = [row for row in read_verdict_rows(Store(path), run_id).computed if row["task"] == "needle"]
    assert needle["informative"] is False


def test_missing_tables_and_nullable_columns_are_added_to_an_even_older_store(old: Path) -> None:
    alter(
        old,
        "DROP VIEW head_profiles",
        "DROP VIEW behaviour_summary",
        "DROP MACRO last_crossing",
        "CREATE MACRO an_old_function(x) AS x",
        "DROP TABLE head_behaviours",
        "ALTER TABLE head_statistics DROP argmax_offsets",
        "ALTER TABLE runs DROP attention_path",
        "UPDATE meta SET value = '3' WHERE key = 'schema_version'",
    )
    store = Store(old)
    read(store)
    assert store.query("SELECT count(attention_path) AS n FROM runs").to_pylist() == [{"n": 0}]
    assert store.query("FROM head_behaviours").num_rows == 0
    assert old.with_name("old.duckdb.schema3.backup").exists()
    write(store)


def test_an_impossible_upgrade_names_the_column(old: Path) -> None:
    alter(
        old,
        "ALTER TABLE sequences DROP truncated",
        "ALTER TABLE sequences ALTER tokens TYPE BIGINT",
        "UPDATE meta SET value = '2' WHERE key = 'schema_version'",
    )
    before = tables_of(old)
    with pytest.raises(StoreChangedError) as caught:
        Store(old).runs()
    assert "column sequences.truncated is missing" in str(caught.value)
    assert "column sequences.tokens differs" in str(caught.value)
    assert (version_of(old), tables_of(old)) == ("2", before)


def test_steps_of_versions_run_in_order_after_the_columns_are_there(old: Path) -> None:
    steps = {
        4: ["UPDATE runs SET model = 'step 4'"],
        5: ["UPDATE runs SET attention_path = 'step 5'", "UPDATE runs SET model = model || ', step 5'"],
    }
    with connected(old, read_only=False) as connection:
        connection.execute("ALTER TABLE runs DROP attention_path")
        migrate(connection, old, 5, steps)
        assert connection.execute("SELECT DISTINCT model, attention_path FROM runs").fetchall() == [
            ("demo-5m, step 5", "step 5")
        ]
        migrate(connection, old, 4, steps)
        assert connection.execute("SELECT DISTINCT model FROM runs").fetchall() == [("step 4, step 5",)]
