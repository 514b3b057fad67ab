"""Curves of accuracy over ablated heads: the SQL macros against numpy and against published numbers."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator

import duckdb
import numpy as np
import pytest

from headscan.analysis.schema.macros import macro_statements
from headscan.analysis.store.store import Store
from headscan.analysis.verdict_limits import LEAST_QUESTIONS
from headscan.analysis.verdicts.verdict_rows import record_verdicts
from tests.sources import ROOT

PUBLISHED = ROOT.parent / "shared/reference/inactive-heads/accuracy_vs_heads_zeroed.tsv"


@pytest.fixture(scope="module")
def sql() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        for statement in macro_statements():
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


# From the published accuracies of arXiv 2504.03889: % of heads that can be zeroed within one point, by the average
# weight of the first token and by the best other score.
PAIRS = {
    "Llama-3.2-3B": (8.34, 8.05),
    "Llama-3.2-3B-Instruct": (6.87, 13.04),
    "Llama-3.1-8B": (8.56, 17.11),
    "Llama-3.1-8B-Instruct": (1.01, 10.97),
    "OLMo-2-1124-7B": (0.42, 8.34),
    "OLMo-2-1124-7B-SFT": (1.70, 18.95),
    "OLMo-2-1124-7B-DPO": (2.14, 20.60),
    "OLMo-2-1124-7B-Instruct": (1.46, 19.54),
    "Qwen2.5-0.5B": (7.43, 14.42),
    "Qwen2.5-1.5B": (7.55, 7.49),
    "Qwen2.5-3B": (5.67, 8.78),
    "Qwen2.5-7B": (1.25, 7.54),
    "Qwen2.5-7B-Instruct": (1.13, 5.76),
    "Qwen2.5-14B": (11.04, 9.88),
}
MEANS = {
    "HONOR": 11.03,
    "HeadOutputMagnitudeNormalizedLastToken": 8.34,
    "Dormant": 4.61,
    "ValueVectorMagnitudeNormalizedFirstToken": 4.49,
    "UnnormalizedHONOR": 3.07,
    "ValueVectorAvgNormalizedMagnitude": 2.73,
    "HeadOutputMagnitudeNormalizedHeadLastToken": 2.54,
    "ValueVectorMagnitudeFirstToken": 2.06,
    "HeadOutputMagnitudeLastToken": 1.86,
    "Entropy": 1.56,
    "NormalizedDormant": 1.52,
    "Random": 1.18,
    "NormalizedEntropy": 0.76,
    "ValueVectorAvgMagnitude": 0.35,
}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published accuracies are not part of the project")
def test_published_shares_are_reproduced(sql: duckdb.DuckDBPyConnection) -> None:
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    baselines = {}
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            share, accuracy = float(row["percent_heads_zeroed"]), float(row["accuracy"])
            curves[row["model"], row["head_type"]].append((share, accuracy))
            if row["head_type"] == "Random" and share == 0:
                baselines[row["model"]] = accuracy  # the model as it is: nothing was zeroed
    assert set(baselines) == set(PAIRS) and len(curves) == 14 * 14
    found = {
        (model, score): _ask(sql, "last_crossing", *zip(*points, strict=True), baselines[model] - 1)
        for (model, score), points in curves.items()
    }
    for model, expected in PAIRS.items():
        best = max(found[model, score] for score in MEANS if score not in ("Dormant", "Random"))
        assert (found[model, "Dormant"], best) == pytest.approx(expected, abs=0.01), model
    means = {score: np.mean([found[model, score] for model in PAIRS]) for score in MEANS}
    assert means == pytest.approx(MEANS, abs=0.01)
    assert sorted(means, key=lambda score: -means[score]) == list(MEANS)


QUESTIONS = 400
TASKS = np.array(["a"] * QUESTIONS + ["needle@64"])
BASELINE = np.repeat([1, 0, 1], [300, 100, 1])  # one needle proves no recall


def _losing(questions: int) -> np.ndarray:
    answers = BASELINE.copy()
    answers[:questions] = 0
    answers[QUESTIONS:] = 0  # recall does not enter a curve
    return answers


@pytest.fixture
def sweep(evaluate: Callable[..., tuple[Store, str]]) -> tuple[Store, str]:
    """Rules of two scores, three seeds of random rules, and arms that are no points of a curve."""

    def rule(score: str, share: float) -> dict[str, object]:
        return {"score": score, "share": share}

    arms = {
        "baseline": ("baseline", BASELINE, 0.0, {}),
        "e5": ("rule", _losing(0), 0.06, rule("entropy", 0.05)),
        "e10": ("rule", _losing(8), 0.12, rule("entropy", 0.1)),
        "e20": ("rule", _losing(40), 0.2, rule("entropy", 0.2)),
        "v10": ("rule", _losing(16), 0.08, rule("value_norm", 0.1)),
        "m10": ("mask", _losing(0), 0.1, rule("entropy", 0.1)),
        "by hand": ("mask", _losing(80), 0.3, {}),
    }
    for seed, lost in enumerate((20, 40, 60)):
        fields = {"share": 0.1, "seed": seed}
        arms[f"r{seed}"] = ("random_rule", _losing(lost), 0.09 + 0.01 * seed, fields)
    store, run_id = evaluate(TASKS, arms)
    record_verdicts(store, run_id)
    return store, run_id


def test_points_of_a_sweep(sweep: tuple[Store, str]) -> None:
    store, run_id = sweep
    rows = store.query(
        "SELECT kind, score, share, arms, zeroed_share, accuracy, baseline, difference, lowest, highest, questions"
        " FROM sweep_points WHERE run_id = ? ORDER BY kind, score, share",
        [run_id],
    ).to_pylist()
    expected = [
        ("mask", "entropy", 0, 0, 0, 0.75, 0.75, 0, 0, 0, 400),
        ("mask", "entropy", 0.1, 1, 0.1, 0.75, 0.75, 0, 0, 0, 400),
        ("random_rule", None, 0, 0, 0, 0.75, 0.75, 0, 0, 0, 400),
        ("random_rule", None, 0.1, 3, 0.1, 0.65, 0.75, -0.1, -0.15, -0.05, 400),
        ("rule", "entropy", 0, 0, 0, 0.75, 0.75, 0, 0, 0, 400),
        ("rule", "entropy", 0.05, 1, 0.06, 0.75, 0.75, 0, 0, 0, 400),
        ("rule", "entropy", 0.1, 1, 0.12, 0.73, 0.75, -0.02, -0.02, -0.02, 400),
        ("rule", "entropy", 0.2, 1, 0.2, 0.65, 0.75, -0.1, -0.1, -0.1, 400),
        ("rule", "value_norm", 0, 0, 0, 0.75, 0.75, 0, 0, 0, 400),
        ("rule", "value_norm", 0.1, 1, 0.08, 0.71, 0.75, -0.04, -0.04, -0.04, 400),
    ]
    assert [tuple(row.values())[:2] for row in rows] == [row[:2] for row in expected]
    for row, numbers in zip(rows, expected, strict=True):
        assert list(row.values())[2:] == pytest.approx(list(numbers)[2:])


def test_intervals_of_a_sweep_are_those_of_the_arms(sweep: tuple[Store, str]) -> None:
    store, _ = sweep
    arms = store.query("SELECT kind, score, low, high FROM arm_comparison WHERE task = '(all)' AND share = 0.1")
    points = store.query("SELECT kind, score, low, high FROM sweep_points WHERE share = 0.1").to_pylist()
    assert len(points) == 4
    for point in points:
        of_arms = [arm for arm in arms.to_pylist() if (arm["kind"], arm["score"]) == (point["kind"], point["score"])]
        for end in ("low", "high"):
            assert point[end] == pytest.approx(np.mean([arm[end] for arm in of_arms]))


def test_curves_say_how_many_heads_can_go(sweep: tuple[Store, str]) -> None:
    store, run_id = sweep
    rows = store.query("FROM score_curves WHERE run_id = ?", [run_id]).to_pylist()
    assert [(row["kind"], row["score"], row["points"]) for row in rows] == [
        ("mask", "entropy", 1),
        ("rule", "entropy", 3),
        ("rule", "value_norm", 1),
        ("random_rule", None, 1),
    ]
    # Ablating more than was tried is not proven; a point is half of the entropy curve's way from 6 to 12 %.
    assert [row["removable_share"] for row in rows] == pytest.approx([0.1, 0.09, 0.02, 0.01])
    # Three of four curves reach 10 %, one reaches 20 %; that of value_norm ends at 8 %.
    assert [row["area_upto"] for row in rows] == [0.1] * 4
    entropy = 0.75 - (0.04 / 0.06 * 0.02) * 0.04 / 2 / 0.1  # a triangle from 6 to 10 %
    assert [row["area"] for row in rows if row["area"] is not None] == pytest.approx([0.75, entropy, 0.7])
    assert rows[2]["area"] is None
    # At 6 % nothing is lost, which 400 questions tell to within one point; at 12 % too much is.
    strict = [row["removable_share_strict"] for row in rows]
    assert strict == [0.1, 0.06, 0.0, 0.0]
    assert all(row["removable_share_strict"] <= row["removable_share"] for row in rows)


@pytest.mark.parametrize(
    ("lost", "passes", "strict", "paper"),
    [
        # The line from the baseline to the first arm is within the margin up to 2 %, but nothing there was tested.
        ({0.05: 50, 0.1: 90, 0.2: 130}, [False, False, False], 0.0, 0.02),
        ({0.05: 0, 0.1: 0, 0.2: 130}, [True, True, False], 0.1, 0.1 + 0.1 * 20 / 130),
        # A larger share that passes by luck does not count behind a smaller one that fails.
        ({0.05: 0, 0.1: 130, 0.2: 0}, [True, False, True], 0.05, 0.2),
        ({0.05: 50, 0.1: 0, 0.2: 0}, [False, True, True], 0.0, 0.2),
        ({0.05: 0, 0.1: 0, 0.2: 0}, [True, True, True], 0.2, 0.2),
    ],
)
def test_the_strict_share_is_the_largest_tested_one_up_to_which_all_pass(
    evaluate: Callable[..., tuple[Store, str]],
    lost: dict[float, int],
    passes: list[bool],
    strict: float,
    paper: float,
) -> None:
    baseline = np.repeat([1, 0], [1500, 500])
    arms = {"baseline": ("baseline", baseline, 0.0, {})}
    for share, questions in lost.items():
        answers = np.where(np.arange(2000) < questions, 0, baseline)
        arms[f"{share}"] = ("rule", answers, share, {"score": "entropy", "share": share})
    store, run_id = evaluate(np.array(["a"] * 2000), arms)
    record_verdicts(store, run_id)
    points = store.query("SELECT low, passes FROM sweep_points WHERE arms > 0 ORDER BY share").to_pylist()
    assert [point["passes"] for point in points] == passes == [point["low"] > -0.01 for point in points]
    (curve,) = store.query("FROM score_curves").to_pylist()
    assert curve["removable_share_strict"] == strict
    assert curve["removable_share"] == pytest.approx(paper)


def test_only_seeds_are_averaged(evaluate: Callable[..., tuple[Store, str]]) -> None:
    """Masks in two orders, or of two scans, are two curves; arms without a seed are points of their own."""
    ten = {"score": "entropy", "share": 0.1}
    arms = {
        "baseline": ("baseline", BASELINE, 0.0, {}),
        "mean": ("mask", _losing(0), 0.1, {**ten, "selection": "scan a"}),
        "inactive": ("mask", _losing(40), 0.1, {**ten, "selection": "scan a by inactivity"}),
        "other": ("mask", _losing(80), 0.1, {**ten, "selection": "scan b"}),
        "by hand": ("mask", _losing(8), 0.1, ten),
        "by another hand": ("mask", _losing(16), 0.1, ten),
        "r0": ("random_mask", _losing(40), 0.1, {"share": 0.1, "seed": 0}),
        "r1": ("random_mask", _losing(80), 0.1, {"share": 0.1, "seed": 1}),
    }
    store, run_id = evaluate(TASKS, arms)
    record_verdicts(store, run_id)
    rows = store.query(
        "SELECT kind, selection, arms, round(difference, 6) FROM sweep_points WHERE arms > 0 ORDER BY ALL"
    ).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("mask", "scan a", 1, 0.0),
        ("mask", "scan a by inactivity", 1, -0.1),
        ("mask", "scan b", 1, -0.2),
        ("mask", None, 1, -0.04),
        ("mask", None, 1, -0.02),
        ("random_mask", None, 2, -0.15),
    ]
    curves = store.query("SELECT kind, selection, points FROM score_curves ORDER BY ALL").to_pylist()
    assert [tuple(row.values()) for row in curves] == [
        ("mask", "scan a", 1),
        ("mask", "scan a by inactivity", 1),
        ("mask", "scan b", 1),
        ("mask", None, 2),
        ("random_mask", None, 1),
    ]


def _strict(
    evaluate: Callable[..., tuple[Store, str]], questions: int, recall: tuple[float, ...], baseline_recall: float = 1.0
) -> tuple[float | None, float, list[bool]]:
    """The strict and the paper's share of a rule that loses nothing of a benchmark, at 5, 10 and 20 % of heads; of
    each arm the share of needles that it finds. Also which points lost recall."""
    needles = 400  # enough to show that recall is kept
    tasks = np.array(["a"] * questions + ["needle@64"] * needles)

    def answers(found: float) -> np.ndarray:
        return np.concatenate([np.ones(questions), np.arange(needles) < found * needles])

    arms = {"baseline": ("baseline", answers(baseline_recall), 0.0, {})}
    for share, found in zip((0.05, 0.1, 0.2), recall, strict=True):
        arms[f"{share}"] = ("rule", answers(found), share + 0.01, {"score": "entropy", "share": share})
    store, run_id = evaluate(tasks, arms)
    record_verdicts(store, run_id)
    (curve,) = store.query("FROM score_curves").to_pylist()
    lost = store.query("SELECT recall_lost FROM sweep_points ORDER BY zeroed_share")["recall_lost"].to_pylist()
    return curve["removable_share_strict"], curve["removable_share"], lost


@pytest.mark.parametrize(
    ("recall", "strict", "lost"),
    [
        ((1.0, 1.0, 1.0), 0.21, [False, False, False, False]),
        ((1.0, 0.5, 0.5), 0.06, [False, False, True, True]),
        ((1.0, 0.5, 1.0), 0.06, [False, False, True, False]),  # found again: the first loss counts
        ((0.5, 1.0, 1.0), 0.0, [False, True, False, False]),
    ],
)
def test_the_stricter_share_ends_before_recall_is_lost(
    evaluate: Callable[..., tuple[Store, str]], recall: tuple[float, ...], strict: float, lost: list[bool]
) -> None:
    found, paper, points = _strict(evaluate, QUESTIONS, recall)
    assert (found, points) == (pytest.approx(strict), lost)
    assert paper == pytest.approx(0.21)  # the paper's rule knows of no recall


def test_the_stricter_share_needs_questions(evaluate: Callable[..., tuple[Store, str]]) -> None:
    assert _strict(evaluate, LEAST_QUESTIONS - 1, (1.0, 1.0, 1.0))[:2] == (None, pytest.approx(0.21))


def test_recall_that_the_baseline_lacks_stops_nothing(evaluate: Callable[..., tuple[Store, str]]) -> None:
    found, _, lost = _strict(evaluate, QUESTIONS, (0.0, 0.0, 0.0), baseline_recall=0.25)
    assert (found, lost) == (pytest.approx(0.21), [False] * 4)


def test_a_score_that_silences_little_takes_no_area_from_others(evaluate: Callable[..., tuple[Store, str]]) -> None:
    """One that ablates nothing has no area; one that comes within a twentieth of the share has."""
    reaches = {"entropy": 1.2, "value_norm": 0.0, "output_norm": 0.97, "first_token_weight": 0.5}
    arms = {"baseline": ("baseline", BASELINE, 0.0, {})}
    for score, factor in reaches.items():
        for share in (0.1, 0.2):
            arms[f"{score} {share}"] = ("rule", _losing(4), factor * share, {"score": score, "share": share})
    store, run_id = evaluate(TASKS, arms)
    record_verdicts(store, run_id)
    rows = store.query("SELECT score, area, area_upto FROM score_curves").to_pylist()
    assert {row["area_upto"] for row in rows} == {0.2}
    assert {row["score"] for row in rows if row["area"] is not None} == {"entropy", "output_norm"}
