"""Curves of accuracy over ablated heads: the points of a sweep, and how many heads can go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headscan.steps.results import curve_row
from headscan.store.store import Store
from headscan.store.verdict_limits import MIN_SAFE_TEXTS
from headscan.verdicts.curves import read_curves
from headscan.verdicts.verdict_rows import record_verdicts

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
        return {"criterion": score, "share": share}

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
        "SELECT kind, criterion, share, arms, ablated_share, accuracy, baseline, difference, lowest, highest, questions"
        " FROM sweep_points WHERE run_id = ? ORDER BY kind, criterion, share",
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


def test_a_curve_as_json_has_the_columns_of_the_view(sweep: tuple[Store, str]) -> None:
    store, run_id = sweep
    columns = set(store.query("SELECT * FROM sweep_points LIMIT 1").column_names)
    for curve in read_curves(store, run_id):
        row = curve_row(curve)
        assert row["criterion"] == curve.criterion and len(row["points"]) == len(curve.points)
        for shown, point in zip(row["points"], curve.points, strict=True):
            assert shown.keys() <= columns and shown["ablated_share"] == point.ablated_share


def test_intervals_of_a_sweep_are_those_of_the_arms(sweep: tuple[Store, str]) -> None:
    store, _ = sweep
    arms = store.query("SELECT kind, criterion, low, high FROM arm_comparison WHERE task = '(all)' AND share = 0.1")
    points = store.query("SELECT kind, criterion, low, high FROM sweep_points WHERE share = 0.1").to_pylist()
    assert len(points) == 4
    for point in points:
        of_arms = [
            arm for arm in arms.to_pylist() if (arm["kind"], arm["criterion"]) == (point["kind"], point["criterion"])
        ]
        for end in ("low", "high"):
            assert point[end] == pytest.approx(np.mean([arm[end] for arm in of_arms]))


def test_curves_have_two_shares(sweep: tuple[Store, str]) -> None:
    store, run_id = sweep
    rows = store.query("FROM score_curves WHERE run_id = ?", [run_id]).to_pylist()
    assert [(row["kind"], row["criterion"], row["points"]) for row in rows] == [
        ("mask", "entropy", 1),
        ("rule", "entropy", 3),
        ("rule", "value_norm", 1),
        ("random_rule", None, 1),
    ]
    # Ablating more than was tried is not proven; a point is half of the entropy curve's way from 6 to 12 %.
    assert [row["share_within_point"] for row in rows] == pytest.approx([0.1, 0.09, 0.02, 0.01])
    # Three of four curves reach 10 %, one reaches 20 %; that of value_norm ends at 8 %.
    assert [row["area_upto"] for row in rows] == [0.1] * 4
    entropy = 0.75 - (0.04 / 0.06 * 0.02) * 0.04 / 2 / 0.1  # a triangle from 6 to 10 %
    assert [row["area"] for row in rows if row["area"] is not None] == pytest.approx([0.75, entropy, 0.7])
    assert rows[2]["area"] is None
    # At 6 % nothing is lost, which 400 questions tell to within one point; at 12 % too much is.
    assert [row["safe_share"] for row in rows] == [0.1, 0.06, 0.0, 0.0]
    assert all(row["safe_share"] <= row["share_within_point"] for row in rows)


@pytest.mark.parametrize(
    ("lost", "safe", "safe_share", "within_point"),
    [
        # The line from the baseline to the first arm is within the margin up to 2 %, but nothing there was tested.
        ({0.05: 50, 0.1: 90, 0.2: 130}, [False, False, False], 0.0, 0.02),
        ({0.05: 0, 0.1: 0, 0.2: 130}, [True, True, False], 0.1, 0.1 + 0.1 * 20 / 130),
        # A larger share that is safe by luck does not count behind a smaller one that is not.
        ({0.05: 0, 0.1: 130, 0.2: 0}, [True, False, True], 0.05, 0.2),
        ({0.05: 50, 0.1: 0, 0.2: 0}, [False, True, True], 0.0, 0.2),
        ({0.05: 0, 0.1: 0, 0.2: 0}, [True, True, True], 0.2, 0.2),
    ],
)
def test_the_safe_share_is_the_largest_tested_one_up_to_which_all_are_safe(
    evaluate: Callable[..., tuple[Store, str]],
    lost: dict[float, int],
    safe: list[bool],
    safe_share: float,
    within_point: float,
) -> None:
    baseline = np.repeat([1, 0], [1500, 500])
    arms = {"baseline": ("baseline", baseline, 0.0, {})}
    for share, questions in lost.items():
        answers = np.where(np.arange(2000) < questions, 0, baseline)
        arms[f"{share}"] = ("rule", answers, share, {"criterion": "entropy", "share": share})
    store, run_id = evaluate(np.array(["a"] * 2000), arms)
    record_verdicts(store, run_id)
    points = store.query("SELECT low, safe FROM sweep_points WHERE arms > 0 ORDER BY share").to_pylist()
    assert [point["safe"] for point in points] == safe == [point["low"] > -0.01 for point in points]
    (curve,) = store.query("FROM score_curves").to_pylist()
    assert curve["safe_share"] == safe_share
    assert curve["share_within_point"] == pytest.approx(within_point)


def test_only_seeds_are_averaged(evaluate: Callable[..., tuple[Store, str]]) -> None:
    """Masks in two orders, or of two scans, are two curves; arms without a seed are points of their own."""
    ten = {"criterion": "entropy", "share": 0.1}
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


def _shares(
    evaluate: Callable[..., tuple[Store, str]], questions: int, recall: tuple[float, ...], baseline_recall: float = 1.0
) -> tuple[float | None, float, list[bool]]:
    """The safe share and the share within one point of a rule that loses nothing of a benchmark, at 5, 10 and
    20 % of heads; of each arm the share of needles that it finds. Also which points lost recall."""
    needles = 400  # enough to show that recall is kept
    tasks = np.array(["a"] * questions + ["needle@64"] * needles)

    def answers(found: float) -> np.ndarray:
        return np.concatenate([np.ones(questions), np.arange(needles) < found * needles])

    arms = {"baseline": ("baseline", answers(baseline_recall), 0.0, {})}
    for share, found in zip((0.05, 0.1, 0.2), recall, strict=True):
        arms[f"{share}"] = ("rule", answers(found), share + 0.01, {"criterion": "entropy", "share": share})
    store, run_id = evaluate(tasks, arms)
    record_verdicts(store, run_id)
    (curve,) = store.query("FROM score_curves").to_pylist()
    lost = store.query("SELECT recall_lost FROM sweep_points ORDER BY ablated_share")["recall_lost"].to_pylist()
    return curve["safe_share"], curve["share_within_point"], lost


@pytest.mark.parametrize(
    ("recall", "safe_share", "lost"),
    [
        ((1.0, 1.0, 1.0), 0.21, [False, False, False, False]),
        ((1.0, 0.5, 0.5), 0.06, [False, False, True, True]),
        ((1.0, 0.5, 1.0), 0.06, [False, False, True, False]),  # found again: the first loss counts
        ((0.5, 1.0, 1.0), 0.0, [False, True, False, False]),
    ],
)
def test_the_safe_share_ends_before_recall_is_lost(
    evaluate: Callable[..., tuple[Store, str]], recall: tuple[float, ...], safe_share: float, lost: list[bool]
) -> None:
    found, paper, points = _shares(evaluate, QUESTIONS, recall)
    assert (found, points) == (pytest.approx(safe_share), lost)
    assert paper == pytest.approx(0.21)  # the paper's rule knows of no recall


def test_the_safe_share_needs_questions(evaluate: Callable[..., tuple[Store, str]]) -> None:
    assert _shares(evaluate, MIN_SAFE_TEXTS - 1, (1.0, 1.0, 1.0))[:2] == (None, pytest.approx(0.21))


def test_recall_that_the_baseline_lacks_stops_nothing(evaluate: Callable[..., tuple[Store, str]]) -> None:
    found, _, lost = _shares(evaluate, QUESTIONS, (0.0, 0.0, 0.0), baseline_recall=0.25)
    assert (found, lost) == (pytest.approx(0.21), [False] * 4)


def test_a_score_that_silences_little_takes_no_area_from_others(evaluate: Callable[..., tuple[Store, str]]) -> None:
    """One that ablates nothing has no area; one that comes within a twentieth of the share has."""
    reaches = {"entropy": 1.2, "value_norm": 0.0, "output_norm": 0.97, "first_token_weight": 0.5}
    arms = {"baseline": ("baseline", BASELINE, 0.0, {})}
    for score, factor in reaches.items():
        for share in (0.1, 0.2):
            arms[f"{score} {share}"] = ("rule", _losing(4), factor * share, {"criterion": score, "share": share})
    store, run_id = evaluate(TASKS, arms)
    record_verdicts(store, run_id)
    rows = store.query("SELECT criterion, area, area_upto FROM score_curves").to_pylist()
    assert {row["area_upto"] for row in rows} == {0.2}
    assert {row["criterion"] for row in rows if row["area"] is not None} == {"entropy", "output_norm"}
