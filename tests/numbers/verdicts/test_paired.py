from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from headscan.errors import VerdictError
from headscan.store.verdict_limits import MIN_SAFE_TEXTS
from headscan.verdicts import paired
from headscan.verdicts.answer_sheets import BENCHMARK
from headscan.verdicts.paired import (
    Interval,
    PairedDifference,
    QuestionClusters,
    about,
    enough_questions,
    retained_share,
)
from headscan.verdicts.scope_verdicts import least_visible_loss, widened_differences
from tests.numbers.conftest import compare
from tests.numbers.verdicts.test_bounds import plain_ends


def test_a_number_that_is_rounded_to_zero_has_no_minus() -> None:
    around = Interval(-0.04, -0.01, 0.04)
    assert around.words(1, " points") == "+0.0 points [+0.0, +0.0]"
    assert around.words(1, sign="") == "0.0 [0.0, 0.0]"
    assert around.words() == "-0.01 [-0.04, +0.04]"


def _pair(both: int, lost: int, gained: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    baseline = np.repeat([1, 1, 0, 0], [both, lost, gained, neither])
    arm = np.repeat([1, 0, 1, 0], [both, lost, gained, neither])
    return baseline, arm


def test_accuracies_and_mcnemars_exact_p() -> None:
    found = compare(*_pair(both=50, lost=9, gained=1, neither=40))
    assert (found.questions, found.baseline, found.arm) == (100, pytest.approx(59.0), pytest.approx(51.0))
    assert found.difference == pytest.approx(-8.0)
    # 10 discordant pairs, 1 against 9: 2 * (1 + 10) / 2**10.
    assert found.p_value == pytest.approx(22 / 1024)


def test_of_many_questions_the_interval_is_nearly_that_of_the_standard_error() -> None:
    found = compare(*_pair(both=500, lost=80, gained=40, neither=380))
    error = 100 * np.sqrt((0.12 - 0.04**2) / 1000)
    assert found.standard_error == pytest.approx(error, rel=1e-3)
    assert found.low == pytest.approx(-4 - 1.96 * error, abs=0.25) and found.low < -4 - 1.96 * error
    assert found.high == pytest.approx(-4 + 1.96 * error, abs=0.25) and found.high > -4 + 1.96 * error


def _coverage(texts: np.ndarray | None, runs: int = 300) -> float:
    """How often the interval holds the true difference, -20 points: of 60 texts a fifth is lost whole, each with its
    four questions."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(runs):
        arm = np.repeat(rng.random(60) >= 0.2, 4)
        found = compare(np.ones(240), arm, texts=texts)
        held += found.low <= -20 <= found.high
    return held / runs


def test_questions_of_one_text_are_drawn_together() -> None:
    """Drawn one by one, the intervals are half as wide as they should be, and miss the truth in one run of five."""
    assert 0.91 <= _coverage(np.arange(240) // 4) <= 0.99
    assert _coverage(None) < 0.85


@pytest.mark.parametrize("questions", [300, 400, 501, 701, 1319])
def test_an_arm_that_loses_the_margin_is_seldom_safe(questions: int) -> None:
    """It loses one question in a hundred and gains none: over all that may come of that, one pass in forty."""
    passed = 0.0
    for lost in range(questions):
        found = compare(*_pair(both=questions - lost, lost=lost, gained=0, neither=0))
        if found.low <= -1:
            break
        passed += float(binom.pmf(lost, questions, 0.01))
    assert passed <= 0.026


def test_texts_of_two_tasks_are_two_texts_and_may_differ_in_size() -> None:
    baseline, arm = np.ones(7), np.array([0.5, 0.5, 0.5, 1, 1, 0.5, 0.5])
    # Of each task one text, whatever its number; texts of 3 and 4 questions, which lose 50 and 25.
    alone = compare(baseline, arm, np.repeat(["a", "b"], [3, 4]), np.zeros(7, int))
    two = compare(baseline, arm, texts=np.repeat([5, 9], [3, 4]))
    assert alone == two and alone.texts == 2
    assert (alone.low, alone.high) == pytest.approx((-97.9, 95.3), abs=0.1)
    one_each = compare(baseline, arm, texts=np.arange(7))
    assert one_each == compare(baseline, arm)


@pytest.mark.parametrize("changed", [0.005, 0.02, 0.05, 0.1])
def test_the_number_of_questions_shows_four_of_five_harmless_arms(changed: float) -> None:
    """Answers are gained as often as lost."""
    rng, questions = np.random.default_rng(0), enough_questions(changed)
    passed = 0
    for _ in range(300):
        drawn = rng.choice([-1, 0, 1], questions, p=[changed / 2, 1 - changed, changed / 2])
        passed += compare(drawn < 0, drawn > 0).low > -1
    assert 0.75 <= passed / 300 <= 0.92


def test_the_number_of_questions_follows_from_the_changed_answers() -> None:
    assert [enough_questions(share) for share in (0, 0.03, 0.05)] == [368, 2723, 4293]
    few = compare(*_pair(both=600, lost=6, gained=6, neither=388))
    assert few.questions_needed() == pytest.approx(enough_questions(0.012), abs=2)
    many = compare(*_pair(both=1000, lost=60, gained=60, neither=880))
    assert many.questions_needed() == pytest.approx(enough_questions(0.06), rel=0.03)
    # Partial credit: every answer changes by a tenth, so few questions are needed.
    changes = np.tile([0.1, -0.1], 500)
    assert compare(np.full(1000, 0.5), 0.5 + changes).questions_needed() == pytest.approx(785 + 368, rel=0.05)
    # Four questions of one text change together: four times as many.
    blocks = np.repeat(np.random.default_rng(0).choice([-1, 0, 1], 500, p=[0.05, 0.9, 0.05]), 4)
    together = compare(blocks < 0, blocks > 0, texts=np.arange(2000) // 4)
    alone = compare(blocks < 0, blocks > 0)
    assert together.questions_needed() == pytest.approx(4 * alone.questions_needed(), rel=0.05)


@pytest.mark.parametrize(
    ("number", "words"), [(381, "390"), (390, "390"), (2355, "2,400"), (78_489, "79,000"), (7, "7")]
)
def test_numbers_of_questions_are_rounded_up(number: int, words: str) -> None:
    assert about(number) == words


def test_a_baseline_at_chance_has_nothing_to_lose() -> None:
    def above(right: int, questions: int, chance: float | None) -> bool:
        paired = compare(*_pair(both=right, lost=0, gained=0, neither=questions - right))
        return replace(paired, chance=chance).above_chance

    assert not above(8, 40, 25.0)  # 20 % of MMLU
    assert not above(15, 40, 25.0) and above(17, 40, 25.0)  # Wilson's lower ends: 24.2 and 28.5 %
    assert not above(2900, 10_000, 25.0)  # above chance, by less than 5 points
    assert above(2, 40, None) and not above(1, 40, None)  # generated answers: chance is unknown, 5 % are needed


def test_partial_credit_counts_by_how_much() -> None:
    found = compare(np.array([1.0, 0.5, 0.0, 1.0]), np.array([0.75, 0.5, 0.25, 0.5]))
    assert found.difference == pytest.approx(-12.5)
    assert found.standard_error == pytest.approx(100 * np.std([-0.25, 0, 0.25, -0.5], ddof=1) / 2)
    assert found.p_value == 1.0  # one question gained, two lost


@pytest.mark.parametrize("value", [0, 1])
def test_equal_answers_differ_by_nothing(value: int) -> None:
    found = compare(np.full(7, value), np.full(7, value))
    assert (found.difference, found.p_value) == (0.0, 1.0)
    # Of seven questions alike, the next may differ: the ends are Clopper and Pearson's.
    assert (found.low, found.high) == pytest.approx((-100 * (1 - 0.025 ** (1 / 7)), 100 * (1 - 0.025 ** (1 / 7))))


def test_one_question() -> None:
    found = compare(np.array([1]), np.array([0]), np.array(["a"]))
    assert (found.difference, found.low, found.high, found.p_value) == (-100, -100, pytest.approx(95), 1.0)
    assert not found.shows_loss() and found.standard_error == 100


def test_unpaired_answers_are_refused() -> None:
    with pytest.raises(VerdictError, match="arms with 3 and 2 answers"):
        compare(np.ones(3), np.ones(2))
    with pytest.raises(VerdictError, match="cannot pair"):
        compare(np.ones(3), np.ones(3), np.array(["a"]))
    with pytest.raises(VerdictError, match="cannot pair"):
        compare(np.ones(3), np.ones(3), texts=np.zeros(2))
    with pytest.raises(VerdictError, match="no answers"):
        compare(np.array([]), np.array([]))


@pytest.mark.parametrize("case", ["tasks", "texts", "single", "alone", "credit"])
def test_the_interval_and_p_value_are_those_of_the_definition(case: str) -> None:
    """Tasks, texts with several questions, tasks of one text (one or two of them), and partial credit."""
    rng = np.random.default_rng(1)
    tasks = np.repeat([0, 1, 2, 3, 4], [300, 80, 40, 1, 1])[: 421 if case == "single" else 422]
    if case == "tasks":
        tasks = tasks[:420]
    texts = np.arange(len(tasks)) // (3 if case == "texts" else 1)
    baseline = (rng.random(len(tasks)) < 0.7).astype(float)
    arm = np.where(rng.random(len(tasks)) < 0.25, 1 - baseline, baseline)
    if case == "credit":
        arm = arm * rng.random(len(tasks))
    found = compare(baseline, arm, tasks, texts)
    low, high = plain_ends(arm - baseline, tasks * len(tasks) + texts)
    assert (found.low, found.high) == (pytest.approx(100 * low, rel=0.03), pytest.approx(100 * high, rel=0.03))
    own = np.unique(tasks * len(tasks) + texts, return_inverse=True)[1]
    changes = np.bincount(own, arm - baseline)
    gained, lost = int((changes > 1e-9).sum()), int((changes < -1e-9).sum())
    assert found.p_value == binomtest(gained, gained + lost, 0.5).pvalue
    clusters = QuestionClusters(len(tasks), tasks, texts)
    other = np.where(rng.random(len(tasks)) < 0.1, 1 - arm, arm)
    for answers in (arm, other, arm):
        assert paired.paired_difference(baseline, answers, clusters) == compare(baseline, answers, tasks, texts)


def test_the_p_value_is_that_of_the_binomial_test() -> None:
    for differ in (1, 2, 3, 10, 11, 250, 1001):
        for gained in range(0, differ + 1, max(1, differ // 9)):
            baseline, arm = _pair(3, differ - gained, gained, 0)
            assert compare(baseline, arm).p_value == binomtest(gained, differ, 0.5).pvalue


def _in_two_forms(delta: np.ndarray, single: int = 0, **options: int) -> PairedDifference:
    """Compare texts in two forms that change together, and ``single`` further texts without a change."""
    both = np.concatenate([delta, delta, np.zeros(single)])
    texts = np.concatenate([np.arange(len(delta)), np.arange(len(delta) + single)])
    return compare(both < 0, both > 0, texts=texts, **options)


def test_a_text_in_two_forms_counts_once() -> None:
    found, alone = _in_two_forms(np.zeros(191)), compare(np.ones(191), np.ones(191))
    assert (found.questions, found.texts, alone.texts) == (382, 191, 191)
    assert found.low == alone.low == pytest.approx(-1.91, abs=0.01)
    for lost, gained in ((4, 0), (9, 3), (30, 10)):
        delta = np.repeat([-1, 1, 0], [lost, gained, 1000 - lost - gained])
        together, once = _in_two_forms(delta), compare(delta < 0, delta > 0)
        assert (together.low, together.difference) == (pytest.approx(once.low), pytest.approx(once.difference))
        assert together.questions_needed() == pytest.approx(2 * once.questions_needed(), abs=2)
        assert together.simultaneous_interval(5) == pytest.approx(once.simultaneous_interval(5))
    # A form that changes alone is half of a text: the interval is narrower than if both did.
    forms = np.concatenate([np.repeat([-1, 1, 0], [8, 8, 984]), np.repeat([0, -1, 1, 0], [16, 8, 8, 968])])
    apart = compare(forms < 0, forms > 0, texts=np.tile(np.arange(1000), 2))
    assert apart.low > _in_two_forms(np.repeat([-1, 1, 0], [16, 16, 968])).low


def test_the_examples_of_docstrings_hold() -> None:
    delta = np.repeat([-1, 1, 0], [8, 2, 390])
    right = np.repeat([1, 0, 1, 0], [8, 2, 292, 98])
    found = compare(right, right + delta)
    three = widened_differences({BENCHMARK: found}, 3, 3)[BENCHMARK]
    of_difference, of_three = (
        " ".join((each.__doc__ or "").split()) for each in (paired.paired_difference, widened_differences)
    )
    assert f"``{found.standard_error:.2f}``" in of_difference or f"= {found.standard_error:.2f}``" in of_difference
    assert f"interval is {found.low:.2f} to {found.high:.2f}, because" in of_difference
    assert (
        f"{found.low:.2f} to {found.high:.2f} for one arm, and {three.low:.2f} to {three.high:.2f} for three"
        in of_three
    )
    visible = []
    for count in (2, 20):
        right = np.repeat([1, 0, 1], [count, count, 48 * count])
        visible.append(least_visible_loss(compare(right, np.repeat([0, 1, 1], [count, count, 48 * count])), 57))
    of_visible = " ".join((least_visible_loss.__doc__ or "").split())
    assert (
        f"shows losses of {visible[0]:.1f} points and more" in of_visible and f"shows {visible[1]:.1f}." in of_visible
    )
    needles = np.repeat([1.0, 0.0], [360, 40])
    kept = retained_share(needles, np.where(np.arange(400) < 20, 0.0, needles), np.arange(400) // 4, 25.0)
    example = " ".join((retained_share.__doc__ or "").split())
    assert f"= {kept.value:.1f}`` %." in example and f"is {kept.low:.0f} to {kept.high:.0f} %." in example


def test_partial_credit_lost_on_few_questions_makes_no_interval_narrower() -> None:
    right = np.ones(400)
    found = [compare(right, np.where(np.arange(400) == 0, value, right)) for value in (1.0, 0.9, 0.5, 0.03, 0.0)]
    assert [each.low for each in found] == sorted((each.low for each in found), reverse=True)
    assert found[0].low == pytest.approx(-0.92, abs=0.01) and found[-1].low == pytest.approx(-1.39, abs=0.01)
    # Small changes of most answers leave what a rare loss shows.
    jitter = 0.01 * np.tile([-1, 1], 200)
    lost = np.where(np.arange(400) < 3, 0.0, right)
    mixed = compare(right - 0.01, (lost - 0.01 + jitter).clip(0))
    assert mixed.low == pytest.approx(compare(right, lost).low, abs=0.05) and mixed.low < -2


@pytest.mark.parametrize(("count", "credit"), [(381, 0.97), (381, 0.5), (1000, 0.5), (2000, 0.9)])
def test_partial_credit_is_seldom_safe_or_loses_by_chance(count: int, credit: float) -> None:
    """One point is lost on average, as partial credit on few questions: the fewest that can pass, and more."""
    rng, clusters, passed, lost, runs = np.random.default_rng(count), QuestionClusters(count), 0, 0, 300
    for _ in range(runs):
        arm = np.where(rng.random(count) < 0.01 / credit, 1 - credit, 1.0)
        found = paired.paired_difference(np.ones(count), arm, clusters)
        passed, lost = passed + (found.low > -1), lost + found.shows_loss()
    assert max(passed, lost) <= 0.033 * runs


@pytest.mark.parametrize(("texts", "credit"), [(6, 0.3), (24, 0.3), (100, 0.2), (100, 0.5)])
def test_partial_credit_of_whole_texts_seldom_loses_by_chance(texts: int, credit: float) -> None:
    """As copying questions do: four to a text, each right in a share of its tokens; one point is lost on average."""
    rng, runs, lost = np.random.default_rng(texts), 300, 0
    clusters = QuestionClusters(4 * texts, clusters=np.arange(4 * texts) // 4)
    for _ in range(runs):
        hit = np.repeat(rng.random(texts) < 0.01 / credit, 4)
        arm = 1 - np.where(hit, 2 * credit * rng.random(4 * texts), 0.0).clip(0, 1)
        lost += paired.paired_difference(np.ones(4 * texts), arm, clusters).shows_loss()
    assert lost <= 0.033 * runs


@pytest.mark.parametrize("single", [0, 381])
def test_texts_in_two_forms_seldom_pass_by_chance(single: int) -> None:
    """The fewest texts that can pass. Both forms change together, and one question in a hundred is lost net."""
    texts = MIN_SAFE_TEXTS
    loss = 0.01 * (2 * texts + single) / (2 * texts)
    passed = 0.0
    for lost in range(texts):
        if _in_two_forms(np.repeat([-1, 0], [lost, texts - lost]), single).low <= -1:
            break
        passed += float(binom.pmf(lost, texts, loss))
    assert passed <= 0.026
    rng, by_chance = np.random.default_rng(0), 0
    for _ in range(800):
        delta = rng.choice([-1, 0, 1], texts, p=[loss + 0.01, 0.98 - loss, 0.01])
        by_chance += _in_two_forms(delta, single).low > -1
    assert by_chance / 800 <= 0.025 + 0.011


@pytest.mark.parametrize("texts", [100, 400, 1000])
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gained", [0.0, 0.02])
def test_texts_in_two_forms_seldom_lose_by_chance(texts: int, alike: float, gained: float) -> None:
    """An arm truly loses one point; in a share ``alike`` of the texts both forms change together."""
    rng, numbers, lost, runs = np.random.default_rng(0), np.tile(np.arange(texts), 2), 0, 600
    for _ in range(runs):
        forms = rng.choice([-1, 0, 1], (2, texts), p=[gained + 0.01, 0.99 - 2 * gained, gained])
        forms[1] = np.where(rng.random(texts) < alike, forms[0], forms[1])
        delta = forms.ravel()
        lost += compare(delta < 0, delta > 0, texts=numbers).shows_loss()
    assert lost / runs <= 0.025 + 0.012


def test_the_p_value_counts_a_text_once() -> None:
    """Five of 200 documents are lost in both of their forms."""
    lost = np.repeat(np.arange(200) < 5, 2)
    texts = np.repeat(np.arange(200), 2)
    found = compare(np.ones(400), 1.0 - lost, texts=texts)
    assert found.p_value == pytest.approx(2 * 0.5**5) and (found.lost, found.texts) == (10, 200)
    # A text that gains one form and loses the other is unchanged.
    even = compare(np.tile([1.0, 0.0], 200), np.tile([0.0, 1.0], 200), texts=texts)
    assert even.p_value == 1.0
