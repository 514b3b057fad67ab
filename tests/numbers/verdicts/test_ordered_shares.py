"""The largest safe share: how often a share is called safe that is not, and which share is found."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isinf, sqrt

import numpy as np
import pytest

from headscan.store.records import ArmKind
from headscan.store.verdict_limits import MIN_EVIDENCE_TEXTS, MIN_TEXTS_IN_LIMIT
from headscan.verdicts.answer_sheets import BENCHMARK, ArmRecord
from headscan.verdicts.judge import arm_verdict
from headscan.verdicts.metrics import RATES, Increase, TaskMetric, exceeds, is_within, rate_increase, texts_needed
from headscan.verdicts.ordered_shares import Outcome, ShareVerdict, largest_safe, share_verdict
from headscan.verdicts.paired import PairedDifference
from tests.numbers.conftest import compare

SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


def walk(rng: np.random.Generator, gained: np.ndarray, lost: np.ndarray, questions: int, comparisons: int) -> float:
    """Return the largest share that is called safe; 0 without one.

    Args:
        gained, lost: (shares,) chances that a question is gained, or lost. Larger shares change the same questions.
    """
    lucky, unlucky = rng.random(questions), rng.random(questions)
    right = rng.random(questions) < 0.75
    found: list[ShareVerdict] = []
    for share, win, lose in zip(SHARES, gained, lost, strict=True):
        arm = np.where(right, unlucky >= lose / 0.75, lucky < win / 0.25)
        paired = compare(right.astype(float), arm.astype(float))
        of_arm = ArmRecord(name=f"arm {share}", kind=ArmKind.MASK, ablated_share=share, share=share)
        outcome = arm_verdict(of_arm, {BENCHMARK: paired}, comparisons=comparisons)
        found.append(share_verdict(outcome, share))
        if found[-1].outcome is not Outcome.SAFE:
            break
    best = largest_safe(found)
    return 0.0 if best is None else best.share


@pytest.mark.parametrize("comparisons", [1, 3])
def test_a_share_that_loses_a_point_is_rarely_called_safe(comparisons: int) -> None:
    """Every share loses exactly one point, or only those from 20 % on."""
    rng = np.random.default_rng(comparisons)
    all_lose = [walk(rng, np.full(7, 0.02), np.full(7, 0.03), 1000, comparisons) for _ in range(400)]
    assert np.mean(np.array(all_lose) > 0) <= 0.025 / comparisons + 0.016
    lost = np.array([0.01, 0.01, 0.01, 0.01, 0.03, 0.03, 0.03])
    late = [walk(rng, np.full(7, 0.01), lost, 2000, comparisons) for _ in range(200)]
    assert np.mean(np.array(late) >= 0.2) <= 0.025 / comparisons + 0.025


def test_more_questions_find_larger_shares_and_never_too_large_ones() -> None:
    """Harmless to 20 % of heads, half a point lost at 30 %, two points at 40 %."""
    rng = np.random.default_rng(0)
    changed = np.array([0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04])
    gained, lost = changed.copy(), changed.copy()
    lost[5], lost[6] = lost[5] + 0.005, lost[6] + 0.02
    median = {}
    for questions in (400, 2000, 5000):
        found = [walk(rng, gained, lost, questions, 1) for _ in range(100)]
        median[questions] = float(np.median(found))
        assert np.mean(np.array(found) == SHARES[6]) <= 0.05
    assert median[400] < median[2000] <= median[5000]
    assert median[5000] >= 0.2


@pytest.mark.parametrize("texts", [20, 64])
def test_the_loss_of_a_harmless_share_is_rarely_shown_to_exceed_its_limit(texts: int) -> None:
    """Skewed differences with a true mean at the limit: at most 2.5 % of runs drop the share, and for three kinds less.
    A share without a loss whose differences deviate by 0.05 nats is shown to be below 0.05 in half of the cases with
    20 texts, and nearly always with 64.
    """
    rng = np.random.default_rng(texts)
    sizes, documents, draws = np.full(texts, 255.0), np.arange(texts), 600
    dropped = {1: 0, 3: 0}
    below = 0
    for _ in range(draws):
        skewed = 0.05 + 0.05 * (rng.lognormal(0, 1, texts) - np.exp(0.5)) / sqrt((np.e - 1) * np.e)
        for comparisons in dropped:
            loss = rate_increase(
                RATES["loss"], np.zeros(texts), -skewed * sizes, sizes, documents, comparisons=comparisons
            )
            dropped[comparisons] += exceeds(loss, 0.05)
        calm = rate_increase(RATES["loss"], np.zeros(texts), -rng.normal(0, 0.05, texts) * sizes, sizes, documents)
        below += calm.high < 0.05
    assert dropped[1] / draws <= 0.025 + 0.013
    assert dropped[3] / draws <= 0.025 / 3 + 0.01
    assert below / draws > (0.4 if texts == 20 else 0.95)


def normal(rng: np.random.Generator, texts: int) -> np.ndarray:
    return rng.normal(0, 1, texts)


def few_lose_most(rng: np.random.Generator, texts: int) -> np.ndarray:
    return (rng.lognormal(0, 1, texts) - np.exp(0.5)) / sqrt((np.e - 1) * np.e)


def few_gain_most(rng: np.random.Generator, texts: int) -> np.ndarray:
    return -few_lose_most(rng, texts)


@pytest.mark.parametrize(
    ("of_texts", "texts", "most"),
    [(normal, 20, 0.012), (few_gain_most, 20, 0.012), (few_lose_most, 20, 0.012), (few_lose_most, 64, 0.012)],
)
def test_a_loss_at_its_limit_is_rarely_shown_to_be_within_it(
    of_texts: Callable[[np.random.Generator, int], np.ndarray], texts: int, most: float
) -> None:
    """The true loss is at the limit, and differs between texts by 0.05 nats."""
    rng, draws, safe = np.random.default_rng(texts), 600, 0
    sizes = np.full(texts, 255.0)
    for _ in range(draws):
        rises = 0.05 + 0.05 * of_texts(rng, texts)
        loss = rate_increase(RATES["loss"], np.zeros(texts), -rises * sizes, sizes, np.arange(texts))
        safe += is_within(loss, 0.05)
    assert safe / draws <= most + 0.013


def test_few_texts_never_show_that_a_loss_is_within_its_limit() -> None:
    few = nats(0.001, 0.0, 0.002, texts=MIN_TEXTS_IN_LIMIT - 1)
    assert texts_needed(few, 0.05) == MIN_TEXTS_IN_LIMIT
    same = compare(np.ones(2000), np.ones(2000))
    judged = outcome(same, few)
    assert judged.outcome is Outcome.NOT_SHOWN and judged.label == "too few texts"
    assert judged.why.startswith("needs about 20 texts: 19 texts cannot show that the loss rises by at most 0.05 nats")
    assert outcome(same, nats(0.001, 0.0, 0.002, texts=MIN_TEXTS_IN_LIMIT)).outcome is Outcome.SAFE


@pytest.mark.parametrize("texts", [2, MIN_EVIDENCE_TEXTS - 1])
def test_a_few_texts_whose_loss_rises_equally_show_nothing(texts: int) -> None:
    rises, sizes = np.full(texts, 0.06), np.full(texts, 255.0)
    loss = rate_increase(RATES["loss"], np.zeros(texts), -rises * sizes, sizes, np.arange(texts))
    assert not exceeds(loss, 0.05) and loss.words() == "+0.0600 nats per token"
    assert texts_needed(loss, 0.1) == MIN_TEXTS_IN_LIMIT
    assert "[" not in loss.numbers()


def test_the_texts_that_are_said_to_be_enough_are() -> None:
    """A share with a true loss of 0.02 is within 0.05 in four of five cases."""
    texts, draws, shown = 40, 200, {1: 0, 3: 0}
    rng = np.random.default_rng(0)
    for comparisons in shown:
        below, sizes = 0.1 * normal(rng, texts), np.full(texts, 255.0)
        rises = 0.02 + 0.1 * (below - below.mean()) / below.std(ddof=1)
        few = rate_increase(
            RATES["loss"], np.zeros(texts), -rises * sizes, sizes, np.arange(texts), comparisons=comparisons
        )
        needed = texts_needed(few, 0.05, comparisons)
        assert needed is not None and needed > texts
        for _ in range(draws):
            rises, sizes = 0.02 + 0.1 * normal(rng, needed), np.full(needed, 255.0)
            loss = rate_increase(
                RATES["loss"], np.zeros(needed), -rises * sizes, sizes, np.arange(needed), comparisons=comparisons
            )
            shown[comparisons] += loss.high <= 0.05
    assert all(0.68 <= number / draws <= 0.95 for number in shown.values())


def outcome(paired: PairedDifference, loss: Increase | None = None) -> ShareVerdict:
    arm = ArmRecord(name="arm", kind=ArmKind.MASK, ablated_share=0.1, share=0.1)
    metrics = () if loss is None else (TaskMetric("text", "loss", None, None, loss),)
    return share_verdict(arm_verdict(arm, {BENCHMARK: paired}, metrics=metrics, max_loss=0.05), 0.1)


def nats(difference: float, low: float, high: float, texts: int = 64) -> Increase:
    return Increase("nats per token", texts, difference, low, high)


def test_a_share_is_safe_only_if_its_loss_is_shown_to_be_within_the_limit() -> None:
    right = np.ones(2000)
    same = compare(right, right)
    within = outcome(same, nats(0.0006, -0.0006, 0.0019))
    assert (within.outcome, within.texts_needed) == (Outcome.SAFE, None)
    assert outcome(same, nats(0.02, -0.01, 0.05)).outcome is Outcome.SAFE
    few = outcome(same, nats(0.02, -0.04, 0.08))
    assert (few.outcome, few.label) == (Outcome.NOT_SHOWN, "too few texts")
    # Half the width takes 4 times as many texts, and a chance of four in five about twice as many.
    assert few.texts_needed == 524
    assert few.why.startswith("needs about 530 texts: the loss may rise by 0.08 nats per token (limit 0.05)")
    above = outcome(same, nats(0.05, -0.1, 0.2))
    assert (above.outcome, above.label, above.texts_needed) == (Outcome.NOT_SHOWN, "not shown", 0)
    assert "may rise by 0.2 nats per token (limit 0.05), and more texts do not help" in above.why
    unknown = outcome(same, nats(0.02, -inf, inf, texts=1))
    assert (unknown.outcome, unknown.label, unknown.texts_needed) == (Outcome.NOT_SHOWN, "too few texts", 20)
    assert "1 text cannot show" in unknown.why


@pytest.mark.parametrize("texts", [1, 3, MIN_EVIDENCE_TEXTS - 1])
@pytest.mark.parametrize("rise", [0.06, 1.0])
def test_few_texts_with_a_rise_above_the_limit_are_not_said_to_be_too_few(texts: int, rise: float) -> None:
    """Without an interval the rise is not shown, but with more texts like these it would exceed the limit, too."""
    rises, sizes = np.full(texts, rise), np.full(texts, 255.0)
    loss = rate_increase(RATES["loss"], np.zeros(texts), -rises * sizes, sizes, np.arange(texts))
    assert isinf(loss.high) and texts_needed(loss, 0.05) is None
    judged = outcome(compare(np.ones(2000), np.ones(2000)), loss)
    assert (judged.outcome, judged.label, judged.texts_needed) == (Outcome.NOT_SHOWN, "not shown", 0)
    assert "cannot show that the loss rises by at most 0.05 nats per token, and more texts do not help" in judged.why
    assert judged.why.count(f"the estimate itself is +{rise:g}") == 1 and "inf" not in judged.why


def test_the_loss_is_named_before_missing_questions_and_after_shown_losses() -> None:
    right = np.ones(2000)
    lost = outcome(compare(right, right - (np.arange(2000) < 100)), nats(0.02, -0.04, 0.08))
    assert (lost.label, lost.texts_needed) == ("loses", None) and "nats" not in lost.why
    asked = compare(right[:300], right[:300] - (np.arange(300) < 1))
    both = outcome(asked, nats(0.02, -0.04, 0.08))
    assert both.label == "too few texts" and "; needs about" in both.why and "questions" in both.why
    assert outcome(asked, nats(0.06, -0.04, 0.16)).label == "not shown"
    assert outcome(asked, nats(0.02, 0.01, 0.03)).label == "too few questions"


def test_the_three_outcomes() -> None:
    right = np.ones(2000)
    assert outcome(compare(right, right)).outcome is Outcome.SAFE
    lost = outcome(compare(right, right - (np.arange(2000) < 100)))
    assert lost.outcome is Outcome.LOSES and "-5.0 points" in lost.why
    few = outcome(compare(right[:300], right[:300] - (np.arange(300) < 1)))
    assert few.outcome is Outcome.NOT_SHOWN and few.why.startswith("needs about")
    guessing = np.tile([1.0, 0.0, 0.0, 0.0], 100)
    chance = compare(guessing, guessing)
    assert "chance" in outcome(PairedDifference(**vars(chance) | {"chance": 25.0})).why


def test_a_loss_above_the_limit_is_shown_by_its_whole_interval() -> None:
    assert exceeds(Increase("nats per token", 64, 0.08, 0.06, 0.10), 0.05)
    assert not exceeds(Increase("nats per token", 64, 0.08, 0.04, 0.12), 0.05)
    assert not exceeds(None, 0.05)
