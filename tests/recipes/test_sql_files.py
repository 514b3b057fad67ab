"""The queries of analysis/: each runs on a store, finds what it promises, and stands in the documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from headscan.cli.main import read_command
from headscan.store.store import Store
from tests.numbers.conftest import make_profiles, make_stats, write_scan
from tests.numbers.sweep_fixtures import write_sweep
from tests.sources import ROOT

QUERIES = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "analysis").glob("*.sql"))}
PAGE = (ROOT / "docs/recipes.md").read_text("utf-8")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    found = write_scan(tmp_path_factory.mktemp("recipes") / "s.duckdb", make_stats() | make_profiles()).store
    write_sweep(found, scores=("entropy",), shares=(0.05, 0.1), seeds=1)
    return found


def test_every_query_runs(store: Store) -> None:
    assert len(QUERIES) >= 10
    for name, query in QUERIES.items():
        assert re.match(r"-- [A-Z].*\.\n", query), f"{name}.sql does not begin with a sentence"
        assert store.query(query).num_columns > 0, name
        assert read_command(["sql", query]).query == query


def test_the_command_prints_one(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    from headscan.cli.main import main

    assert main(["sql", QUERIES["least_active_heads"], "--store", str(store.path)]) == 0
    assert "output_norm_ln_inactive" in capfd.readouterr().out


def test_they_find_what_they_promise(store: Store) -> None:
    values = store.query(QUERIES["least_active_heads"])["output_norm_ln"].to_pylist()
    assert values == sorted(values) and len(values) == 10
    wrong = store.query(
        "select count(*) as n from answers a join arms x using (arm_id) join answers b on a.question = b.question and"
        " a.task = b.task join arms y on y.arm_id = b.arm_id where y.name = 'baseline' and b.correct = 1 and"
        " a.correct = 0"
    )
    assert store.query(QUERIES["lost_questions"]).num_rows == wrong["n"][0].as_py() > 0


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
