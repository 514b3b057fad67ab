"""`headscan compare` as a user meets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headscan.catalog import SCORES
from headscan.cli.main import main
from headscan.ranking.comparisons import mask_overlap, score_distance, score_overlap
from headscan.store.store import Store
from tests.numbers.conftest import LAYERS, make_stats, write_scan


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str, str]]:
    path = tmp_path_factory.mktemp("compare") / "s.duckdb"
    first, second = (write_scan(path, make_stats(seed), f"f{seed}") for seed in (0, 1))
    with first.store.reading():
        yield first.store, first.run_id, second.run_id


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], list[list[str]]]:
    """The columns and rows that a command prints."""
    assert main(["compare", *arguments]) == 0
    head, _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    return head, rows


@pytest.mark.parametrize(("flags", "overlap"), [([], score_overlap), (["--fixed"], mask_overlap)])
def test_one_scan_gives_the_overlap_of_every_two_scores(
    runs: tuple[Store, str, str], capsys: pytest.CaptureFixture[str], flags: list[str], overlap: object
) -> None:
    store, run_id, _ = runs
    head, rows = table(capsys, run_id[:5], "--quantile", "0.3", "--store", str(store.path), *flags)
    assert head == ["score", "picked", *map(str, range(1, len(SCORES) + 1))]
    assert [row[1] for row in rows] == list(SCORES)
    shown = {(a[1], b[1]): int(a[2 + int(b[0])]) for a in rows for b in rows}
    for pair in overlap(store, run_id, 0.3).to_pylist():  # type: ignore[operator]
        a, b = pair["score_a"], pair["score_b"]
        assert shown[a, b] == shown[b, a] == round(100 * pair["overlap"])
    assert all(shown[name, name] == 100 for name in SCORES)


def test_two_scans_give_the_distances_largest_first(
    runs: tuple[Store, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    store, first, second = runs
    head, rows = table(capsys, first[:5], second[:5], "--store", str(store.path))
    assert head == ["score", "relative", "distance", "mean", "a", "mean", "b"]
    distances = score_distance(store, first, second)
    assert [row[0] for row in rows] == distances["score"].to_pylist()
    assert [float(row[2]) for row in rows] == pytest.approx(distances["distance"].to_pylist(), rel=1e-3)
    _, by_layer = table(capsys, first, second, "--by-layer", "--store", str(store.path))
    assert len(by_layer) == LAYERS * len(SCORES)
    _, few = table(capsys, first, second, "--scores", "entropy, output_norm", "--store", str(store.path))
    assert sorted(row[0] for row in few) == ["entropy", "output_norm"]


def test_comparison_errors_are_one_line(
    runs: tuple[Store, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, first, second = runs
    for arguments, words in (
        ([first, "--quantile", "1.5"], ("1.5", "limit below 1")),
        ([first, "--site", "cross"], ("cross",)),
        ([first, "zzz"], ("zzz", second)),
        ([first, second, "--site", "cross"], ("cross",)),
        ([first, second, "--scores", "entrpy"], ("entrpy", "entropy")),
        ([first, second, "--fixed"], ("--fixed", "one scan")),
        ([first, "--by-layer"], ("--by-layer", "two scans")),
    ):
        assert main(["compare", *arguments, "--store", str(store.path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("headscan: ") and err.count("\n") == 1
        assert all(word in err for word in words)


def test_without_ids_the_newest_scans_are_compared(
    runs: tuple[Store, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, first, second = runs
    where = ["--store", str(store.path)]
    for words, ids in (([], [second, first]), (["--by-layer"], [second, first]), (["--fixed"], [second])):
        assert main(["compare", *words, *where]) == 0
        shown = capsys.readouterr()
        assert main(["compare", *ids, *words, *where]) == 0
        assert capsys.readouterr().out == shown.out
        assert all(f"from scan {run_id}" in shown.err for run_id in ids)
    alone = write_scan(tmp_path / "one.duckdb", make_stats()).store
    assert main(["compare", "--store", str(alone.path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["score", "picked"]
    assert main(["compare", "--by-layer", "--store", str(alone.path)]) == 2
    assert "has 1 scan of these heads (limit 2)" in capsys.readouterr().err
