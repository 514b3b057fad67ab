"""Multiple choice judged by the probability of the right choice, limits of points, and chances at the estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.steps.results import arm_row
from headscan.store.records import ArmKind, ArmRecord, RunRecord
from headscan.store.store import Store
from headscan.text_tables import plain
from headscan.verdicts.answer_sheets import BENCHMARK, EXPECTED, finished_arms, read_answers
from headscan.verdicts.arm_verdict import ArmVerdict, Outcome
from headscan.verdicts.judge import arm_verdict, judge
from headscan.verdicts.paired import QuestionClusters, paired_difference
from headscan.verdicts.verdict_rows import record_verdicts
from headscan.verdicts.verdict_table import verdict_text
from tests.numbers.conftest import answer_table, compare
from tests.stores import begin_arm


def scored(task: str, scores: np.ndarray, targets: np.ndarray, correct: np.ndarray | None = None) -> pa.Table:
    """Answers among choices, by their scores (questions, choices); graded by the highest, or ``correct``."""
    right = scores.argmax(1) == targets if correct is None else correct
    table = answer_table(np.repeat(task, len(scores)), right)
    for name, values in {
        "log_likelihoods": pa.array(scores.tolist()),
        "target": pa.array([str(target) for target in targets]),
        "response": pa.array([str(choice) for choice in scores.argmax(1)]),
        "doc_hash": pa.array([f"{task} {number}" for number in range(len(scores))]),
    }.items():
        table = table.set_column(table.column_names.index(name), name, values)
    return table


def write(path: Path, **arms: pa.Table) -> tuple[Store, str]:
    store = Store(path / "s.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    for name, answers in arms.items():
        kind = "baseline" if name == "baseline" else "mask"
        store.finish_arm(begin_arm(store, run_id, name, kind, share=0.1), answers, ablated_share=0.1)
    record_verdicts(store, run_id)
    return store, run_id


def scores_of(rng: np.random.Generator, questions: int, targets: np.ndarray) -> np.ndarray:
    scores = rng.normal(0, 2, (questions, 4))
    scores[np.arange(questions), targets] += 3
    return scores


def test_the_probability_is_the_softmax_of_the_scores_that_decide(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 4, 50)
    base, arm = scores_of(rng, 50, targets), scores_of(rng, 50, targets)
    arm[0, targets[0]], arm[1] = -np.inf, -np.inf
    others = rng.integers(0, 2, 50).astype(float)  # graded by something else than these scores
    store, run_id = write(
        tmp_path,
        baseline=pa.concat_tables([scored("choices", base, targets), scored("lengths", base, targets, others)]),
        arm=pa.concat_tables([scored("choices", arm, targets), scored("lengths", arm, targets, 1 - others)]),
    )
    arms = finished_arms(store, run_id)
    sheets = read_answers(store, arms.baseline, arms.others)
    assert set(sheets.scopes) >= {BENCHMARK, EXPECTED} and (sheets.scopes[EXPECTED] == sheets.scopes[BENCHMARK]).all()
    for record, scores, counted in ((arms.baseline, base, others), (arms.others[0], arm, 1 - others)):
        with np.errstate(invalid="ignore"):
            each = np.exp(scores - scores.max(1, keepdims=True))
            expected = np.nan_to_num(each / each.sum(1, keepdims=True))[np.arange(50), targets]
        assert sheets.expected[record.arm_id] == pytest.approx(np.concatenate([expected, counted]))
    (verdict,) = judge(store, run_id).arms
    assert verdict.expected is not None and verdict.judging is verdict.expected
    differences = sheets.expected[arms.others[0].arm_id] - sheets.expected[arms.baseline.arm_id]
    assert verdict.expected.difference == pytest.approx(100 * differences.mean())
    rows = store.query("SELECT task FROM arm_verdicts ORDER BY task").to_pylist()
    assert [row["task"] for row in rows] == ["(all)", "(expected)", "choices", "lengths"]


def test_answers_that_are_counted_have_no_expected_accuracy(tmp_path: Path) -> None:
    answers = answer_table(np.repeat("written", 40), np.tile([1, 1, 1, 0], 10))
    store, run_id = write(tmp_path, baseline=answers, arm=answers)
    (verdict,) = judge(store, run_id).arms
    assert verdict.expected is None and verdict.judging is verdict.paired
    assert "expected" not in verdict_text([verdict])


def test_a_harmless_arm_is_shown_to_be_safe_by_probabilities_and_not_by_its_count(tmp_path: Path) -> None:
    """750 questions whose scores change a little: 3 % of the answers change, and the count shows nothing."""
    rng, questions = np.random.default_rng(0), 750
    targets = rng.integers(0, 4, questions)
    base = scores_of(rng, questions, targets)
    arm = base + rng.normal(0, 0.2, base.shape)
    store, run_id = write(tmp_path, baseline=scored("t", base, targets), arm=scored("t", arm, targets))
    (verdict,) = judge(store, run_id).arms
    assert verdict.expected is not None and verdict.paired.low < -1 < verdict.expected.low
    assert verdict.is_safe and replace(verdict, expected=None).outcome is Outcome.NOT_SHOWN
    table = verdict_text([verdict])
    assert verdict.expected.interval.words(1) in table and verdict.paired.interval.words(1) in table
    assert "Expected accuracy, by the probability of the right choice:" in verdict.sentence()
    row = json.loads(json.dumps(plain(arm_row(verdict))))
    assert row["expected"]["low"] == pytest.approx(verdict.expected.low) and "lows" not in row["expected"]
    (point,) = store.query("SELECT safe, low FROM all_sweep_points WHERE share > 0").to_pylist()
    assert point["safe"] is True and 100 * point["low"] == pytest.approx(verdict.paired.low)


def judged(expected: np.ndarray, counted: np.ndarray, **options: float) -> ArmVerdict:
    """Judge an arm by changes of probabilities and of answers, on questions of which seven in ten are right."""
    base = np.full(len(expected), 0.7)
    right = np.tile([1.0, 1, 1, 1, 1, 1, 1, 0, 0, 0], len(counted) // 10)
    differences = {EXPECTED: compare(base, base + expected), BENCHMARK: compare(right, (right + counted).clip(0, 1))}
    return arm_verdict(ArmRecord(name="arm", kind=ArmKind.MASK, ablated_share=0.1), differences, **options)  # type: ignore[arg-type]


def test_a_count_that_shows_a_loss_is_not_safe() -> None:
    harmless, lost = np.zeros(2000), -1.0 * (np.arange(2000) % 10 == 0) * (np.arange(2000) < 800)
    assert judged(harmless, np.zeros(2000)).is_safe
    by_count = judged(harmless, lost)
    assert by_count.outcome is Outcome.LOSES and by_count.why == "accuracy (-4.0 points, +0.0 expected)"
    assert judged(np.full(2000, -0.04), np.zeros(2000)).outcome is Outcome.LOSES


@pytest.mark.parametrize(("points", "label"), [(1.0, "not shown"), (2.0, "safe, recall unknown"), (0.5, "not shown")])
def test_the_limit_of_points_is_the_users(points: float, label: str) -> None:
    lost = -1.0 * (np.arange(2000) % 150 == 0)
    arm = judged(lost, lost, max_points=points)
    assert arm.label == label
    words = "one point" if points == 1 else f"{points:g} points"
    assert (f"safe within {words}" in arm.sentence()) is arm.is_safe
    limit = verdict_text([arm]).splitlines()[-1]
    assert limit.startswith(f"safe: it is shown that no more than {points:g} point{'s' * (points != 1)} of accuracy")


def test_the_needed_questions_are_named_with_their_chance_at_the_estimate() -> None:
    def gap(difference: float) -> ArmVerdict:
        paired = replace(compare(np.ones(400), np.ones(400)), difference=difference, low=-3.0, high=0.5)
        return ArmVerdict(arm=ArmRecord(name="arm", kind=ArmKind.MASK), accuracy=replace(paired, standard_error=0.8))

    kept, half, lost = gap(0.2), gap(-0.5), gap(-1.07)
    assert kept.why.startswith("needs about 2,4") and "estimate" not in kept.why
    assert (kept.label, half.label, lost.label) == ("too few questions", "too few questions", "probably loses")
    assert half.chance_of_safety == pytest.approx(0.29, abs=0.01) and lost.chance_of_safety < 0.02
    assert "questions (if it loses nothing; at the estimate, -0.50 points, 29 % pass)" in half.why
    assert lost.outcome is Outcome.NOT_SHOWN and "-1.07 points, 2 % pass" in lost.why


@pytest.mark.slow
@pytest.mark.parametrize("difference", [0.0, -0.5])
def test_the_stated_chance_is_that_of_simulated_studies(difference: float) -> None:
    rng, changed, passed, runs = np.random.default_rng(0), 0.04, 0, 200
    few = replace(
        compare(np.ones(400), np.ones(400)), difference=difference, standard_error=100 * (changed / 400) ** 0.5
    )
    needed, down = few.questions_needed(), changed / 2 - difference / 200
    for _ in range(runs):
        delta = rng.choice([-1, 0, 1], needed, p=[down, 1 - changed, changed - down])
        passed += compare(delta < 0, delta > 0).low > -1
    assert passed / runs == pytest.approx(few.chance_of_safety(), abs=0.12)


@pytest.mark.parametrize(
    ("documents", "label"),
    [
        (4, "safe on these 4 documents, recall unknown"),
        (1, "safe on this document, recall unknown"),
        (40, "safe, recall unknown"),
    ],
)
def test_a_verdict_on_few_documents_names_them(tmp_path: Path, documents: int, label: str) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 4, 800)
    answers = scored("t", scores_of(rng, 800, targets), targets)
    names = pa.array([f"module {number % documents}" for number in range(800)])
    answers = answers.append_column("document", names)
    store, run_id = write(tmp_path, baseline=answers, arm=answers)
    (verdict,) = judge(store, run_id).arms
    assert (verdict.paired.documents, verdict.label) == (documents, label)
    assert f"safe within one point{verdict.of_documents}; recall" in verdict.sentence()
    assert label in verdict_text([verdict])


def test_documents_that_differ_widen_the_interval_if_there_are_enough() -> None:
    """Of 40 documents, ten lose one of ten answers and ten gain one; of ten documents the questions count alone."""
    questions = np.arange(2000)
    for documents, factor in ((40, 1.5), (10, 1.0)):
        owner = questions % documents
        delta = np.where(
            questions // documents % 10 == 0,
            np.where(owner < documents // 4, -1, np.where(owner < documents // 2, 1, 0)),
            0,
        )
        alone = QuestionClusters(2000)
        known = QuestionClusters(2000, documents=owner)
        one, other = (paired_difference(delta < 0, delta > 0, clusters) for clusters in (alone, known))
        assert other.documents == documents and one.documents is None
        assert other.low - other.difference <= factor * (one.low - one.difference)
        assert (other.low == one.low) is (documents == 10)
        assert (
            other.questions_needed() > one.questions_needed()
            if documents == 40
            else other.questions_needed() == one.questions_needed()
        )
