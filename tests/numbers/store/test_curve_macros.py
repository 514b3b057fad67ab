"""The SQL macros of curves against numpy and against published numbers."""

from __future__ import annotations

import csv
import importlib
from collections import defaultdict
from collections.abc import Iterator

import duckdb
import numpy as np
import pytest

from headscan.store.macros import MACROS, macro_statements
from tests.sources import ROOT, SHARED

PUBLISHED = SHARED / "reference/inactive-heads/accuracy_vs_heads_zeroed.tsv"


@pytest.fixture(scope="module")
def sql() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        for statement in macro_statements(MACROS):
            connection.execute(statement)
        yield connection


def _ask(connection: duckdb.DuckDBPyConnection, macro: str, shares: object, values: object, at: float) -> float | None:
    query = f"SELECT {macro}(?::DOUBLE[], ?::DOUBLE[], ?)"
    (answer,) = connection.execute(query, [list(shares), list(values), at]).fetchall()[0]
    return answer


@pytest.mark.parametrize(
    ("shares", "values", "crossing"),
    [
        ([0, 0.1, 0.2], [60, 59.5, 58.5], 0.15),
        ([0.2, 0, 0.1], [58.5, 60, 59.5], 0.15),  # in any order
        ([0, 0.1, 0.2, 0.3], [60, 58, 60, 58], 0.25),  # the last of three crossings
        ([0, 0.1, 0.2], [60, 59, 50], 0.1),  # a point on the level
        ([0, 0.1, 0.2], [60, 58, 59], 0.2),  # it ends on the level
        ([0, 0.1, 0.2], [60, 60, 59.5], 0.2),  # never below
        ([0, 0.1, 0.2], [60, 50, 61], 0.2),  # back above in the end
        ([0, 0.1, 0.2], [58, 57, 50], 0.0),  # below from the start
        ([0, 0.1, 0.1, 0.2], [60, 60, 58, 50], 0.05),  # the worst of a share
        ([0.1], [60], 0.1),
        ([0.1], [58], 0.0),
        ([0, None, 0.1, 0.2], [60, 0, None, 58], 0.1),
        ([], [], None),
        ([None], [60], None),
    ],
)
def test_where_a_curve_last_crosses_a_level(
    sql: duckdb.DuckDBPyConnection, shares: list[float], values: list[float], crossing: float | None
) -> None:
    assert _ask(sql, "last_crossing", shares, values, 59) == (None if crossing is None else pytest.approx(crossing))


@pytest.mark.parametrize(
    ("shares", "values", "area"),
    [
        ([0, 0.2], [60, 58], 59.5),  # cut in the middle of a segment
        ([0, 0.1, 0.3], [60, 58, 0], 59),
        ([0.1, 0.05, 0], [58, 60, 60], 59.5),
        ([0.05, 0.1], [60, 58], 59),  # over the width there is
        ([0, 0.05, 0.05, 0.1], [60, 60, 40, 40], 45),  # the worst of a share
        ([0, 0.09], [60, 58], None),  # it ends before
        ([0.1, 0.2], [60, 58], None),  # no width
        ([], [], None),
    ],
)
def test_the_mean_under_a_curve(
    sql: duckdb.DuckDBPyConnection, shares: list[float], values: list[float], area: float | None
) -> None:
    assert _ask(sql, "curve_area", shares, values, 0.1) == (None if area is None else pytest.approx(area))


def test_random_curves_against_numpy(sql: duckdb.DuckDBPyConnection) -> None:
    """A fine grid of the same curve: the last grid point at or above the level, and the mean over the grid."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        points = int(rng.integers(2, 9))
        shares = np.append(0.0, rng.permutation(np.sort(rng.random(points))))
        values = rng.normal(60, 2, points + 1)
        order = np.argsort(shares)
        level, upto = rng.normal(59, 1), rng.uniform(0.01, shares.max())
        grid = np.linspace(0, shares.max(), 100_001)
        curve = np.interp(grid, shares[order], values[order])
        above = grid[curve >= level]
        assert _ask(sql, "last_crossing", shares, values, level) == pytest.approx(
            above[-1] if above.size else 0.0, abs=2e-5
        )
        cut = np.linspace(0, upto, 100_001)
        mean = np.interp(cut, shares[order], values[order]).mean()
        assert _ask(sql, "curve_area", shares, values, upto) == pytest.approx(mean, abs=1e-3)


def test_a_curve_that_is_raised_lets_no_fewer_heads_go(sql: duckdb.DuckDBPyConnection) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        shares, values = rng.random(6), rng.normal(60, 2, 6)
        crossings = [_ask(sql, "last_crossing", shares, values + lift, 59) for lift in (0.0, 0.5, 2.0, 20.0)]
        assert crossings == sorted(crossings, key=float) and crossings[-1] == shares.max()
        areas = [_ask(sql, "curve_area", shares, values + lift, shares.max()) for lift in (0.0, 0.5)]
        assert areas[1] == pytest.approx(areas[0] + 0.5)


#: The scores of ``pipelines/inactive_heads.py`` as the published accuracies of arXiv 2504.03889 name them.
PUBLISHED_NAMES = {
    "output_norm_ln": "HONOR",
    "last_output_norm_ln": "HeadOutputMagnitudeNormalizedLastToken",
    "first_token_weight": "Dormant",
    "first_value_norm_ln": "ValueVectorMagnitudeNormalizedFirstToken",
    "output_norm": "UnnormalizedHONOR",
    "value_norm_ln": "ValueVectorAvgNormalizedMagnitude",
    "last_output_norm_hn": "HeadOutputMagnitudeNormalizedHeadLastToken",
    "first_value_norm": "ValueVectorMagnitudeFirstToken",
    "last_output_norm": "HeadOutputMagnitudeLastToken",
    "entropy": "Entropy",
    "first_token_weight_ln": "NormalizedDormant",
    "random": "Random",
    "entropy_ln": "NormalizedEntropy",
    "value_norm": "ValueVectorAvgMagnitude",
}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published accuracies are not part of the project")
def test_published_shares_are_reproduced(sql: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "pipelines")
    paper = importlib.import_module("inactive_heads")
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    baselines = {}
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            share, accuracy = float(row["percent_heads_zeroed"]), float(row["accuracy"])
            curves[row["model"], row["head_type"]].append((share, accuracy))
            if row["head_type"] == "Random" and share == 0:
                baselines[row["model"]] = accuracy  # the model as it is: nothing was zeroed
    assert set(baselines) == set(paper.PAPER) and len(curves) == 14 * 14
    found = {
        (model, score): _ask(sql, "last_crossing", *zip(*points, strict=True), baselines[model] - 1)
        for (model, score), points in curves.items()
    }
    for model, expected in paper.PAPER.items():
        best = max(
            found[model, name]
            for score, name in PUBLISHED_NAMES.items()
            if score not in ("first_token_weight", "random")
        )
        assert (found[model, "Dormant"], best) == pytest.approx(expected, abs=0.01), model
    means = {score: np.mean([found[model, name] for model in paper.PAPER]) for score, name in PUBLISHED_NAMES.items()}
    assert means == pytest.approx(paper.PAPER_MEANS, abs=0.01)
    assert sorted(means, key=lambda score: -means[score]) == list(paper.PAPER_MEANS)
