from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from analysis.errors import StoreError, VerdictError
from analysis.records import ArmRecord
from analysis.store import Store
from analysis.verdicts import judge

Evaluate = Callable[..., tuple[Store, str]]

QUESTIONS = 1000
TASKS = np.repeat(["a", "b"], QUESTIONS // 2)
BASELINE = np.tile([1, 1, 1, 0], QUESTIONS // 4)


def _losing(count: int, seed: int = 0) -> np.ndarray:
    """The baseline's answers with ``count`` of the right ones wrong."""
    answers = BASELINE.copy()
    answers[np.random.default_rng(seed).choice(np.flatnonzero(BASELINE), count, replace=False)] = 0
    return answers


def test_a_verdict_follows_the_interval_and_the_controls(evaluate: Evaluate) -> None:
    store, run_id = evaluate(
        TASKS,
        {
            "baseline": ("baseline", BASELINE, 0.0, {}),
            "random-0": ("random", _losing(100, 1), 0.1, {}),
            "random-1": ("random", _losing(60, 2), 0.102, {}),
            "random-large": ("random", _losing(400, 3), 0.5, {}),
            "harmless": ("mask", _losing(2), 0.1, {}),
            "unclear": ("mask", _losing(8), 0.1, {}),
            "costly": ("rule", _losing(200), 0.098, {}),
        },
    )
    verdict = judge(store, run_id[:5])
    assert (verdict.run_id, verdict.model) == (run_id, "tiny")
    arms = {arm.name: arm for arm in verdict.arms}
    assert [arm.removable for arm in arms.values() if arm.kind != "random"] == [True, False, False]
    assert arms["unclear"].paired.difference == pytest.approx(-0.8) and arms["unclear"].paired.low <= -1
    controls = arms["harmless"].controls
    assert controls is not None and controls.arms == ("random-0", "random-1")
    assert (controls.mean, controls.lowest, controls.highest) == pytest.approx((-8.0, -10.0, -6.0))
    assert controls.beaten and controls.advantage.difference == pytest.approx(7.8)
    costly = arms["costly"].controls
    assert costly is not None and not costly.beaten and costly.advantage.high < 0
    words = verdict.sentences()
    assert [w.split(" ")[0] for w in words] == ["harmless", "unclear", "costly"]
    assert "removable within one point; better than 2 random controls" in words[0] and "not" not in words[0]
    assert "not shown to be removable: the interval reaches below -1 point" in words[1]
    assert "not removable: it loses more than one point; worse than 2 random controls" in words[2]


def test_an_arm_no_better_than_chance_is_said_to_be(evaluate: Evaluate) -> None:
    store, run_id = evaluate(
        TASKS,
        {
            "baseline": ("baseline", BASELINE, 0.0, {}),
            "random-0": ("random", _losing(100, 1), 0.1, {"control_of": "ten"}),
            "other": ("mask", _losing(101, 3), 0.1, {}),
            "ten": ("mask", _losing(98, 2), 0.3, {}),
        },
    )
    other, ten = judge(store, run_id).arms[:2]
    assert other.controls is None and "no random control of its size" in other.sentence()
    assert ten.controls is not None and not ten.controls.beaten
    assert "not told apart from 1 random control of its size" in ten.sentence()


def test_few_questions_prove_nothing(evaluate: Evaluate) -> None:
    tasks = TASKS[:200]
    store, run_id = evaluate(
        tasks, {"baseline": ("baseline", BASELINE[:200], 0.0, {}), "same": ("mask", BASELINE[:200], 0.1, {})}
    )
    arm = judge(store, run_id).arms[0]
    assert arm.paired.low == 0 and not arm.removable
    assert "at least 300 questions are needed" in arm.sentence()


def test_what_cannot_be_judged(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS[:8], {"baseline": ("baseline", BASELINE[:8], 0.0, {})})
    with pytest.raises(VerdictError, match="1 finished baselines and 0 other"):
        judge(store, run_id)
    unfinished = store.begin_arm(ArmRecord(run_id, "unfinished", "mask"))
    with pytest.raises(VerdictError, match="0 other"):
        judge(store, run_id)
    store.finish_arm(unfinished.arm_id)
    with pytest.raises(VerdictError, match=r"unfinished .* answered 0 questions, not the baseline's 8"):
        judge(store, run_id)
    with pytest.raises(StoreError, match="no evaluate run nobody"):
        judge(store, "nobody")
