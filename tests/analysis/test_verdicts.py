from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from analysis.errors import StoreError, VerdictError
from analysis.records import ArmRecord, RunRecord
from analysis.store import Store
from analysis.verdicts import judge
from tests.analysis.conftest import answer_table

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
            "random-0": ("random_mask", _losing(100, 1), 0.1, {}),
            "random-1": ("random_mask", _losing(60, 2), 0.102, {}),
            "random-large": ("random_mask", _losing(400, 3), 0.5, {}),
            "random-rule": ("random_rule", _losing(100, 4), 0.1, {}),
            "harmless": ("mask", _losing(2), 0.1, {}),
            "unclear": ("mask", _losing(8), 0.1, {}),
            "costly": ("rule", _losing(200), 0.098, {}),
        },
    )
    verdict = judge(store, run_id[:5])
    assert (verdict.run_id, verdict.model, verdict.unjudged) == (run_id, "tiny", ())
    arms = {arm.name: arm for arm in verdict.arms}
    assert [arm.removable for arm in arms.values() if not arm.is_random] == [True, False, False]
    assert arms["unclear"].paired.difference == pytest.approx(-0.8) and arms["unclear"].paired.low <= -1
    controls = arms["harmless"].controls
    assert controls is not None and controls.arms == ("random-0", "random-1")
    assert controls.zeroed_share == pytest.approx(0.101)
    assert (controls.mean, controls.lowest, controls.highest) == pytest.approx((-8.0, -10.0, -6.0))
    assert controls.beaten and controls.advantage.difference == pytest.approx(7.8)
    costly = arms["costly"].controls
    assert costly is not None and costly.arms == ("random-rule",)
    assert not costly.beaten and costly.advantage.high < 0
    assert arms["random-0"].controls is None
    words = verdict.sentences()
    assert [w.split(" ")[0] for w in words] == ["harmless", "unclear", "costly"]
    assert (
        "removable within one point; recall not tested; better than the mean of 2 random controls of its size ("
        in words[0]
    )
    assert "not" not in words[0].replace("recall not tested", "")
    assert "not shown to be removable: the interval reaches below -1 point" in words[1]
    assert "not removable: it loses more than one point; worse than 1 random control of its size" in words[2]


def test_controls_of_the_same_nominal_share_come_first(evaluate: Evaluate) -> None:
    """A rule silences another share than its quantile: what is held against it is named by the quantile."""
    tenth = {"share": 0.1}
    store, run_id = evaluate(
        TASKS,
        {
            "baseline": ("baseline", BASELINE, 0.0, {}),
            "random rule": ("random_rule", _losing(100, 1), 0.101, {"share": 0.3 - 0.2, "seed": 0}),
            "random rule of 5": ("random_rule", _losing(50, 2), 0.06, {"share": 0.05, "seed": 0}),
            "random mask": ("random_mask", _losing(100, 3), 0.06, {**tenth, "seed": 0}),
            "rule": ("rule", _losing(3), 0.06, tenth),
            "rule of 6": ("rule", _losing(3), 0.06, {"share": 0.06}),
            "rule of 20": ("rule", _losing(3), 0.2, {"share": 0.2}),
        },
    )
    rule, by_size, without = judge(store, run_id).arms[:3]
    assert rule.controls is not None and rule.controls.arms == ("random rule",)
    assert "better than 1 random control of its nominal share, which silence 10.1% (-10.00" in rule.sentence()
    assert by_size.controls is not None and by_size.controls.arms == ("random rule of 5",)
    assert "1 random control of its size (-5.00" in by_size.sentence()
    assert without.controls is None and without.sentence().endswith("; no random control of its size.")


def test_an_arm_no_better_than_chance_is_said_to_be(evaluate: Evaluate) -> None:
    store, run_id = evaluate(
        TASKS,
        {
            "baseline": ("baseline", BASELINE, 0.0, {}),
            "random-0": ("random_mask", _losing(100, 1), 0.1, {}),
            "ten": ("mask", _losing(98, 2), 0.1, {}),
        },
    )
    ten = judge(store, run_id).arms[0]
    assert ten.controls is not None and not ten.controls.beaten
    assert "not told apart from 1 random control of its size" in ten.sentence()


def test_a_verdict_says_how_many_arms_are_missing(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", BASELINE, 0.0, {}), "ten": ("mask", _losing(2), 0.1, {})})
    whole = judge(store, run_id)
    assert (whole.unfinished, whole.progress) == (0, "")
    for name in ("twenty", "thirty"):
        store.begin_arm(ArmRecord(run_id, name, "mask"))
    part = judge(store, run_id)
    assert part.unfinished == 2
    assert part.sentences() == ["2 of 4 arms finished.", *whole.sentences()]


def test_few_questions_prove_nothing(evaluate: Evaluate) -> None:
    tasks = TASKS[:200]
    store, run_id = evaluate(
        tasks, {"baseline": ("baseline", BASELINE[:200], 0.0, {}), "same": ("mask", BASELINE[:200], 0.1, {})}
    )
    arm = judge(store, run_id).arms[0]
    assert arm.paired.difference == 0 and not arm.removable
    assert "at least 300 questions are needed" in arm.sentence()


def test_a_model_that_is_hardly_ever_right_proves_nothing(evaluate: Evaluate) -> None:
    right = np.repeat([1, 0], [20, QUESTIONS - 20])
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", right, 0.0, {}), "same": ("mask", right, 0.1, {})})
    arm = judge(store, run_id).arms[0]
    assert arm.paired.low > -1 and not arm.removable
    assert "the model itself is right on too few questions to lose any" in arm.sentence()


NEEDLES = np.array(["needle@512"] * 60 + ["needle@1024"] * 40)


def _with_needles(
    evaluate: Evaluate, baseline: np.ndarray, arms: dict[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[Store, str]:
    """A benchmark beside needles; of each arm its answers to both."""
    asked = np.concatenate([TASKS, NEEDLES])
    answered = {"baseline": ("baseline", np.concatenate([BASELINE, baseline]), 0.0, {})}
    answered |= {name: ("mask", np.concatenate(given), 0.1, {}) for name, given in arms.items()}
    return evaluate(asked, answered)


def test_an_arm_that_loses_recall_is_not_removable(evaluate: Evaluate) -> None:
    found = np.repeat([1, 0], [90, 10])
    lost = np.repeat([1, 0], [58, 42])
    store, run_id = _with_needles(
        evaluate,
        found,
        {
            "keeping": (_losing(2), found),
            "forgetting": (_losing(2), lost),
            "losing both": (_losing(200), lost),
            "losing answers": (_losing(200), found),
        },
    )
    keeping, forgetting, both, answers = judge(store, run_id).arms
    assert [arm.removable for arm in (keeping, forgetting, both, answers)] == [True, False, False, False]
    assert [arm.passes_benchmark for arm in (keeping, forgetting, both, answers)] == [True, True, False, False]
    # Needles are not among the benchmark's questions, and their lengths are one family.
    assert forgetting.paired.questions == QUESTIONS
    assert [(family.family, family.paired.questions) for family in forgetting.recall] == [("needle", 100)]
    assert forgetting.recall[0].paired.difference == pytest.approx(-32)
    assert "removable within one point; recall kept: needle (+0.0 points); no random" in keeping.sentence()
    assert "passes the benchmark, but fails needle (-32.0 points): not removable" in forgetting.sentence()
    assert "not removable: it loses more than one point; fails needle (-32.0 points)" in both.sentence()
    assert "needle" not in answers.sentence()


def test_a_model_that_cannot_retrieve_loses_nothing(evaluate: Evaluate) -> None:
    store, run_id = _with_needles(
        evaluate, np.repeat([1, 0], [30, 70]), {"ten": (_losing(2), np.repeat([0, 1], [95, 5]))}
    )
    (arm,) = judge(store, run_id).arms
    assert arm.recall[0].paired.difference == pytest.approx(-25) and not arm.recall[0].informative
    assert arm.removable
    assert "removable within one point; the model itself does not retrieve, so recall cannot tell" in arm.sentence()


def _perplexities(value: float) -> pa.Table:
    columns = ("task", "is_group", "metric", "filter", "value", "standard_error", "questions")
    rows = [("wikitext", False, "word_perplexity", "none", value, None, 2), ("all", True, "x", "none", 9.0, None, 2)]
    return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows])


def test_perplexity_alone_is_told_without_an_accuracy(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    nothing_right = answer_table(np.array(["wikitext"] * 2), np.full(2, np.nan))
    for name, kind, value in (("baseline", "baseline", 20.4), ("ten", "mask", 23.125)):
        arm_id = store.begin_arm(ArmRecord(run_id, name, kind)).arm_id  # type: ignore[arg-type]
        store.finish_arm(arm_id, nothing_right, results=_perplexities(value), zeroed_share=0.1)
    verdict = judge(store, run_id)
    assert verdict.arms == () and len(verdict.unjudged) == 1
    assert verdict.sentences() == [
        "ten (10.0% of heads silenced): wikitext word_perplexity 23.12 against 20.4; no accuracy to judge by."
    ]


def test_perplexity_beside_a_benchmark_is_told_too(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", BASELINE, 0.0, {}), "ten": ("mask", _losing(2), 0.1, {})})
    asked = np.concatenate([TASKS, ["wikitext"]])
    for arm in store.query("SELECT arm_id, name FROM arms").to_pylist():
        correct = BASELINE if arm["name"] == "baseline" else _losing(2)
        results = _perplexities(20.0 if arm["name"] == "baseline" else 21.0)
        a_task = results.set_column(0, "task", pa.array(["a", "all"]))
        answers = answer_table(asked, np.append(correct, np.nan).astype(float))
        store.finish_arm(arm["arm_id"], answers, results=pa.concat_tables([results.slice(0, 1), a_task]))
    (sentence,) = judge(store, run_id).sentences()
    assert "on 1000 questions" in sentence
    assert "; wikitext word_perplexity 21 against 20; removable within one point" in sentence
    assert "a word_perplexity" not in sentence  # a task with right answers is told by its accuracy


def test_what_cannot_be_judged(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS[:8], {"baseline": ("baseline", BASELINE[:8], 0.0, {})})
    with pytest.raises(VerdictError, match="a baseline and 0 other"):
        judge(store, run_id)
    arm_id = store.begin_arm(ArmRecord(run_id, "ten", "mask")).arm_id
    with pytest.raises(VerdictError, match="0 other"):
        judge(store, run_id)
    store.finish_arm(arm_id, answer_table(TASKS[:7], BASELINE[:7]))
    with pytest.raises(VerdictError, match=r"arm ten answered 7 questions, not the baseline's 8: evaluate it again"):
        judge(store, run_id)
    store.finish_arm(arm_id, answer_table(TASKS[-8:], BASELINE[:8]))
    with pytest.raises(VerdictError, match="arm ten answered 8 questions, others than the baseline: evaluate it again"):
        judge(store, run_id)
    store.finish_arm(
        store.begin_arm(ArmRecord(run_id, "again", "baseline")).arm_id, answer_table(TASKS[:8], BASELINE[:8])
    )
    with pytest.raises(VerdictError, match="2 finished baselines"):
        judge(store, run_id)
    with pytest.raises(StoreError, match="no evaluate run nobody"):
        judge(store, "nobody")
