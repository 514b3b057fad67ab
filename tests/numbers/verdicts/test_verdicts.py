from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.errors import StoreError, VerdictError
from headscan.steps.results import arm_row
from headscan.store.records import ArmKind, ArmRecord, RunRecord
from headscan.store.store import Store
from headscan.verdicts.arm_verdict import ArmVerdict, Outcome
from headscan.verdicts.judge import judge
from headscan.verdicts.ordered_shares import share_verdict
from headscan.verdicts.paired import Interval, retained_share
from headscan.verdicts.scope_verdicts import RecallVerdict
from headscan.verdicts.verdict_rows import record_verdicts
from headscan.verdicts.verdict_table import verdict_text
from tests.numbers.conftest import answer_table, compare
from tests.stores import begin_arm

Evaluate = Callable[..., tuple[Store, str]]

QUESTIONS = 1000
TASKS = np.repeat(["a", "b"], QUESTIONS // 2)
BASELINE = np.tile([1, 1, 1, 0], QUESTIONS // 4)
_MASK = ArmRecord(name="a", kind=ArmKind.MASK, ablated_share=0.1)


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
    assert (verdict.run_id, verdict.model, verdict.arms) == (run_id, "tiny", verdict.finished)
    arms = {arm.name: arm for arm in verdict.arms}
    assert [arm.is_safe for arm in arms.values() if not arm.kind.is_random] == [True, False, False]
    assert arms["unclear"].paired.difference == pytest.approx(-0.8) and arms["unclear"].paired.low <= -1
    controls = arms["harmless"].controls
    assert controls is not None and controls.arms == ("random-0", "random-1")
    assert controls.ablated_share == pytest.approx(0.101)
    assert (controls.mean, controls.lowest, controls.highest) == pytest.approx((-8.0, -10.0, -6.0))
    assert controls.beaten == 2 and not controls.beats_chance
    costly = arms["costly"].controls
    assert costly is not None and costly.arms == ("random-rule",)
    assert costly.beaten == 0
    assert arms["random-0"].controls is None
    words = verdict.sentences()
    assert [w.split(" ")[0] for w in words] == ["harmless", "unclear", "costly"]
    assert words[0] == (
        "harmless (10 % of heads ablated): safe within one point; recall is unknown. Accuracy 74.80 % against"
        " 75.00 % on 1,000 questions: -0.20 points [-0.72, +0.23], p = 0.5. Worst of 2 tasks and groups, with an"
        " interval widened for their number: b: -0.40 points [-1.62, +0.61]; the smallest, of 500 questions, shows"
        " losses from about 4 points. Recall was not tested. Of 2 random choices with"
        " as many heads, 2 lose more accuracy (-10.00 to -6.00 points); at least 19 are needed to show a"
        " better choice of heads than chance."
    )
    assert "): not shown to be safe: its loss may be more than one point. Accuracy" in words[1]
    assert "): not safe: it loses more than one point of accuracy. Accuracy" in words[2]
    assert "Of 1 random choice with as many heads, 0 lose more accuracy (-10.00 points)" in words[2]


def test_a_task_that_is_lost_fails_an_arm_whose_pooled_accuracy_is_kept(evaluate: Evaluate) -> None:
    """MMLU unchanged and GSM8K eight points down: all questions together lose 0.7 points [-0.8, -0.5]."""
    tasks = np.repeat(["gsm8k", "mmlu"], [1319, 14_042])
    baseline = np.tile([1, 1, 1, 0], len(tasks))[: len(tasks)]
    arm = baseline.copy()
    arm[np.flatnonzero(baseline[:1319])[:106]] = 0
    store, run_id = evaluate(tasks, {"baseline": ("baseline", baseline, 0.0, {}), "ten": ("mask", arm, 0.1, {})})
    (ten,) = judge(store, run_id).arms
    assert ten.paired.low > -1
    assert not ten.keeps_accuracy and not ten.is_safe
    (lost,) = ten.tasks_lost
    assert lost.task == "gsm8k" and lost.paired.difference == pytest.approx(-8.04, abs=0.01)
    assert "ten (10 % of heads ablated): not safe: it loses more than one point in gsm8k. Accuracy" in (ten.sentence())
    assert "Worst of 2 tasks and groups, with an interval widened for their number: gsm8k: -8.04 points [-9." in (
        ten.sentence()
    )
    record_verdicts(store, run_id)
    rows = store.query("SELECT task, failed, worst_task, worst_high FROM arm_verdicts ORDER BY task").to_pylist()
    assert [(row["task"], row["failed"], row["worst_task"]) for row in rows] == [
        ("(all)", True, "gsm8k"),
        ("gsm8k", True, None),
        ("mmlu", False, None),
    ]
    assert 100 * rows[0]["worst_high"] == pytest.approx(lost.wide.high)


def test_a_requested_group_is_judged_as_a_whole(evaluate: Evaluate) -> None:
    """Each of 20 subjects loses 4 of 100: too few to be shown in any, and hidden by a larger task in all together."""
    names = np.array([f"subject_{i:02}" for i in range(20)])
    tasks = np.concatenate([np.repeat(names, 100), np.repeat("trivia", 20_000)])
    baseline = np.ones(len(tasks), int)
    arm = baseline.copy()
    arm[:2000].reshape(20, 100)[:, :4] = 0
    arms = {"baseline": ("baseline", baseline, 0.0, {}), "ten": ("mask", arm, 0.1, {})}
    store, run_id = evaluate(tasks, arms)
    assert judge(store, run_id).arms[0].is_safe
    grouped = evaluate(tasks, arms, groups={"subjects": names.tolist(), "everything": np.unique(tasks).tolist()})
    (ten,) = judge(*grouped).arms
    assert [task.task for task in ten.tasks_lost] == ["subjects"] and not ten.is_safe
    # A group of all tasks is the benchmark itself.
    assert len(ten.tasks) == 22


def test_controls_of_the_same_nominal_share_come_first(evaluate: Evaluate) -> None:
    """A rule ablates another share than its quantile: what is held against it is named by the quantile."""
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
    assert "Of 1 random choice of its nominal share (they ablate 10.1 %), 1 loses more accuracy" in rule.sentence()
    assert by_size.controls is not None and by_size.controls.arms == ("random rule of 5",)
    assert "with as many heads, 1 loses more accuracy (-5.00" in by_size.sentence()
    assert without.controls is None and without.sentence().endswith(". No random control with as many heads.")


def _ranked(evaluate: Evaluate, lost: int, controls: Sequence[int]) -> ArmVerdict:
    """An arm that loses so many answers among random masks that lose so many."""
    arms = {"baseline": ("baseline", BASELINE, 0.0, {})}
    arms |= {f"random-{i}": ("random_mask", _losing(count, i), 0.1, {}) for i, count in enumerate(controls)}
    return judge(*evaluate(TASKS, arms | {"ten": ("mask", _losing(lost, 99), 0.1, {})})).arms[0]


def test_an_arm_is_better_than_chance_if_it_beats_19_random_ones(evaluate: Evaluate) -> None:
    best = _ranked(evaluate, 10, range(11, 30))
    assert best.controls is not None and best.controls.beats_chance and best.controls.p_value == pytest.approx(0.05)
    assert "Of 19 random choices with as many heads, 19 lose more accuracy (-2.90 to -1.10 points); p = 0.05" in (
        best.sentence()
    )


@pytest.mark.parametrize(
    ("controls", "says"),
    [
        (
            range(10, 29),
            "Of 19 random choices with as many heads, 18 lose more accuracy (-2.80 to -1.00 points); p = 0.1",
        ),
        (range(11, 29), "Of 18 random choices with as many heads, 18 lose more accuracy (-2.80 to -1.10 points); at"),
    ],
)
def test_a_tie_or_too_few_controls_show_nothing(evaluate: Evaluate, controls: Sequence[int], says: str) -> None:
    arm = _ranked(evaluate, 10, controls)
    assert arm.controls is not None and not arm.controls.beats_chance
    assert says in arm.sentence()


def test_a_verdict_reports_the_number_of_missing_arms(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", BASELINE, 0.0, {}), "ten": ("mask", _losing(2), 0.1, {})})
    whole = judge(store, run_id)
    assert (whole.unfinished, whole.progress) == (0, "")
    (run,), (arms,) = (
        store.runs("evaluate"),
        store.query("SELECT epoch(max(finished_at)) AS last FROM arms").to_pylist(),
    )
    assert run["last_written"].timestamp() == pytest.approx(arms["last"], abs=1e-3)
    for name in ("twenty", "thirty"):
        begin_arm(store, run_id, name, "mask")
    part = judge(store, run_id)
    assert part.unfinished == 2
    assert part.sentences() == ["2 of 4 arms finished.", *whole.sentences()]


def test_few_questions_prove_nothing(evaluate: Evaluate) -> None:
    tasks = TASKS[:200]
    store, run_id = evaluate(
        tasks, {"baseline": ("baseline", BASELINE[:200], 0.0, {}), "same": ("mask", BASELINE[:200], 0.1, {})}
    )
    arm = judge(store, run_id).arms[0]
    assert arm.paired.difference == 0 and not arm.is_safe
    words = arm.sentence()
    assert "not shown to be safe: too few questions (200): an arm that loses nothing and changes 0.0 % of the" in words
    assert "answers needs about 370. Accuracy" in words


@pytest.mark.parametrize(("questions", "safe"), [(367, False), (368, True)])
def test_the_required_number_of_questions_is_enough(evaluate: Evaluate, questions: int, safe: bool) -> None:
    same = BASELINE[:questions]
    arms = {"baseline": ("baseline", same, 0.0, {}), "same": ("mask", same, 0.1, {})}
    (arm,) = judge(*evaluate(np.repeat("a", questions), arms)).arms
    assert arm.is_safe is safe


def test_a_model_that_is_hardly_ever_right_proves_nothing(evaluate: Evaluate) -> None:
    right = np.repeat([1, 0], [20, QUESTIONS - 20])
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", right, 0.0, {}), "same": ("mask", right, 0.1, {})})
    arm = judge(store, run_id).arms[0]
    assert arm.paired.low > -1 and not arm.is_safe
    assert (
        "the model itself is at or near chance (2.0 % right, 50.0 % by guessing), so these questions show nothing"
        in (arm.sentence())
    )


def _four_choices(task: str, right: int, questions: int) -> pa.Table:
    found = answer_table(np.repeat(task, questions), np.repeat([1, 0], [right, questions - right]))
    likelihoods = pa.array([[-1.0, -2.0, -3.0, -4.0]] * questions)
    return found.set_column(found.column_names.index("log_likelihoods"), "log_likelihoods", likelihoods)


def _with_choices(path: Path, *tasks: tuple[str, int, int]) -> tuple[Store, str]:
    """Write a run whose mask answers as its baseline: task, right answers, questions."""
    store = Store(path / "s.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    answers = pa.concat_tables([_four_choices(*task) for task in tasks])
    for name, kind in (("baseline", "baseline"), ("ten", "mask")):
        arm_id = begin_arm(store, run_id, name, kind, share=0.1)
        store.finish_arm(arm_id, answers, ablated_share=0.1)
    record_verdicts(store, run_id)
    return store, run_id


@pytest.mark.parametrize(("right", "safe"), [(104, False), (112, False), (160, True)])
def test_a_benchmark_at_chance_shows_nothing(tmp_path: Path, right: int, safe: bool) -> None:
    """26, 28 and 40 % of 400 questions with four choices, all answered alike."""
    store, run_id = _with_choices(tmp_path, ("mmlu", right, 400))
    (arm,) = judge(store, run_id).arms
    assert arm.paired.low > -1 and arm.is_safe is safe
    words = f"not shown to be safe: the model itself is at or near chance ({right / 4:.1f} % right, 25.0 % by guessing"
    assert (words in arm.sentence()) is not safe
    (point,) = store.query("SELECT safe FROM all_sweep_points WHERE share > 0").to_pylist()
    assert point["safe"] is (True if safe else None)


def test_a_task_at_chance_is_named(tmp_path: Path) -> None:
    """20 % of 40 questions: whatever an arm answers there, it shows nothing."""
    store, run_id = _with_choices(tmp_path, ("arc", 360, 400), ("mmlu", 8, 40))
    (arm,) = judge(store, run_id).arms
    assert arm.is_safe
    assert "The model itself is at or near chance in mmlu, so these show nothing. Recall" in arm.sentence()


NEEDLES = np.array(["needle@512"] * 240 + ["needle@1024"] * 160)


def _with_needles(
    evaluate: Evaluate, baseline: np.ndarray, arms: dict[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[Store, str]:
    """Return each arm's answers to a benchmark and to needles."""
    asked = np.concatenate([TASKS, NEEDLES])
    answered = {"baseline": ("baseline", np.concatenate([BASELINE, baseline]), 0.0, {})}
    answered |= {name: ("mask", np.concatenate(given), 0.1, {}) for name, given in arms.items()}
    return evaluate(asked, answered)


def test_an_arm_that_loses_recall_is_not_removable(evaluate: Evaluate) -> None:
    found = np.tile(np.repeat([1, 0], [9, 1]), 40)
    lost = found * np.tile([1, 0, 1], 134)[:400]
    some = found.copy()
    some[np.flatnonzero(found)[::8]], some[np.flatnonzero(found == 0)[:38]] = 0, 1
    store, run_id = _with_needles(
        evaluate,
        found,
        {
            "keeping": (_losing(2), found),
            "forgetting": (_losing(2), lost),
            "losing both": (_losing(200), lost),
            "losing answers": (_losing(200), found),
            "changing some": (_losing(2), some),
        },
    )
    keeping, forgetting, both, answers, unclear = judge(store, run_id).arms
    assert [arm.is_safe for arm in (keeping, forgetting, both, answers, unclear)] == [True, *[False] * 4]
    assert [arm.keeps_accuracy for arm in (keeping, forgetting, both, answers)] == [True, True, False, False]
    # Needles are not among the benchmark's questions, and their lengths are one family.
    assert forgetting.paired.questions == QUESTIONS
    assert [(each.family, each.paired.questions) for each in forgetting.recall] == [("needle", 400)]
    assert keeping.recall[0].kept and not keeping.recall_open
    assert "): safe within one point. Accuracy" in keeping.sentence()
    assert ". Recall left: needle 100 % [95 %, 106 %]. " in keeping.sentence()
    assert "): not safe: it loses recall (needle). Accuracy" in forgetting.sentence()
    assert "): not safe: it loses more than one point of accuracy and loses recall (needle). Acc" in both.sentence()
    assert "loses recall" not in answers.sentence()
    assert not unclear.recall_lost and unclear.recall_open == "needle"
    assert "): not shown to be safe: recall is not shown to be kept (needle). Accuracy" in unclear.sentence()


def test_recall_of_few_questions_is_not_shown_to_be_kept(evaluate: Evaluate) -> None:
    """Identical answers to 72 questions: a tenth of the texts might be lost without one of them being drawn."""
    tasks = np.concatenate([TASKS, np.repeat("needle@512", 72)])
    same = np.concatenate([BASELINE, np.tile(np.repeat([1, 0], [9, 1]), 8)[:72]])
    arms = {"baseline": ("baseline", same, 0.0, {}), "same": ("mask", same, 0.1, {})}
    (arm,) = judge(*evaluate(tasks, arms)).arms
    assert arm.recall[0].informative and not arm.is_safe
    assert "recall is not shown to be kept (needle; about 332 needle questions are needed)" in arm.sentence()


def test_a_model_that_cannot_retrieve_loses_nothing(evaluate: Evaluate) -> None:
    store, run_id = _with_needles(
        evaluate, np.repeat([1, 0], [120, 280]), {"ten": (_losing(2), np.repeat([0, 1], [380, 20]))}
    )
    (arm,) = judge(store, run_id).arms
    assert arm.recall[0].paired.difference == pytest.approx(-25) and not arm.recall[0].informative
    assert arm.is_safe
    assert "Recall cannot be judged: the baseline fails the recall tasks" in arm.sentence()
    # An unknown recall is always named: the word, the reason, the sentence, and the table.
    unknown = "recall is unknown: the model itself does not solve this task"
    assert (arm.label, arm.why) == ("safe, recall unknown", unknown)
    assert "within one point; recall is unknown. Accuracy" in arm.sentence()
    assert "safe, recall unknown" in verdict_text([arm]) and f"ten: {unknown}" in verdict_text([arm])


def test_recall_that_was_not_asked_or_in_part_is_named(evaluate: Evaluate) -> None:
    arms = {"baseline": ("baseline", BASELINE, 0.0, {}), "same": ("mask", BASELINE, 0.1, {})}
    (arm,) = judge(*evaluate(TASKS, arms)).arms
    assert (arm.label, arm.why) == ("safe, recall unknown", "recall is unknown: it was not asked")
    tasks = np.concatenate([TASKS, np.repeat(["needle@64", "copying@64"], 400)])
    same = np.concatenate([BASELINE, np.repeat([0.0, 1.0], 400)])
    arms = {"baseline": ("baseline", same, 0.0, {}), "same": ("mask", same, 0.1, {})}
    (arm,) = judge(*evaluate(tasks, arms)).arms
    assert (arm.label, arm.recall_lost) == ("safe, needle unknown", "")
    assert share_verdict(arm, 0.1).label == "safe, needle unknown"


def _perplexities(value: float) -> pa.Table:
    columns = ("task", "is_group", "metric", "filter", "value", "standard_error", "questions")
    rows = [("wikitext", False, "word_perplexity", "none", value, None, 2), ("all", True, "x", "none", 9.0, None, 2)]
    return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows])


def test_perplexity_alone_has_no_accuracy(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    nothing_right = answer_table(np.array(["wikitext"] * 2), np.full(2, np.nan))
    for name, kind, value in (("baseline", "baseline", 20.4), ("ten", "mask", 23.125)):
        arm_id = begin_arm(store, run_id, name, kind)
        store.finish_arm(arm_id, nothing_right, results=_perplexities(value), ablated_share=0.1)
    verdict = judge(store, run_id)
    assert verdict.arms == () and [arm.accuracy for arm in verdict.finished] == [None]
    assert verdict.sentences() == [
        "ten (10 % of heads ablated): no task has right answers to count. Measured wikitext word_perplexity: 23.12"
        " against 20.4. Recall was not tested."
    ]


def test_perplexity_in_addition_to_a_benchmark_is_reported(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", BASELINE, 0.0, {}), "ten": ("mask", _losing(2), 0.1, {})})
    asked = np.concatenate([TASKS, ["wikitext"]])
    for arm in store.query("SELECT arm_id, name FROM arms").to_pylist():
        correct = BASELINE if arm["name"] == "baseline" else _losing(2)
        results = _perplexities(20.0 if arm["name"] == "baseline" else 21.0)
        a_task = results.set_column(0, "task", pa.array(["a", "all"]))
        answers = answer_table(asked, np.append(correct, np.nan).astype(float))
        store.finish_arm(arm["arm_id"], answers, results=pa.concat_tables([results.slice(0, 1), a_task]))
    (sentence,) = judge(store, run_id).sentences()
    assert "on 1,000 questions" in sentence
    assert ". Measured wikitext word_perplexity: 21 against 20. " in sentence
    assert "a word_perplexity" not in sentence  # a task with right answers is told by its accuracy


def test_a_baseline_alone_has_a_verdict_without_arms_if_that_is_asked_for(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS[:8], {})
    arm_ids = [begin_arm(store, run_id, name, "baseline") for name in ("baseline", "again")]
    with pytest.raises(VerdictError, match=f"^run {run_id} has 0 finished baselines"):
        judge(store, run_id, baseline_alone=True)
    answers = answer_table(TASKS[:8], BASELINE[:8])
    store.finish_arm(arm_ids[0], answers)
    verdict = judge(store, run_id, max_loss=0.2, baseline_alone=True)
    assert (verdict.run_id, verdict.arms, verdict.unfinished, verdict.max_loss) == (run_id, (), 1, 0.2)
    with pytest.raises(VerdictError, match="has 0 finished arms in addition"):
        judge(store, run_id)
    store.finish_arm(arm_ids[1], answers)
    with pytest.raises(VerdictError, match=f"^run {run_id} has 2 finished baselines"):
        judge(store, run_id, baseline_alone=True)


def test_arms_that_cannot_be_judged(evaluate: Evaluate) -> None:
    store, run_id = evaluate(TASKS[:8], {"baseline": ("baseline", BASELINE[:8], 0.0, {})})
    with pytest.raises(VerdictError, match="has 0 finished arms in addition"):
        judge(store, run_id)
    arm_id = begin_arm(store, run_id, "ten", "mask")
    with pytest.raises(VerdictError, match="has 0 finished arms"):
        judge(store, run_id)
    store.finish_arm(arm_id, answer_table(TASKS[:7], BASELINE[:7]))
    with pytest.raises(VerdictError, match=r"arm ten answered 7 questions \(baseline 8\)\. Evaluate it again"):
        judge(store, run_id)
    store.finish_arm(arm_id, answer_table(TASKS[-8:], BASELINE[:8]))
    with pytest.raises(
        VerdictError, match=r"arm ten answered 8 questions that differ from the baseline's\. Evaluate it again"
    ):
        judge(store, run_id)
    store.finish_arm(begin_arm(store, run_id, "again", "baseline"), answer_table(TASKS[:8], BASELINE[:8]))
    with pytest.raises(VerdictError, match="2 finished baselines"):
        judge(store, run_id)
    with pytest.raises(StoreError, match="no evaluate run nobody"):
        judge(store, "nobody")


def test_rows_of_json_have_the_outcome_and_its_reason(evaluate: Evaluate) -> None:
    arms = {"baseline": ("baseline", BASELINE, 0.0, {}), "close": ("mask", _losing(8), 0.1, {})}
    arms |= {"harmful": ("mask", _losing(40), 0.1, {}), "harmless": ("mask", BASELINE, 0.1, {})}
    rows = {arm.name: arm_row(arm) for arm in judge(*evaluate(TASKS, arms)).arms}
    words = {name: (row["outcome"], row["label"], row["safe"]) for name, row in rows.items()}
    assert words == {
        "close": ("not shown", "not shown", False),
        "harmful": ("loses", "loses", False),
        "harmless": ("safe", "safe, recall unknown", True),
    }
    assert rows["harmful"]["why"] == "accuracy (-4.0 points)" and rows["close"]["why"].startswith("may lose more")
    unjudged = arm_row(ArmVerdict(arm=_MASK))
    assert {unjudged[name] for name in ("safe", "outcome", "label", "why", "accuracy")} == {None}


def test_the_reason_of_an_open_verdict_is_the_true_one() -> None:
    """300 questions of which none changes could lose more than a point; those that lose some are open."""
    paired = compare(np.full(300, 0.8), np.full(300, 0.8))
    arm = ArmVerdict(arm=_MASK, accuracy=paired)
    assert arm.outcome is Outcome.NOT_SHOWN and arm.why.startswith("needs about 370 questions")
    drop = replace(paired, low=-1.5, high=-0.1, difference=-0.8)
    assert replace(arm, accuracy=drop).why.startswith("may lose more than one point")
    assert replace(arm, accuracy=replace(paired, chance=78.0)).why.startswith("the model itself is at or near chance")


def test_too_few_questions_are_named_only_if_more_could_settle_everything() -> None:
    """A drop of up to 1.8 points, and 72 needle questions: more of these cannot show that accuracy is kept."""
    right = np.ones(2000)
    accuracy = replace(compare(right, right), difference=-0.95, low=-1.8, high=-0.1, gained=20, lost=39)
    needles = np.tile(np.repeat([1.0, 0.0], [9, 1]), 8)[:72]
    texts = np.arange(72) // 4
    asked = replace(compare(needles, needles, texts=texts), retained=retained_share(needles, needles, texts, 25.0))
    recall = RecallVerdict("needle", asked)
    arm = ArmVerdict(arm=_MASK, accuracy=accuracy, recall=(recall,))
    assert arm.why.startswith("may lose more than one point; needs about 332 needle questions")
    assert [gap.needed for gap in arm.decision.gaps] == [None, 332]
    assert (arm.outcome, arm.too_few_questions, arm.label) == (Outcome.NOT_SHOWN, False, "not shown")
    assert share_verdict(arm, 0.1).label == "not shown"
    kept = replace(arm, accuracy=compare(right, right))
    assert (kept.why, kept.label) == ("needs about 332 needle questions", "too few questions")
    few = replace(kept, accuracy=compare(right[:300], right[:300]))
    assert [gap.needed for gap in few.decision.gaps] == [368, 332] and few.label == "too few questions"
    assert replace(few, recall=(replace(recall, judging_share=0.75),)).decision.gaps[1].needed == 443
    # More needles than an arm without loss needs, and still not shown to be kept.
    many = replace(recall, paired=replace(asked, questions=400, retained=Interval(85.0, 92.0, 99.0)))
    assert replace(few, recall=(many,)).label == "not shown"


def test_the_table_of_a_terminal_has_the_numbers_and_says_what_is_missing(evaluate: Evaluate) -> None:
    """Controls have no row; a lost task, too few questions and recall that nobody asked are all named."""
    arms = {
        "baseline": ("baseline", BASELINE, 0.0, {}),
        "random": ("random_mask", _losing(100, 1), 0.1, {}),
        "harmful": ("mask", _losing(40), 0.1, {}),
        "close": ("mask", _losing(8), 0.1, {}),
        "harmless": ("mask", BASELINE, 0.1, {}),
    }
    verdict = judge(*evaluate(TASKS, arms))
    text = str(verdict)
    assert text.startswith("whole model: accuracy 75.0 % on 1,000 questions, recall was not asked, so it may be lost")
    rows = {line.split()[0]: line for line in text.splitlines() if "10 %" in line}
    assert set(rows) == {"harmful", "close", "harmless"}
    by_name = {arm.name: arm for arm in verdict.arms}
    for name, line in rows.items():
        arm = by_name[name]
        assert arm.paired.interval.words(1) in line and "1 of 1" in line and line.endswith(arm.label)
    outcomes = [by_name[name].outcome for name in ("harmful", "close", "harmless")]
    assert outcomes == [Outcome.LOSES, Outcome.NOT_SHOWN, Outcome.SAFE]
    assert "harmful: accuracy (-4.0 points)" in text and f"close: {by_name['close'].why}" in text
    assert "harmless: recall is unknown: it was not asked\n" in text
    assert text.endswith("less than 90 % of recall is shown")
    assert (
        "at least 90 % of recall is left; a loss of the recall answers counts against it if more than 1 point is shown"
        in text
    )
    unfinished = replace(verdict, unfinished=1)
    assert str(unfinished) == f"5 of 6 arms finished\n\n{text}"
    html = unfinished._repr_html_()
    assert html.startswith(f"<p>run {verdict.run_id}: 5 of 6 arms finished</p><p>whole model: accuracy 75.0 %")
    assert html.count("<tr>") == 4 and "<td>harmful</td><td>10 %</td>" in html
    assert "<br>harmless: recall is unknown: it was not asked<br><br>" in html and html.count("<td>random") == 1
    assert str(replace(verdict, finished=verdict.finished[-1:])) == "no arms but the baseline and controls"
