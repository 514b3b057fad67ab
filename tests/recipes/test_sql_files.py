"""The queries of analysis/: each runs on a store, finds what it promises, and stands in the documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from headscan.cli.main import read_command
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.conftest import answer_table, make_profiles, make_stats, write_scan
from tests.numbers.sweep_fixtures import write_sweep
from tests.sources import ROOT
from tests.stores import begin_arm

QUERIES = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "analysis").glob("*.sql"))}
PAGE = (ROOT / "docs/recipes.md").read_text("utf-8")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store in which every query finds rows: a scan with attention to the first token, a sweep, and an arm with
    partial credit.
    """
    stats = make_stats() | make_profiles()
    stats["first_token_weight"][:, 0, 0] = 0.9
    found = write_scan(tmp_path_factory.mktemp("recipes") / "s.duckdb", stats).store
    record_verdicts(found, write_sweep(found, scores=("entropy",), shares=(0.05, 0.1), seeds=1))
    run_id = found.begin_run(RunRecord("evaluate", "partial", "tiny", 2, 2, code_version="1.0")).run_id
    for name, kind, credit in (("baseline", "baseline", [1.0, 0.8, 0.5]), ("copier", "mask", [1.0, 0.3, 0.6])):
        arm_id = begin_arm(found, run_id, name, kind)
        found.finish_arm(arm_id, answer_table(np.array(["copying@64"] * 3), np.array(credit)))
    found.finish_run(run_id)
    return found


def test_every_query_finds_rows(store: Store) -> None:
    assert len(QUERIES) >= 10
    for name, query in QUERIES.items():
        assert re.match(r"-- [A-Z].*\.\n", query), f"{name}.sql does not begin with a sentence"
        found = store.query(query)
        assert found.num_rows > 0, name
        for column in found.column_names:
            assert found[column].null_count < found.num_rows, f"{name}: {column} is NULL in every row"
        assert read_command(["sql", query]).query == query


def test_the_command_prints_one(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    from headscan.cli.main import main

    assert main(["sql", QUERIES["least_active_heads"], "--store", str(store.path)]) == 0
    assert "output_norm_ln_inactive" in capfd.readouterr().out


def test_they_find_what_they_promise(store: Store) -> None:
    values = store.query(QUERIES["least_active_heads"])["output_norm_ln"].to_pylist()
    assert values == sorted(values) and len(values) == 10
    lost = store.query(QUERIES["lost_questions"]).to_pylist()
    assert all(row["correct"] < row["before"] for row in lost)
    assert any((row["before"], row["correct"]) == (1.0, 0.0) for row in lost)
    partial = [row for row in lost if row["arm"] == "copier"]
    assert [(row["task"], row["question"], row["before"], row["correct"]) for row in partial] == [
        ("copying@64", 1, 0.8, 0.3)
    ]
    assert all(row["first_token_weight"] > 0.5 for row in store.query(QUERIES["first_token_heads"]).to_pylist())


def test_the_page_links_each_and_the_site_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = re.findall(r"^\[(\w+)\.sql\]\(\.\./analysis/(\w+)\.sql\)$", PAGE, re.MULTILINE)
    assert sorted(linked) == [(name, name) for name in QUERIES]
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "generated_pages", raising=False)
    from generated_pages import site_page

    shown = site_page("recipes.md", PAGE)
    for name, query in QUERIES.items():
        assert f'```sql title="{name}.sql"\n{query}```\n' in shown
    howto = site_page("howto/scan_on_a_cluster.md", (ROOT / "docs/howto/scan_on_a_cluster.md").read_text("utf-8"))
    for path in Path(ROOT / "cluster").iterdir():
        assert path.name == "README.md" or path.read_text("utf-8") in howto
    tutorial = site_page("tutorial.md", (ROOT / "docs/tutorial.md").read_text("utf-8"))
    assert "(notebooks/first_look.ipynb)" in tutorial and "../analysis" not in shown + howto + tutorial
