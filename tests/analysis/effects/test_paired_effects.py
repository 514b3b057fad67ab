"""Effects, their intervals and their halves, against known values and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from headscan.analysis.effects.paired_effects import (
    Outcomes,
    _studentised,
    _tail,
    _weights,
    best_of_each,
    each_effect,
    halves,
)
from headscan.analysis.schema.effect_tables import ACCURACY, LOSS
from headscan.analysis.verdicts.measures import ratio_with_error


def outcomes(metric: str, baseline: np.ndarray, sizes: np.ndarray | None = None) -> Outcomes:
    rows = len(baseline)
    own = np.ones(rows) if sizes is None else sizes
    return Outcomes.of(metric, baseline, own, ["t"] * rows, [f"d{n}" for n in range(rows)])


def test_of_texts_of_one_length_it_is_near_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.normal(3, 1, 100), rng.normal(3.2, 1, 100)
    found = outcomes(LOSS, before).effect(after)
    test = stats.ttest_rel(after, before)
    interval = test.confidence_interval(0.95)
    assert found.effect == pytest.approx((after - before).mean())
    assert found.standard_error == pytest.approx(stats.sem(after - before))
    half = (interval.high - interval.low) / 2
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.1 * half)
    assert found.p_value == pytest.approx(test.pvalue, rel=0.2)
    assert (found.n, found.baseline) == (100, pytest.approx(before.mean()))


def test_resamples_equal_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 200, 9).astype(float)
    amounts, documents = rng.exponential(sizes), np.arange(9) // 2  # five documents, of two texts and of one
    ratio, _, count = ratio_with_error(amounts, sizes, documents)
    expected = []
    for drawn in _weights(count)[:200].astype(int):
        rows = [np.flatnonzero(documents == d) for d in np.repeat(np.arange(count), drawn)]
        numbers = np.repeat(np.arange(count), [len(of_one) for of_one in rows])
        taken = np.concatenate(rows)
        again, error, _ = ratio_with_error(amounts[taken], sizes[taken], numbers)
        equal = len(set(np.flatnonzero(drawn))) == 1
        expected.append(np.copysign(np.inf, again - ratio) if equal else (again - ratio) / error)
    assert _studentised(amounts, sizes, documents)[:200] == pytest.approx(np.array(expected))
    many = _studentised(rng.exponential(size=5000), np.ones(5000), np.arange(5000))
    assert abs(np.mean(many)) < 0.1 and np.std(many) == pytest.approx(1, abs=0.05)


def test_small_shares_of_resamples_continue_as_students_t() -> None:
    ratios = np.random.default_rng(0).standard_t(30, 4000)
    for ratio in (-1.0, -2.5, -3.5, -6.0, -9.0):
        assert np.log(_tail(ratios, ratio, 31)) == pytest.approx(np.log(stats.t.cdf(ratio, 30)), rel=0.12)
    by_value = [_tail(ratios, ratio, 31) for ratio in np.linspace(-5, 5, 300)]
    assert by_value == sorted(by_value)


def test_too_few_documents_have_no_interval() -> None:
    for count in (2, 3):
        found = outcomes(LOSS, np.zeros(count)).effect(np.linspace(0.9, 1.1, count))
        assert (found.low, found.high) == (-np.inf, np.inf) and found.p_value > 0.05
    assert np.isfinite(outcomes(LOSS, np.zeros(4)).effect(np.linspace(0.9, 1.1, 4))[3:5]).all()


def test_of_accuracy_it_is_mcnemars_test() -> None:
    before = np.array([1.0] * 60 + [0.0] * 40)
    after = np.array([1.0] * 50 + [0.0] * 47 + [1.0] * 3)
    found = outcomes(ACCURACY, before).effect(after)
    assert found.effect == pytest.approx(-0.07)
    assert found.p_value == pytest.approx(stats.binomtest(3, 13, 0.5).pvalue)
    assert found.low < -0.07 < found.high < 0.02
    assert (found.n, found.baseline) == (100, 0.6)


def test_one_document_has_no_interval_and_equal_arms_no_effect() -> None:
    alone = Outcomes.of(LOSS, np.array([3.0, 4.0]), np.ones(2), ["t", "t"], ["d", "d"]).effect(np.array([4.0, 4.0]))
    assert (alone.effect, alone.n, alone.p_value) == (0.5, 1, 1.0)
    assert (alone.low, alone.high, alone.standard_error) == (-np.inf, np.inf, np.inf)
    same = outcomes(LOSS, np.arange(5.0)).effect(np.arange(5.0))
    assert (same.effect, same.low, same.high, same.p_value) == (0, 0, 0, 1)


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_intervals_cover_the_truth(metric: str) -> None:
    rng = np.random.default_rng(2)
    rows, draws, covered = 80, 300, 0
    for _ in range(draws):
        if metric == ACCURACY:  # 10 % of answers are lost and 4 % gained
            kind = rng.choice(4, rows, p=[0.56, 0.1, 0.04, 0.3])
            before, after, sizes, truth = np.isin(kind, (0, 1)) * 1.0, np.isin(kind, (0, 2)) * 1.0, np.ones(rows), -0.06
        else:
            sizes = rng.integers(20, 200, rows).astype(float)
            before, truth = 3 * sizes, 0.02
            after = before + sizes * (truth + 0.1 * rng.standard_t(5, rows))
        found = outcomes(metric, before, sizes).effect(after)
        covered += found.low <= truth <= found.high
    assert 0.95 - 3 * np.sqrt(0.95 * 0.05 / draws) <= covered / draws


def test_halves_split_whole_documents_evenly_in_any_order() -> None:
    documents = [f"d{n // 2}" for n in range(40)]
    tasks = ["a"] * 24 + ["b"] * 16
    part = halves(documents, tasks)
    assert part[:24].sum() == 12 and part[24:].sum() == 8
    assert (part[::2] == part[1::2]).all()
    assert (halves(documents[::-1], tasks[::-1])[::-1] == part).all()
    shared = halves([*documents, "d0"], [*tasks, "b"])  # one document in two tasks
    assert shared[-1] == shared[0]


def test_an_effect_is_confirmed_if_both_halves_show_it() -> None:
    rng = np.random.default_rng(3)
    base = outcomes(LOSS, rng.normal(3, 0.1, 60))
    noise = 0.01 * rng.normal(size=60)
    arms = {
        "both": base.baseline + 0.1 + noise,
        "one": base.baseline + 0.1 * base.selecting + noise,
        "opposite": base.baseline + np.where(base.selecting, 0.2, -0.1) + noise,
        "none": base.baseline + noise - noise.mean(),
    }
    found = each_effect(base, arms)
    assert {name: row.confirmed for name, row in found.items()} == {
        "both": True,
        "one": False,
        "opposite": False,
        "none": False,
    }
    few = outcomes(LOSS, np.array([3.0, 4.0, 5.0]))
    assert each_effect(few, {"a": np.array([3.0, 4.5, 5.0])})["a"].confirmed is None


def test_the_best_of_a_group_is_judged_on_the_other_half() -> None:
    """Without any effect, the best of many looks good on the half that chose it, and not on the other."""
    rng = np.random.default_rng(4)
    chosen, judged = [], []
    for _ in range(40):
        base = outcomes(LOSS, rng.normal(3, 1, 60))
        arms = {str(n): base.baseline + rng.normal(0, 0.5, 60) for n in range(12)}
        (name, row) = best_of_each(base, {"layer": arms})["layer"]
        means = {each: (arm - base.baseline)[base.selecting].mean() for each, arm in arms.items()}
        assert name == min(means, key=lambda each: means[each])
        assert row.effect.effect == pytest.approx((arms[name] - base.baseline)[~base.selecting].mean())
        assert row.confirmed and row.effect.n == 30
        chosen.append(means[name])
        judged.append(row.effect.effect)
    assert np.mean(chosen) < -0.08
    assert abs(np.mean(judged)) < 3 * np.std(judged) / np.sqrt(40)


def test_of_accuracy_the_best_has_the_most_right_answers() -> None:
    base = outcomes(ACCURACY, np.ones(20))
    worse = np.ones(20)
    worse[base.selecting] = 0
    name, _ = best_of_each(base, {0: {"worse": worse, "same": np.ones(20)}})[0]
    assert name == "same"
