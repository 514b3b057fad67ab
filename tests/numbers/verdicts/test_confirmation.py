"""A sweep selects on one part of the questions and judges on the other: the selection, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from headscan.catalog import SCORES
from headscan.store.records import ArmKind, ArmRecord, RunRecord
from headscan.store.store import Store
from headscan.store.verdict_limits import MARGIN, MIN_RETAINED, MIN_SAFE_TEXTS, TAIL, identical_questions
from headscan.verdicts.answer_sheets import BENCHMARK, Scope
from headscan.verdicts.confirmation import (
    Candidate,
    SweepChoice,
    best_candidate,
    choices_text,
    judge_sweep,
    judged_on_same,
    record_confirmation,
)
from headscan.verdicts.controls import SelectedRank
from headscan.verdicts.judge import judge
from headscan.verdicts.paired import Interval, PairedDifference, about, retained_share
from headscan.verdicts.scope_verdicts import RecallVerdict, widened_differences
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.conftest import compare
from tests.numbers.sweep_fixtures import write_sweep
from tests.stores import arm_record, begin_arm, copy_store

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


# The selection


def _candidates(curves: Mapping[str, str], low: float = 0.0) -> list[Candidate]:
    """Of each score its arms at growing shares: ``+`` is safe, ``-`` is not, ``r`` loses recall besides. Lower ends
    fall from score to score, and a little from share to share.
    """
    return [
        Candidate(f"{score} {share}", (score, None), share, letter == "+", letter == "r", low - number - share)
        for number, (score, letters) in enumerate(curves.items())
        for share, letter in zip(SHARES, letters, strict=False)
    ]


@pytest.mark.parametrize(
    ("curves", "selected"),
    [
        ({"a": "++-", "b": "+--"}, "a 0.1"),
        ({"a": "+--", "b": "+++-"}, "b 0.15"),
        ({"a": "++-", "b": "++-"}, "a 0.1"),  # the higher interval
        ({"a": "+-+++", "b": "++-"}, "b 0.1"),  # what is safe behind a failure does not count
        ({"a": "-++++", "b": "+-"}, "b 0.05"),
        ({"a": "-++++", "b": "---"}, "a 0.05"),  # no arm qualifies: the highest interval
        ({"a": "r", "b": "-"}, "b 0.05"),
        ({"a": "r", "b": "r"}, "a 0.05"),
    ],
)
def test_the_largest_share_up_to_which_a_score_is_safe_is_selected(curves: dict[str, str], selected: str) -> None:
    candidates = _candidates(curves)
    for order in (candidates, candidates[::-1]):
        best = best_candidate(order)
        assert best is not None and best.name == selected


def test_nothing_is_selected_from_nothing() -> None:
    assert best_candidate([]) is None


# What the selection costs: simulated sweeps


@dataclass(frozen=True)
class Simulated:
    """Lower ends of intervals, in points, of ``sweeps`` simulated sweeps: (sweeps, scores, shares)."""

    first: np.ndarray
    second: np.ndarray
    together: np.ndarray

    def safe(self) -> float:
        """How often a sweep calls an arm safe that it selected on one half and judged on the other half."""
        return float(np.mean([self._confirmed(number) is not None for number in range(len(self.first))]))

    def _confirmed(self, number: int) -> Candidate | None:
        lows = self.first[number]
        best = best_candidate(
            Candidate(f"{score} {place}", (str(score),), SHARES[place], low > -MARGIN, False, low)
            for score, of_score in enumerate(lows)
            for place, low in enumerate(of_score)
        )
        assert best is not None
        score, place = map(int, best.name.split())
        return best if self.second[number, score, place] > -MARGIN else None


def _low(gained: np.ndarray, lost: np.ndarray, questions: int) -> np.ndarray:
    """The lower end of the 95 % interval of a paired difference, in points, by the normal approximation."""
    difference = (gained - lost) / questions
    variance = (gained + lost) / questions - difference**2
    return 100 * (difference - 1.96 * np.sqrt(variance / questions))


def _simulate(lost: np.ndarray, gained: np.ndarray, questions: int, sweeps: int = 1000) -> Simulated:
    """Draw the answers of all arms: ``lost`` and ``gained`` are (scores, shares), true shares of the questions."""
    rng = np.random.default_rng(0)
    kinds = np.stack([gained, lost, 1 - gained - lost], axis=-1)
    halves = [rng.multinomial(questions // 2, kinds, size=(sweeps, *lost.shape)) for _ in range(2)]
    first, second = (_low(half[..., 0], half[..., 1], questions // 2) for half in halves)
    both = halves[0] + halves[1]
    return Simulated(first, second, _low(both[..., 0], both[..., 1], questions))


def test_the_simulated_intervals_are_those_of_verdicts() -> None:
    delta = np.repeat([-1, 1, 0], [80, 50, 1870])
    paired = compare(np.where(delta < 0, 1.0, 0.0), np.where(delta > 0, 1.0, 0.0))
    assert _low(np.array(50), np.array(80), 2000) == pytest.approx(paired.low, abs=0.1)


@pytest.mark.parametrize(("questions", "most"), [(800, 0.03), (2000, 0.025), (8000, 0.01)])
def test_no_arm_is_safe_if_all_lose_a_point_and_a_half(questions: int, most: float) -> None:
    """15 scores at 6 shares, all of them truly beyond the margin; on the questions that selected it, the best is called
    safe in one sweep of ten."""
    lost, gained = np.full((15, 6), 0.035), np.full((15, 6), 0.02)
    simulated = _simulate(lost, gained, questions)
    if questions == 2000:
        assert 0.05 < (simulated.together > -MARGIN).any(axis=(1, 2)).mean() < 0.2
    assert simulated.safe() <= most


def test_a_safe_arm_is_found() -> None:
    """One score costs nothing up to 15 % of heads, and two points beyond; all others cost three points."""
    lost, gained = np.full((15, 6), 0.04), np.full((15, 6), 0.01)
    lost[4, :3], lost[4, 3:] = 0.01, 0.03
    assert _simulate(lost, gained, 8000).safe() > 0.9
    assert _simulate(lost, gained, 4000).safe() > 0.6


# What judging again and again costs


@pytest.mark.parametrize(("arms", "before"), [(1, 0.025), (5, 0.118), pytest.param(20, 0.39, marks=pytest.mark.slow)])
def test_arms_that_share_a_half_share_the_error_of_one(arms: int, before: float) -> None:
    """Arms that all truly lose one point are judged on one half; one of them is called safe in 2.5 % of cases."""
    rng, sweeps = np.random.default_rng(0), 200
    alone, shared = np.zeros((2, sweeps, arms), bool)
    for place in np.ndindex(sweeps, arms):
        delta = rng.choice([-1, 0, 1], 4000, p=[0.025, 0.96, 0.015])
        paired = compare(delta < 0, delta > 0)
        alone[place] = paired.low > -MARGIN
        shared[place] = _widened(BENCHMARK, paired, arms).low > -MARGIN
    assert alone.any(axis=1).mean() == pytest.approx(before, abs=0.06)
    assert shared.any(axis=1).mean() <= 0.025 + 0.02


def _widened(scope: Scope, paired: PairedDifference, comparisons: int) -> PairedDifference:
    return widened_differences({scope: paired}, comparisons, comparisons)[scope]


@pytest.mark.parametrize("comparisons", [1, 2, 5, 20])
def test_few_differing_answers_are_widened_enough(comparisons: int) -> None:
    """The least questions with which an arm can be safe: one that loses a point is in 2.5 % of cases, shared."""
    least = identical_questions(comparisons)
    for questions in (least - 1, least, least + 150, 3 * least):
        chance = 0.0
        for lost in range(questions):
            delta = np.arange(questions) < lost
            paired = compare(np.ones(questions), 1.0 - delta)
            if _widened(BENCHMARK, paired, comparisons).low <= -MARGIN:
                break
            chance += stats.binom.pmf(lost, questions, MARGIN / 100)
        assert (chance > 0) == (questions >= least)
        assert chance <= TAIL / comparisons


@pytest.mark.parametrize("comparisons", [1, 2, 5, 20])
def test_recall_of_identical_answers_is_widened_enough(comparisons: int) -> None:
    """A tenth of all texts is lost; the texts that are asked show nothing of it, and recall is called kept."""
    for texts in range(20, 120):
        answers = np.ones(texts)
        kept = retained_share(answers, answers, np.arange(texts), 0.0)
        paired = replace(compare(answers, answers), retained=kept)
        wide = _widened(Scope("copying", True), paired, comparisons).retained
        assert wide is not None
        if wide.low >= MIN_RETAINED:
            assert 0.9**texts <= 1.15 * TAIL / comparisons  # the bound of the verdict itself is drawn
            break
    else:
        pytest.fail("no number of texts is enough")


def test_a_loss_of_recall_in_points_is_widened() -> None:
    """Of 1,000 texts an arm loses 55 and gains 25. One comparison shows a loss of more than a point, five do not."""
    scope, texts = Scope("copying", True), np.arange(1000)
    baseline, arm = np.where(texts < 25, 0.0, 1.0), np.where(texts >= 945, 0.0, 1.0)
    paired = replace(compare(baseline, arm, texts=texts), retained=retained_share(baseline, arm, texts, 0.0))
    one, five = (RecallVerdict("copying", _widened(scope, paired, count)) for count in (1, 5))
    assert paired.retained is not None and paired.retained.high > MIN_RETAINED
    assert one.paired.interval == paired.interval and one.failed and not five.failed
    assert five.paired.interval == pytest.approx(paired.simultaneous_interval(5))


@pytest.mark.parametrize("comparisons", [2, 5])
def test_kinds_that_share_recall_questions_share_the_error_of_a_loss(comparisons: int) -> None:
    """Independent arms that truly lose one point of recall: one of them is called lost in 2.5 % of cases."""
    rng, scope, texts = np.random.default_rng(0), Scope("copying", True), np.arange(800)
    runs, lost = 400, {1: 0, comparisons: 0}
    for _ in range(runs):
        arms = []
        for _ in range(comparisons):
            delta = rng.choice([-1, 0, 1], 800, p=[0.05, 0.91, 0.04])
            paired = compare(delta < 0, delta > 0, texts=texts)
            arms.append(replace(paired, baseline=80.0, retained=Interval(80, 95, 110)))
        for count in lost:
            verdicts = (RecallVerdict("copying", _widened(scope, paired, count)) for paired in arms)
            lost[count] += any(verdict.failed for verdict in verdicts)
    assert lost[comparisons] / runs <= 0.025 + 0.016
    assert lost[1] > lost[comparisons]


# The verdict


def _write(path: Path, harmed: str) -> tuple[Store, str]:
    """A sweep of two scores on 2,000 questions.

    At 5 % of heads no arm loses anything. Beyond, ``entropy`` loses 100 questions, all of them in the part ``harmed``,
    and ``value_norm`` loses 100 in each part.
    """
    store = Store(path, lock_timeout=5.0)
    run_id = store.begin_run(RunRecord("evaluate", "e0", "tiny", 3, 8)).run_id
    right = np.arange(2000) % 4 > 0

    def finish(record: ArmRecord, correct: np.ndarray) -> None:
        store.begin_arm(record)
        store.finish_arm(record.arm_id, _table(correct), ablated_share=record.share or 0.0)

    finish(arm_record(run_id, "baseline", "baseline"), right)
    parts = np.array(store.query("SELECT part FROM all_question_split ORDER BY question")["part"].to_pylist())
    lost = {part: np.flatnonzero(right & (parts == part))[:100] for part in ("selection", "confirmation")}
    # One opening of the file for all arms: the store's own methods open it for each.
    with store.one_transaction():
        for kind in ("rule", "mask", "random_rule"):
            for seed, score in enumerate(("entropy", "value_norm")):
                for share in (0.05, 0.1, 0.2):
                    answers = right.copy()
                    for part in (lost if score == "value_norm" else [harmed]) if share > 0.05 else []:
                        answers[lost[part]] = False
                    known: dict[str, Any] = {"seed": seed} if kind == "random_rule" else {"criterion": score}
                    finish(arm_record(run_id, f"{kind} {score} {share:g}", kind, share=share, **known), answers)
    return store, run_id


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Of each part in which entropy is harmed, the sweep's file and run."""
    found = {}
    for harmed in ("selection", "confirmation"):
        store, run_id = _write(tmp_path_factory.mktemp(harmed) / "s.duckdb", harmed)
        found[harmed] = (store.path, run_id)
    return found


@pytest.fixture
def harmed(written: dict[str, tuple[Path, str]], tmp_path: Path) -> Callable[[str], tuple[Store, str]]:
    """A sweep of the test's own by the part in which entropy is harmed."""

    def copied(part: str) -> tuple[Store, str]:
        path, run_id = written[part]
        return Store(copy_store(path, tmp_path / "s.duckdb"), lock_timeout=5.0), run_id

    return copied


def _table(correct: np.ndarray) -> pa.Table:
    number = np.arange(len(correct))
    documents = [f"doc {i}" for i in number]
    return pa.table({"task": ["a"] * len(number), "question": number, "doc_hash": documents, "correct": correct * 1.0})


def _choices(store: Store, run_id: str, **options: bool) -> dict[str, SweepChoice]:
    return {choice.verdict.kind: choice for choice in judge_sweep(store, judge(store, run_id), **options)}


def test_one_part_selects_and_the_other_judges(harmed: Callable[[str], tuple[Store, str]]) -> None:
    """Entropy looks free at every share on the questions that select, and loses on those that judge."""
    store, run_id = harmed("confirmation")
    choices = _choices(store, run_id)
    assert set(choices) == {"rule", "mask"}
    for kind, choice in choices.items():
        assert choice.verdict.name == f"{kind} entropy 0.2"
        assert (choice.candidates, choice.selection_safe, choice.confirmed) == (6, True, True)
        assert (choice.selected_on, choice.verdict.paired.questions) == (1000, 1000)
        assert choice.verdict.paired.lost == 100 and choice.verdict.paired.difference == pytest.approx(-10)
        assert not choice.verdict.is_safe
        assert "selected on 1,000 questions and judged on 1,000 others" in choice.sentence()
    # Random arms of the same share are compared on the judging part, too.
    controls = choices["rule"].verdict.controls
    assert controls is not None and controls.lowest == controls.highest == pytest.approx(-10)
    assert choices["mask"].verdict.controls is None
    text = choices_text(list(choices.values()))
    assert all(f"{choice.verdict.name}: {choice.origin()}\n" in text for choice in choices.values())
    assert text.endswith("\n\nsafe within one point, confirmed on other questions: no arm")


def test_the_judging_part_does_not_select(harmed: Callable[[str], tuple[Store, str]]) -> None:
    """Entropy is free at every share on the questions that judge, but on those that select it is at 5 % alone."""
    store, run_id = harmed("selection")
    choice = _choices(store, run_id)["mask"]
    assert choice.verdict.name in ("mask entropy 0.05", "mask value_norm 0.05")
    assert choice.verdict.paired.lost == 0 and choice.verdict.is_safe
    assert str(choice) == choice.sentence()
    assert str(choice).startswith(
        "Best of 6 masks, selected on 1,000 questions and judged on 1,000 others by intervals widened for the 2 arms"
        f" that they have judged: {choice.verdict.name} (5 %"
    )


def test_without_confirmation_all_questions_select_and_judge(harmed: Callable[[str], tuple[Store, str]]) -> None:
    store, run_id = harmed("confirmation")
    verdict = judge(store, run_id)
    choice = _choices(store, run_id, confirm=False)["rule"]
    controls = choice.verdict.controls
    assert controls is not None and controls.selected == SelectedRank(2, 2, None)
    assert not choice.confirmed and choice.comparisons == 1
    assert replace(choice.verdict, controls=replace(controls, selected=None)) in verdict.arms
    assert choice.verdict.paired.questions == choice.selected_on == 2000
    assert "selected and judged on the same 2,000 questions, so its interval is not corrected for the selection" in (
        choice.sentence()
    )
    assert store.query("FROM all_sweep_confirmed").num_rows == 0


def test_sql_shows_the_selected_and_confirmed_arms(harmed: Callable[[str], tuple[Store, str]]) -> None:
    store, run_id = harmed("confirmation")
    choices = _choices(store, run_id)
    assert store.query("FROM split_verdicts").num_rows == 0
    record_confirmation(store, run_id)
    rows = store.query("FROM all_sweep_confirmed").to_pylist()
    assert [row["kind"] for row in rows] == ["mask", "rule"]
    for row in rows:
        paired = choices[row["kind"]].verdict.paired
        assert (row["run_id"], row["arm"]) == (run_id, choices[row["kind"]].verdict.name)
        assert (row["selection_questions"], row["questions"]) == (1000, 1000)
        assert row["selection_safe"] is True and row["safe"] is False
        assert row["selection_difference"] == 0.0
        numbers = [100 * row[name] for name in ("baseline", "accuracy", "difference", "wide_low")]
        assert numbers == pytest.approx([paired.baseline, paired.arm, paired.difference, paired.low])
        assert row["comparisons"] == choices[row["kind"]].comparisons == 2
        assert row["wide_low"] < row["low"] < row["difference"]


@pytest.mark.slow
def test_another_judgement_gives_the_same_and_new_arms_are_taken_up(harmed: Callable[[str], tuple[Store, str]]) -> None:
    store, run_id = harmed("confirmation")
    before = _choices(store, run_id)
    record_confirmation(store, run_id)
    rows = store.query("FROM split_verdicts ORDER BY ALL")
    assert _choices(store, run_id) == before
    record_confirmation(store, run_id)
    assert store.query("FROM split_verdicts ORDER BY ALL").equals(rows)
    # A better rule comes: it takes the place of the selected one, whose judgement goes.
    answers = _table(np.arange(2000) % 4 > 0)
    record = arm_record(run_id, "rule entropy 0.3", "rule", criterion="entropy", share=0.3)
    store.begin_arm(record)
    arm_id = record.arm_id
    store.finish_arm(arm_id, answers, ablated_share=0.3)
    after = _choices(store, run_id)
    assert after["rule"].verdict.name == record.name and after["rule"].verdict.is_safe
    # The rule that was selected before was judged, too, and counts.
    assert (before["mask"].comparisons, after["mask"].comparisons) == (2, 3)
    assert after["mask"].verdict.paired.low < before["mask"].verdict.paired.low
    record_confirmation(store, run_id)
    assert _choices(Store(store.path), run_id) == after
    assert store.query("SELECT arm FROM all_sweep_confirmed ORDER BY kind")["arm"].to_pylist() == [
        "mask entropy 0.2",
        "rule entropy 0.3",
    ]
    # Other answers of an arm, and what was found of the old ones is gone.
    store.finish_arm(arm_id, _table(np.zeros(2000)), ablated_share=0.3)
    assert store.query("FROM split_verdicts WHERE arm_id = ?", [arm_id]).num_rows == 0
    assert _choices(store, run_id)["rule"].verdict.name == "rule entropy 0.2"


def test_random_curves_go_through_the_same_selection(tmp_path: Path) -> None:
    """One score among 19 random curves, each with its best share; among 18, no rank is printed or computed."""
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    settings = {"scores": tuple(SCORES)[:1], "shares": (0.05, 0.1), "kinds": ("mask",), "recall": False}
    run_id = write_sweep(store, **settings, seeds=19, questions=1000)  # type: ignore[arg-type]
    for confirm in (True, False):
        controls = _choices(store, run_id, confirm=confirm)["mask"].verdict.controls
        assert controls is not None and controls.selected == SelectedRank(1, 19, 19) and controls.beats_chance
        says = "further than 19 of 19 random curves, each at its own best share: p = 0.05 for the best of 1 score, a"
        assert says in controls.sentence(ArmKind.MASK, 0.1)
    record_confirmation(store, run_id)
    rows = store.query(
        "SELECT kind, part, count(*) AS n FROM split_verdicts JOIN arms USING (arm_id) WHERE task = '(all)'"
        " GROUP BY ALL ORDER BY ALL"
    ).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("mask", "confirmation", 1),
        ("mask", "selection", 2),
        ("random_mask", "selection", 38),
    ]
    assert (
        _choices(Store(store.path), run_id)["mask"].verdict.controls == _choices(store, run_id)["mask"].verdict.controls
    )
    with store.connect() as connection:
        connection.execute("UPDATE arms SET status = 'running' WHERE seed = 18 AND share < 0.06")
    for confirm in (True, False):
        controls = _choices(store, run_id, confirm=confirm)["mask"].verdict.controls
        assert controls is not None and not controls.beats_chance and controls.p_value is None
        says = "; at least 19 random controls of every share are needed to show a better choice of heads than chance"
        assert says in controls.sentence(ArmKind.MASK, 0.1) and "p =" not in controls.sentence(ArmKind.MASK, 0.1)


def test_later_arms_in_the_run_of_a_sweep_change_neither_its_choice_nor_the_rank(tmp_path: Path) -> None:
    """An evaluation adds a mask of another score and share, with random ones, to the run."""
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    settings = {"scores": tuple(SCORES)[:1], "shares": (0.05, 0.1), "kinds": ("mask",), "recall": False}
    run_id = write_sweep(store, **settings, seeds=19, questions=1000)  # type: ignore[arg-type]
    before = {confirm: _choices(store, run_id, confirm=confirm)["mask"] for confirm in (True, False)}
    baseline = store.query("SELECT arm_id FROM arms WHERE kind = 'baseline'")["arm_id"].to_pylist()
    same = store.query("SELECT task, question, recall, correct FROM answers WHERE list_contains(?, arm_id)", [baseline])
    with store.one_transaction():
        mask = arm_record(run_id, "mask by hand", "mask", criterion=tuple(SCORES)[1], share=0.2)
        drawn = [arm_record(run_id, f"random 20% {seed}", "random_mask", share=0.2, seed=seed) for seed in range(3)]
        drawn += [arm_record(run_id, f"random 10% {seed}", "random_mask", share=0.1, seed=seed) for seed in (19, 20)]
        for record in (mask, *drawn):
            store.begin_arm(record)
            store.finish_arm(record.arm_id, same, ablated_share=record.share)
    for _ in range(2):
        assert _choices(store, run_id)["mask"] == before[True]
        record_confirmation(store, run_id)
    after = _choices(store, run_id, confirm=False)["mask"]
    controls = (after.verdict.controls, before[False].verdict.controls)
    assert [each and each.selected for each in controls] == [SelectedRank(1, 19, 19)] * 2
    assert after.verdict.name == before[False].verdict.name and after.candidates == before[False].candidates


def test_later_sweeps_on_the_same_questions_widen_all_judgements(tmp_path: Path) -> None:
    """Sweeps of other values are runs of their own, on the same half; other questions and models do not count."""
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)

    def swept(mark: str, model: str = "tiny", asked: int = 2400) -> str:
        right = np.arange(asked) % 4 > 0
        with store.one_transaction():
            run_id = store.begin_run(RunRecord("evaluate", mark, model, 3, 8)).run_id
            store.finish_arm(begin_arm(store, run_id, "baseline", "baseline"), _table(right))
        parts = store.query("SELECT part FROM all_question_split WHERE run_id = ? ORDER BY question", [run_id])
        wrong = right & (parts["part"].to_numpy() == "confirmation")
        wrong &= np.cumsum(wrong) <= 5  # few enough for one arm, too many for four
        with store.one_transaction():
            arm_id = begin_arm(store, run_id, "mask", "mask", criterion="entropy", share=0.1)
            store.finish_arm(arm_id, _table(right & ~wrong), ablated_share=0.1)
        record_confirmation(store, run_id)
        return run_id

    first = swept("zero")
    alone = _choices(store, first)["mask"]
    assert alone.comparisons == 1 and alone.verdict.is_safe
    assert "intervals widened" not in alone.sentence()
    other_model, overlapping = swept("zero of another", model="another"), swept("fewer", asked=600)
    later = [swept(mark) for mark in ("mean", "resample")]
    reopened = Store(store.path)
    for run_id in (first, later[-1]):
        choice = _choices(reopened, run_id)["mask"]
        assert choice.comparisons == 4 and not choice.verdict.is_safe
        assert choice.verdict.paired.low < alone.verdict.paired.low
        assert "judged on 1,200 others by intervals widened for the 4 arms that they have judged" in choice.sentence()
    rows = reopened.query("SELECT run_id, comparisons, safe FROM all_sweep_confirmed").to_pylist()
    assert {row["run_id"]: row["comparisons"] for row in rows} == {
        **dict.fromkeys((first, overlapping, *later), 4),
        other_model: 1,
    }
    assert {row["run_id"] for row in rows if row["safe"]} == {other_model}
    assert judged_on_same(reopened, first).runs == {first, overlapping, *later}


def test_sweeps_on_other_tasks_share_the_recall_questions(tmp_path: Path) -> None:
    """The task, the number and the seed decide a recall question, whatever the benchmark asks."""
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    recall = 800

    def swept(task: str, seed: int = 0, model: str = "tiny") -> str:
        config = {"recall": {"seed": seed}}
        run = RunRecord("evaluate", f"{task} {seed} {model}", model, 3, 8, config=config)
        answers = pa.table(
            {
                "task": [task] * 2000 + ["copying@64"] * recall,
                "question": [*range(2000), *range(recall)],
                "recall": [False] * 2000 + [True] * recall,
                "correct": np.ones(2000 + recall),
            }
        )
        with store.one_transaction():
            run_id = store.begin_run(run).run_id
            arms = (
                arm_record(run_id, "baseline", "baseline"),
                arm_record(run_id, "m", "mask", criterion="entropy", share=0.1),
            )
            for record in arms:
                store.begin_arm(record)
                store.finish_arm(record.arm_id, answers, ablated_share=record.share)
        record_confirmation(store, run_id)
        return run_id

    first = swept("a")
    alone = _choices(store, first)["mask"]
    other = [swept("b"), swept("c", seed=1), swept("d", model="another")]
    counts = {}
    for run_id in (first, *other):
        choice = _choices(store, run_id)["mask"]
        (copying,) = choice.verdict.recall
        counts[run_id] = (choice.comparisons, copying.comparisons)
    assert counts == {first: (1, 2), other[0]: (1, 2), other[1]: (1, 1), other[2]: (1, 1)}
    choice = _choices(store, first)["mask"]
    assert choice.verdict.accuracy == alone.verdict.accuracy
    wide, narrow = (each.verdict.recall[0].paired.retained for each in (choice, alone))
    assert wide is not None and narrow is not None and wide.low < narrow.low
    assert "judged on 1,000 others by intervals widened for the 1 arm that they have judged (2 in recall)" in (
        choice.sentence()
    )
    assert "widened" not in alone.sentence()


def test_a_half_with_too_few_questions_is_reported(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    questions = 2 * MIN_SAFE_TEXTS - 10
    run_id = write_sweep(store, scores=tuple(SCORES)[:1], shares=(0.05, 0.1), kinds=("mask",), questions=questions)
    choice = _choices(store, run_id)["mask"]
    assert not choice.selection_safe and not choice.verdict.is_safe
    assert choice.sentence().startswith(f"Closest of 2 masks, none of which is safe, selected on {questions // 2:,}")
    # Twice the number of an arm chosen in advance, because half of the questions judge.
    changed = (choice.verdict.paired.gained + choice.verdict.paired.lost) / choice.verdict.paired.questions
    needed = choice.verdict.questions_needed
    assert needed == pytest.approx(2 * (78_489 * changed + MIN_SAFE_TEXTS), abs=2)
    assert f"too few questions ({questions // 2}): an arm that loses nothing and changes" in choice.sentence()
    assert f"of the answers needs about {about(needed)} in a sweep, where half of them judge" in choice.sentence()


def test_a_run_without_selected_arms_or_accuracy_has_no_choice(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    run_id = store.begin_run(RunRecord("evaluate", "e0", "tiny", 3, 8)).run_id
    table = pa.Table.from_pylist([{"task": "text", "question": i, "correct": None} for i in range(5)])
    table = table.set_column(2, "correct", pa.nulls(5, pa.float64()))
    for record in (
        arm_record(run_id, "baseline", "baseline"),
        arm_record(run_id, "by hand", "mask"),
        arm_record(run_id, "ten", "mask", criterion="entropy", share=0.1),
    ):
        store.begin_arm(record)
        store.finish_arm(record.arm_id, table, ablated_share=0.1)
    for confirm in (True, False):
        assert judge_sweep(store, judge(store, run_id), confirm=confirm) == ()


def test_points_pass_where_verdicts_do(tmp_path: Path) -> None:
    """The SQL of the curves and the verdicts in words agree on every arm."""
    store = Store(tmp_path / "s.duckdb", lock_timeout=5.0)
    run_id = write_sweep(store, scores=tuple(SCORES)[:2], shares=SHARES, seeds=1, questions=3000)
    safe = {arm.name: arm.is_safe for arm in judge(store, run_id).arms}
    record_verdicts(store, run_id)
    points = store.query(
        "SELECT name, safe FROM all_sweep_points p JOIN arms a ON p.run_id = a.run_id AND p.kind = a.kind"
        " AND p.share = a.share AND p.criterion IS NOT DISTINCT FROM a.criterion"
    ).to_pylist()
    assert {row["name"]: row["safe"] for row in points} == safe
    assert {True, False} == set(safe.values())
