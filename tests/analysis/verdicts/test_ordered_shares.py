"""The largest safe share: how often a share is called safe that is not, and which share is found."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from headscan.analysis.store.records import ArmKind
from headscan.analysis.store.verdict_limits import MARGIN
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, FinishedArm
from headscan.analysis.verdicts.judge import arm_verdict
from headscan.analysis.verdicts.metrics import RATES, Increase, rate_increase
from headscan.analysis.verdicts.ordered_shares import Outcome, ShareVerdict, exceeds, largest_safe, share_verdict
from headscan.analysis.verdicts.paired import PairedDifference, compare
from headscan.analysis.verdicts.verdict_rows import widened

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
        paired = compare(right.astype(float), arm.astype(float), resamples=200)
        of_arm = FinishedArm("a", f"arm {share}", ArmKind.MASK, None, None, share, share)
        outcome = arm_verdict(of_arm, widened({BENCHMARK: paired}, comparisons), comparisons=comparisons)
        found.append(share_verdict(outcome, share, None))
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
    A share whose differences deviate by 0.05 nats is shown to be below 0.05 with 64 texts.
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
    assert below / draws > 0.88


def outcome(paired: PairedDifference) -> ShareVerdict:
    arm = FinishedArm("a", "arm", ArmKind.MASK, None, None, 0.1, 0.1)
    return share_verdict(arm_verdict(arm, {BENCHMARK: paired}), 0.1, None)


def test_the_three_outcomes() -> None:
    right = np.ones(2000)
    assert outcome(compare(right, right)).outcome is Outcome.SAFE
    lost = outcome(compare(right, right - (np.arange(2000) < 100)))
    assert lost.outcome is Outcome.LOSES and "-5.0 points" in lost.why
    few = outcome(compare(right[:300], right[:300] - (np.arange(300) < 1)))
    assert few.outcome is Outcome.OPEN and few.why.startswith("needs about")
    guessing = np.tile([1.0, 0.0, 0.0, 0.0], 100)
    chance = compare(guessing, guessing)
    assert "chance" in outcome(PairedDifference(**vars(chance) | {"chance": 25.0})).why


def test_a_loss_above_the_limit_is_shown_by_its_whole_interval() -> None:
    assert exceeds(Increase("nats per token", 64, 0.08, 0.06, 0.10), MARGIN / 20)
    assert not exceeds(Increase("nats per token", 64, 0.08, 0.04, 0.12), MARGIN / 20)
    assert not exceeds(None, 0.05)
