"""Random controls: an arm that is drawn like them is seldom called better, also if it is the best of many."""

from __future__ import annotations

import numpy as np
import pytest

from headscan.store.records import ArmKind
from headscan.store.verdict_limits import MARGIN
from headscan.verdicts.answer_sheets import ArmRecord
from headscan.verdicts.confirmation import Candidate, best_candidate
from headscan.verdicts.controls import LEVEL, SelectedRank, Standing, controls_needed, judge_controls


def finished(name: str, kind: ArmKind, share: float, score: str | None = None, seed: int | None = None) -> ArmRecord:
    return ArmRecord(arm_id=name, name=name, kind=kind, ablated_share=share, share=share, criterion=score, seed=seed)


def test_a_random_arm_seldom_beats_the_others() -> None:
    """Drawn like its controls, an arm is called better in one case of 20 at most; seeds differ by far more than the
    questions, which is what a mean of controls taken for fixed does not know (70 % of such arms beat it)."""
    rng = np.random.default_rng(0)
    for count, most in ((3, 0.0), (18, 0.0), (19, 0.06), (39, 0.06)):
        claims = 0
        for _ in range(2000):
            ids = [str(i) for i in range(count + 1)]
            kinds = [ArmKind.MASK, *[ArmKind.RANDOM_MASK] * count]
            others = tuple(finished(i, kind, 0.1) for i, kind in zip(ids, kinds, strict=True))
            # Skewed: some random masks hit a head that matters.
            found = {i: -float(rng.exponential(5) + rng.normal(0, 0.5)) for i in ids}
            claims += judge_controls(others, found)["0"].beats_chance
        assert claims <= most * 2000
        assert count < 19 or claims > 0.03 * 2000


# The best of many


SHARES = 6


def _sweep(rng: np.random.Generator, scores: int, controls: int, gain: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Differences to the baseline, in points, of the curves of scores and then of random curves.

    Returns those on the questions that select and on the others, (curves, shares). Draws of heads differ by more than
    the questions do. The loss of scores is multiplied by ``gain``.
    """
    loss = rng.gamma(3, 0.4 * np.arange(1, SHARES + 1), (scores + controls, SHARES))
    loss[:scores] *= gain
    return (-loss + rng.normal(0, 0.2, loss.shape), -loss + rng.normal(0, 0.2, loss.shape))


def _best(first: np.ndarray, curves: range) -> Candidate:
    """The choice among curves by differences on the questions that select."""
    lows = first - 0.4
    best = best_candidate(
        Candidate(f"{curve} {place}", (str(curve),), (place + 1) / 20, low > -MARGIN, False, low)
        for curve in curves
        for place, low in enumerate(lows[curve])
    )
    assert best is not None
    return best


def _standing(best: Candidate, second: np.ndarray) -> Standing:
    curve, place = map(int, best.name.split())
    return Standing(best.safe, best.share, float(second[curve, place]))


def _claims(scores: int, controls: int, sweeps: int, gain: float = 1.0) -> tuple[float, float]:
    """How often the choice is called better than chance: against controls of its share, and by its rank."""
    rng = np.random.default_rng(0)
    naive = ranked = 0
    for _ in range(sweeps):
        first, second = _sweep(rng, scores, controls, gain)
        best = _best(first, range(scores))
        _, place = map(int, best.name.split())
        standing = _standing(best, second)
        # 19 controls of the same share, on the questions that did not select.
        naive += (second[scores : scores + 19, place] < standing.difference).sum() >= 19
        curves = [_standing(_best(first, range(c, c + 1)), second) for c in range(scores, scores + controls)]
        ranked += SelectedRank.of(standing, curves, scores).beats_chance
    return naive / sweeps, ranked / sweeps


@pytest.mark.parametrize(("scores", "least", "sweeps"), [(1, 0.1, 1000), (3, 0.2, 300), (15, 0.25, 200)])
def test_the_best_of_a_sweep_of_random_arms_is_seldom_better_than_chance(
    scores: int, least: float, sweeps: int
) -> None:
    """At the least number of controls that can show anything; ranked as if chosen in advance, it often is."""
    naive, ranked = _claims(scores, controls_needed(scores), sweeps)
    assert naive > least
    assert ranked <= LEVEL + 2 * np.sqrt(LEVEL * (1 - LEVEL) / sweeps)
    assert scores > 1 or ranked > 0.03  # with one score the rank is exact


def test_a_better_score_is_found() -> None:
    assert _claims(1, controls_needed(), 100, gain=0.05)[1] > 0.75
    assert _claims(3, controls_needed(3), 60, gain=0.05)[1] > 0.75


@pytest.mark.parametrize("scores", [1, 2, 15])
def test_fewer_curves_show_nothing(scores: int) -> None:
    best, worse = Standing(True, 0.3, 0.0), Standing(True, 0.25, 0.0)
    enough = SelectedRank.of(best, [worse] * controls_needed(scores), scores)
    assert enough.beats_chance and enough.p_value == pytest.approx(LEVEL)
    few = SelectedRank.of(best, [worse] * (controls_needed(scores) - 1), scores)
    assert not few.beats_chance and "not shown to be a better choice of heads than chance" in few.words()
    none = SelectedRank(scores, 3, None)
    assert not none.beats_chance and none.p_value is None
    assert f"at least {20 * scores - 1} random controls of every share are needed" in none.words()


def test_a_curve_gets_further_by_its_share_and_then_by_its_loss() -> None:
    best = Standing(True, 0.3 - 0.1, -0.5)
    assert best.beats(Standing(True, 0.1, 0.5)) and best.beats(Standing(True, 0.2, -0.6))
    assert best.beats(Standing(False, 0.3, 1.0))
    assert not best.beats(Standing(True, 0.2, -0.5)) and not best.beats(Standing(True, 0.25, -0.9))
    assert Standing(False, 0.3, -1.0).beats(Standing(False, 0.05, -2.0))


def test_one_of_many_arms_is_no_proof_by_itself() -> None:
    """Each of 6 masks beats all of 19 controls of its size; the reader of all of them sees the best."""
    others = [finished(f"m{n}", ArmKind.MASK, n / 20, score="entropy") for n in range(1, 7)]
    controls = [finished(f"r{n}{i}", ArmKind.RANDOM_MASK, n / 20, seed=i) for n in range(1, 7) for i in range(19)]
    differences = {arm.arm_id: -1.0 for arm in others} | {arm.arm_id: -3.0 for arm in controls}
    for found in (judge_controls([*others, *controls], differences)[arm.arm_id] for arm in others):
        assert found.tried == 6 and not found.beats_chance
        says = "p = 0.05 if the arm was chosen in advance, and no proof for the best of 6 arms"
        assert says in found.sentence(ArmKind.MASK, found.ablated_share)
    alone = judge_controls([others[0], *controls], differences)["m1"]
    assert alone.beats_chance and "p = 0.05, a better choice" in alone.sentence(ArmKind.MASK, 0.05)
