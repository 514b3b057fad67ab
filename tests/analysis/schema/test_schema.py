from __future__ import annotations

import duckdb
import pytest

from headscan.analysis.schema.arm_views import ARM_VIEWS
from headscan.analysis.schema.macros import MACROS
from headscan.analysis.schema.tables import TABLES, schema_statements
from headscan.analysis.schema.views import ALL_RUNS, VIEWS, view_statements
from headscan.catalog import PROFILES, SCORES, STATISTICS
from tests.analysis.conftest import Scan


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
    for statement in (*schema_statements(), *view_statements()):
        connection.execute(statement)
    row = "INSERT INTO shards VALUES ('r', 0, 'h', 1, 1, 0, 1, NULL, NULL, now())"
    connection.execute(row)
    with pytest.raises(duckdb.ConstraintException):
        connection.execute(row)
    with pytest.raises(duckdb.ConstraintException):
        connection.execute("INSERT INTO mask_heads (mask_id, site, layer) VALUES ('m', 'self', 0)")
