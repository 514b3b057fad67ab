"""The report in headless Chromium: drawn without errors, usable by keyboard, harmless with hostile names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headscan.report.write_report import write_report
from headscan.store.store import Store
from tests.numbers.plan_fixtures import write_evaluation
from tests.numbers.report.chromium import BROWSER, Page, chromium
from tests.numbers.report.large_store import new_store, write_importance, write_large_scan, write_probe

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Debian's chromium")

EVIL = "</script><img src=x onerror=\"document.title='hacked'\">"
LAYERS, HEADS = 6, 8


def _change(identity: str, value: str, event: str = "change") -> str:
    """Script that sets a control and dispatches its event."""
    set_it = f"e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{event}')); }}"
    return f"({set_it})(document.getElementById('{identity}'))"


def _press(figure: str, label: str) -> str:
    """Script that presses a button under a figure."""
    buttons = f"[...document.querySelectorAll('[data-figure={figure}] button')]"
    return f"{buttons}.find(button => button.textContent === '{label}').click()"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str, Path]:
    """A report whose names of model, corpus, sequences, runs and arms are all hostile."""
    folder = tmp_path_factory.mktemp("browser")
    store = new_store(folder / "s.duckdb")
    names = {"model": EVIL, "corpus": EVIL, "source": EVIL}
    other = write_large_scan(store, LAYERS, HEADS, 3, fingerprint="other", seed=3, **names)  # type: ignore[arg-type]
    run_id = write_large_scan(store, LAYERS, HEADS, 5, profiles=True, **names)  # type: ignore[arg-type]
    write_probe(store, LAYERS, HEADS, model=EVIL)
    write_importance(store, LAYERS, HEADS, model=EVIL)
    evaluation = write_evaluation(store, seeds=1, prefix=EVIL)
    path = write_report(store, folder / "r.html", scan_run=run_id, evaluate_run=evaluation, compare_run=other)
    return store, run_id, path


@pytest.fixture(scope="module")
def page(report: tuple[Store, str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        found.emulate(1200)
        found.open(report[2])
        yield found


def test_the_page_is_drawn_without_errors_or_requests(page: Page) -> None:
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.run("document.querySelectorAll('.plot .main-svg').length") >= 2
    assert page.run("document.title").startswith("Attention heads of </script>")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelectorAll('#answers .answer').length") == 5
    assert page.run("[...document.querySelectorAll('a[href]')].every(a => document.querySelector(a.hash))")


def test_map_table_and_drawer_show_the_store_s_numbers(report: tuple[Store, str, Path], page: Page) -> None:
    store, run_id, _ = report
    page.run(_change("measure", "entropy"))
    rows = store.query(
        "SELECT layer, head, entropy FROM head_summary WHERE run_id = ? ORDER BY entropy", [run_id]
    ).to_pylist()
    first = page.run("[...document.querySelector('#head-table tbody tr').cells].map(cell => cell.textContent)")
    assert first[0] == f"{rows[0]['layer']}.{rows[0]['head']}"
    assert float(first[2]) == pytest.approx(rows[0]["entropy"], rel=1e-3)
    count = "document.querySelectorAll('#head-table tbody tr').length"
    assert page.run(count) == LAYERS * HEADS
    page.run(_change("search", "L3", "input"))
    assert page.run(count) == HEADS
    page.run(_change("search", "", "input"))
    page.run("document.querySelector('#head-table tbody tr').click()")
    drawer = page.run("document.getElementById('drawer').textContent")
    assert f"Layer {rows[0]['layer']}, head {rows[0]['head']} " in drawer
    assert all(name in drawer for name in ("confidence", "received_max", "induction_score", "importance_ln"))


def test_keys_move_open_and_close(page: Page) -> None:
    page.run("[...document.querySelectorAll('#drawer button')].forEach(b => b.textContent === 'Close' && b.click())")
    hidden = "document.getElementById('drawer').hidden"
    assert page.run(hidden)
    page.run("document.getElementById('map').focus()")
    for key in ("ArrowLeft", "ArrowDown", "ArrowRight", "Enter"):
        page.key(key)
    assert not page.run(hidden)
    page.key("Escape")
    assert page.run(hidden)


def test_downloads_hold_figures_and_numbers(page: Page) -> None:
    page.run(_press("map", "SVG"))
    svg = page.run("headscan.lastSaved.content")
    assert svg.startswith("<svg ") and svg.count("<rect") > LAYERS * HEADS
    page.run(_press("map", "CSV"))
    lines = page.run("headscan.lastSaved.content").strip().split("\r\n")
    assert len(lines) == 1 + LAYERS * HEADS and lines[0].startswith("layer,head,kv_head,")
    assert page.run("headscan.csv([['=1+1', 'a,b', '-2.5', 3]])") == '\'=1+1,"a,b",-2.5,3\r\n'
    for figure in ("distribution", "scatter", "table"):
        page.run(_press(figure, "CSV"))
        assert page.run("headscan.lastSaved.content").count("\r\n") > 5
    page.run("document.querySelector('#arms').parentElement.nextElementSibling.querySelectorAll('button')[2].click()")
    assert EVIL in page.run("headscan.lastSaved.content").replace('""', '"')


FIGURES = 'document.querySelectorAll(".plot").length + 3'  # map, distribution, scatter
SWITCHES = "[...document.querySelectorAll('.tools button[aria-pressed]')]"


def test_every_figure_is_a_table_too(report: tuple[Store, str, Path], page: Page) -> None:
    store, run_id, _ = report
    switches = page.run(f"{SWITCHES}.length")
    assert switches == page.run(FIGURES) >= 5
    for _ in range(2):  # with the keyboard alone, there and back
        for i in range(switches):
            page.run(f"{SWITCHES}[{i}].focus()")
            page.key("Enter")
        pressed = page.run(f"{SWITCHES}.filter(each => each.ariaPressed === 'true').length")
        hidden = "[...document.querySelectorAll('.wide:has(.plot), #drawn-map, #distribution, #scatter-figure')]"
        assert page.run(f"{hidden}.filter(each => each.hidden).length") == pressed
        tables = page.run(
            "[...document.querySelectorAll('.numbers table')].map("
            "t => [...t.rows].map(row => [...row.cells].map(cell => cell.textContent)))"
        )
        assert len(tables) == pressed
        if pressed:
            assert pressed == switches
            heads, _, _, overlap, looking, *_, arms = tables
            assert heads[0] == ["layer", *(f"head {i}" for i in range(HEADS))] and len(heads) == 1 + LAYERS
            assert overlap[0][1:3] == ["1", "2"] and len(overlap) == len(overlap[0])  # a square, not a list of cells
            assert looking[0][:2] == ["layer", "positional heads"] and len(looking) == 1 + LAYERS
            assert "points" in " ".join(arms[0]) and any(EVIL[:20] in cell for row in arms for cell in row)
            page.run(_change("measure", "entropy"))  # an open table follows the controls
            shown = page.run("document.querySelector('.numbers td.n + td.n').textContent")
            [mean] = store.query(
                "SELECT entropy FROM head_summary WHERE run_id = ? AND layer = 0 AND head = 0", [run_id]
            )["entropy"].to_pylist()
            assert float(shown) == pytest.approx(mean, rel=1e-3)
    assert page.run("document.querySelectorAll('.numbers').length") == 0


@pytest.mark.parametrize("width", [390, 900, 1400])
def test_nothing_is_wider_than_the_window(report: tuple[Store, str, Path], page: Page, width: int) -> None:
    for dark in (False, True):
        page.emulate(width, dark=dark)
        page.open(report[2])
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run("[...document.querySelectorAll('pre.command')].every(e => e.scrollWidth <= e.clientWidth + 1)")
        page.run(f"{SWITCHES}.forEach(button => button.click())")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []
        colour = page.run("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(20, 23, 27)") is dark


@pytest.mark.slow
def test_a_large_report_is_small_and_quick(tmp_path: Path) -> None:
    """80 x 64 heads and 500 sequences; times are printed, sizes are checked."""
    store = new_store(tmp_path / "s.duckdb")
    run_id = write_large_scan(store, 80, 64, 500)
    write_probe(store, 80, 64)
    write_importance(store, 80, 64)
    path = write_report(store, tmp_path / "r.html", scan_run=run_id)
    assert path.stat().st_size < 15e6
    with chromium(tmp_path) as page:
        page.emulate(1400)
        page.open(path)
        times = page.run(
            """(() => { const select = document.getElementById('measure'), found = [];
            for (const option of select.options) { select.value = option.value; const start = performance.now();
              select.dispatchEvent(new Event('change')); found.push(performance.now() - start); } return found; })()"""
        )
        paint = page.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"selector: slowest {max(times):.0f} ms of {len(times)}; first paint {paint:.0f} ms")
        assert len(times) > 30 and page.complaints == []
