"""Planned looks: their bounds are the published ones, and reading answers several times errs no more than promised."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from headscan.errors import StoreError
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.store.verdict_limits import TAIL, z_quantile
from headscan.verdicts.judge import judge
from headscan.verdicts.looks import Look, is_hopeless, planned_looks, spent_quantiles
from tests.numbers.conftest import HEADS, LAYERS, answer_table
from tests.numbers.verdicts.simulated_studies import DRAWS, rates_with_looks
from tests.stores import arm_record


def test_bounds_are_those_of_o_brien_and_fleming() -> None:
    """Four equal looks, one-sided 2.5 %, with the spending function of Lan and DeMets: as published."""
    looks = planned_looks((400, 0), (400, 0))
    assert [look.questions for look in looks] == [100, 200, 300, 400]
    quantiles = [z_quantile(TAIL / look.comparisons) for look in looks]
    assert quantiles == pytest.approx([4.3326, 2.9631, 2.3590, 2.0141], abs=1e-3)


@pytest.mark.parametrize(("first", "last", "kinds"), [(400, 400, 1), (400, 1800, 3), (0, 3000, 2), (100, 20_000, 1)])
def test_sums_rarely_cross_a_bound(first: int, last: int, kinds: int) -> None:
    """Against drawn sums: all looks together err as often as one look at the same level."""
    looks, runs = planned_looks((first, 0), (last, 0), kinds), 400_000
    rng, crossed, total, before = np.random.default_rng(first), np.zeros(runs, bool), np.zeros(runs), 0
    for look in looks:
        total += rng.normal(size=runs) * sqrt(look.questions - before)
        before = look.questions
        crossed |= total / sqrt(look.questions) > z_quantile(TAIL / look.comparisons)
    assert crossed.mean() == pytest.approx(TAIL / kinds, rel=0.05)
    assert looks[-1].questions == last and all(look.comparisons >= kinds for look in looks)


def test_a_single_look_is_not_widened() -> None:
    assert spent_quantiles([1.0], [TAIL]) == pytest.approx([z_quantile(TAIL)], abs=1e-4)


def test_recall_is_asked_first_and_its_questions_are_read_twice_at_most() -> None:
    looks = planned_looks((200, 40), (800, 120), 3)
    assert looks[0] == Look(0, 40, 3.0, 6.0)
    assert [look.recall for look in looks] == [40] * 5 + [120] * 2
    assert [look.questions for look in looks[1:]] == [50, 100, 150, 200, 400, 800]
    assert {look.recall_comparisons for look in planned_looks((200, 40), (800, 40), 3)} == {3.0}
    assert [look.questions for look in planned_looks((0, 40), (0, 40))] == [0]
    assert all(0 < look.questions <= 3 for look in planned_looks((3, 0), (3, 0)))
    assert [look.questions for look in planned_looks((0, 40), (1, 40))] == [0, 1]
    assert [look.questions for look in planned_looks((0, 40), (20, 40))] == [0, 5, 10, 20]


def test_an_arm_is_hopeless_if_its_estimate_would_hardly_pass() -> None:
    looks = planned_looks((1000, 0), (1000, 0))
    assert not is_hopeless(0.0, 0.8, looks, 250, 1.0) and not is_hopeless(-0.9, 0.8, looks, 250, 1.0)
    assert is_hopeless(-2.0, 0.8, looks, 250, 1.0)
    assert not is_hopeless(-2.0, 0.8, looks, 250, 2.5)
    assert not is_hopeless(-2.0, 0.4, looks, 1000, 1.0), "after the last look nothing is left to ask"


def test_looks_err_rarely_and_save_questions() -> None:
    """Forty studies of three kinds: at most two err. Kinds that lose two points are asked half of the questions."""
    erred, shown, asked = rates_with_looks(DRAWS["their probabilities"][0], 2000, 2000, 3, 40)
    assert erred <= 5 and shown >= 90
    assert asked[2] < 50 and asked[1] < 90 and asked[0] < 90


@pytest.mark.slow
@pytest.mark.parametrize("later", [1, 4])
@pytest.mark.parametrize("case", [case for case in DRAWS if "documents" not in case])
def test_studies_with_looks_err_as_rarely_as_promised(case: str, later: int) -> None:
    draw, sizes = DRAWS[case]
    erred, _, _ = rates_with_looks(draw, sizes[1], later * sizes[1], 3, 300)
    assert erred <= 2.5 + 1.8


def test_arms_of_different_looks_are_judged_on_what_they_were_asked(tmp_path: Path) -> None:
    """The baseline has the answers of both looks; the first one asked recall alone."""
    store, looks = Store(tmp_path / "s.duckdb"), planned_looks((400, 400), (400, 400), 2)
    judging = {"kinds": 2, "max_points": 2.0, "looks": looks[:2]}
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", LAYERS, HEADS, config={"judging": judging})).run_id
    recall, benchmark = np.repeat("needle@512", 400), np.repeat("sums", looks[1].questions)
    right = np.arange(400) % 10 > 0
    for name, kind, lost, asked in (
        ("baseline", "baseline", 0, 2),
        ("first", "mask", 0, 1),
        ("forgets", "mask", 200, 1),
        ("second", "mask", 0, 2),
    ):
        for look in range(1, asked + 1):
            arm = replace(arm_record(run_id, name, kind), look=look)
            assert not store.begin_arm(arm)
            answers = right & (np.arange(400) >= lost) if look == 1 else np.ones(len(benchmark))
            asked_now = answer_table(recall if look == 1 else benchmark, answers)
            store.finish_arm(arm.arm_id, asked_now, ablated_share=0.1)
    store.finish_run(run_id)
    first, forgets, second = (judge(store, run_id).by_name[name] for name in ("first", "forgets", "second"))
    assert (first.accuracy, first.label, first.arm.look) == (None, "not asked", 1)
    assert first.recall[0].paired.questions == 400 and first.recall[0].comparisons == 2
    assert forgets.label == "loses" and forgets.recall_lost == "needle"
    assert second.paired.questions == 100 and second.comparisons == looks[1].comparisons > 1_000
    # A look that is in progress leaves the arm with its last finished one.
    assert not store.begin_arm(replace(arm_record(run_id, "first", "mask"), look=2))
    assert judge(store, run_id).by_name["first"].arm.look == 1
    with pytest.raises(StoreError, match="no answers of look 2"):
        store.begin_arm(replace(arm_record(run_id, "forgets", "mask"), look=3))
