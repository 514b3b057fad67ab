"""Stored verdicts, verdicts on single tasks, and the parts of the questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.errors import VerdictError
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.verdicts.answer_sheets import BENCHMARK, Scope
from headscan.verdicts.paired import PairedDifference, retained_share
from headscan.verdicts.scope_verdicts import least_visible_loss, task_verdicts
from headscan.verdicts.verdict_rows import differences_by_arm, read_verdict_rows, record_verdicts
from tests.numbers.conftest import answer_table, compare
from tests.stores import begin_arm, copy_store

Evaluate = Callable[..., tuple[Store, str]]

RNG = np.random.default_rng(0)
TASKS = RNG.permutation(["a"] * 40 + ["b"] * 60 + ["copying@64"] * 20 + ["copying@128"] * 10 + ["list"] * 5)
RECALL = np.char.find(TASKS.astype(str), "@") >= 0
BASELINE = np.where(RECALL, RNG.random(len(TASKS)), RNG.integers(0, 2, len(TASKS)))
BASELINE[TASKS == "list"] = np.nan
ARM = np.where(RNG.random(len(TASKS)) < 0.3, 0.0, BASELINE)
ARM[TASKS == "list"] = np.nan


@pytest.fixture
def run(evaluate: Evaluate) -> tuple[Store, str]:
    return evaluate(TASKS, {"baseline": ("baseline", BASELINE, 0.0, {}), "ten": ("mask", ARM, 0.1, {})})


def _count(store: Store) -> int:
    return store.query("FROM arm_verdicts").num_rows


def test_every_scope_is_compared_within_its_tasks(run: tuple[Store, str]) -> None:
    """Against ``compare`` on questions picked by hand; the round trip through shares costs at most rounding."""
    store, run_id = run
    (found,) = differences_by_arm(read_verdict_rows(store, run_id).computed).values()
    assert _count(store) == 0
    record_verdicts(store, run_id)
    stored, computed = read_verdict_rows(store, run_id)
    assert differences_by_arm(stored) == {stored[0]["arm_id"]: found} and computed == []
    expected = {
        BENCHMARK: (TASKS == "a") | (TASKS == "b"),
        Scope("a", False): TASKS == "a",
        Scope("b", False): TASKS == "b",
        Scope("copying", True): RECALL,
        Scope("copying@64", True): TASKS == "copying@64",
        Scope("copying@128", True): TASKS == "copying@128",
    }
    assert set(found) == set(expected)
    for scope, members in expected.items():
        order = np.argsort(TASKS[members], kind="stable")
        places = np.arange(len(TASKS))[members][order]
        texts = places // 4 if scope.recall else places
        answers, tasks = (BASELINE[members][order], ARM[members][order]), TASKS[members][order]
        *pair, _, _ = astuple(compare(*answers, tasks, texts))
        *numbers, share, chance = astuple(found[scope])
        assert chance == (None if scope.recall else 50)
        flat, own = (np.hstack([*map(np.ravel, each)]) for each in (numbers, pair))
        assert flat == pytest.approx(own), scope
        assert (share is not None) is (scope == Scope("copying", True))
        if share is not None:
            own_text = 1000 * np.unique(tasks, return_inverse=True)[1] + texts
            assert share == pytest.approx(retained_share(*answers, own_text, 0.0))


def _choices(task: str, count: int, choices: int) -> pa.Table:
    """Return answers of which four in five are right."""
    found = answer_table(np.repeat(task, count), np.tile([1, 1, 1, 1, 0], count)[:count])
    values = pa.array([[-float(n) for n in range(choices)]] * count, pa.list_(pa.float64()))
    return found.set_column(found.column_names.index("log_likelihoods"), "log_likelihoods", values)


def test_chance_is_that_of_the_choices_and_unknown_without(tmp_path: Path) -> None:
    """Generated answers have no choices, a single likelihood has no rival, and partial credit is no choice."""
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    partial = _choices("partial", 30, 4)
    half = pa.array([0.5] + [1.0] * 29)
    partial = partial.set_column(partial.column_names.index("correct"), "correct", half)
    answers = [
        _choices("four", 60, 4),
        _choices("two", 20, 2),
        _choices("written", 30, 0),
        _choices("last word", 30, 1),
    ]
    for name, kind in (("baseline", "baseline"), ("ten", "mask")):
        arm_id = begin_arm(store, run_id, name, kind)
        store.finish_arm(arm_id, pa.concat_tables([*answers, partial]))
    record_verdicts(store, run_id)
    rows = store.query("SELECT task, chance, informative FROM arm_verdicts ORDER BY task").to_pylist()
    assert {row["task"]: row["chance"] for row in rows} == {
        "(all)": pytest.approx((60 / 4 + 20 / 2) / 170),  # unknown chance counts as 0
        "four": 0.25,
        "two": 0.5,
        "written": None,
        "last word": None,
        "partial": None,
    }
    assert all(row["informative"] for row in rows)
    found = differences_by_arm(read_verdict_rows(store, run_id).stored)
    (scopes,) = found.values()
    assert scopes[Scope("four", False)].chance == 25


def test_the_table_holds_shares(run: tuple[Store, str]) -> None:
    store, run_id = run
    record_verdicts(store, run_id)
    row = store.query("SELECT baseline, accuracy, difference FROM arm_verdicts WHERE task = '(all)'").to_pylist()[0]
    members = (TASKS == "a") | (TASKS == "b")
    assert row["baseline"] == pytest.approx(BASELINE[members].mean())
    assert row["accuracy"] == pytest.approx(ARM[members].mean())
    assert row["difference"] == pytest.approx(row["accuracy"] - row["baseline"])


def test_families_of_recall_tasks_are_judged_and_nothing_else(evaluate: Evaluate) -> None:
    """Needles that the model does not find are not informative; copies that an arm no longer makes are lost."""
    tasks = np.repeat(["a", "needle@64", "copying@64"], 400)
    answers = {
        name: np.repeat([1.0, needle, copies], 400)
        for name, needle, copies in (("baseline", 0.0, 0.9), ("keeps", 0.0, 0.9), ("loses", 0.0, 0.1))
    }
    kinds = {"baseline": "baseline"}
    store, run_id = evaluate(tasks, {name: (kinds.get(name, "mask"), row, 0.1, {}) for name, row in answers.items()})
    record_verdicts(store, run_id)
    rows = store.query(
        "SELECT name, task, informative, failed, kept FROM arm_verdicts JOIN arms USING (arm_id) ORDER BY name, task"
    ).to_pylist()
    for name, lost in (("keeps", False), ("loses", True)):
        assert [tuple(row.values())[1:] for row in rows if row["name"] == name] == [
            ("(all)", True, False, None),
            ("a", True, False, None),
            ("copying", True, lost, not lost),
            ("copying@64", None, None, None),
            ("needle", False, False, False),
            ("needle@64", None, None, None),
        ]


def test_only_missing_rows_are_computed(run: tuple[Store, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store, run_id = run
    record_verdicts(store, run_id)
    before = store.query("FROM arm_verdicts ORDER BY ALL")
    arm_id = begin_arm(store, run_id, "twenty", "mask")
    store.finish_arm(arm_id, answer_table(TASKS, BASELINE))
    written: list[str] = []
    add = store.add_verdicts
    monkeypatch.setattr(store, "add_verdicts", lambda rows: (written.extend(rows["arm_id"].to_pylist()), add(rows)))
    record_verdicts(store, run_id)
    assert set(written) == {arm_id}
    assert store.query("FROM arm_verdicts WHERE arm_id <> ? ORDER BY ALL", [arm_id]) == before
    written.clear()
    record_verdicts(store, run_id)
    assert written == [] and _count(store) == 12


def test_new_answers_take_old_verdicts_away(run: tuple[Store, str]) -> None:
    store, run_id = run
    others = store.begin_run(RunRecord("evaluate", "other", "tiny", 1, 1)).run_id
    for name, kind in (("baseline", "baseline"), ("ten", "mask")):
        arm_id = begin_arm(store, others, name, kind)
        store.finish_arm(arm_id, answer_table(np.array(["a"]), np.ones(1)))
    record_verdicts(store, others)
    ids = {row["name"]: row["arm_id"] for row in store.query("FROM arms WHERE run_id = ?", [run_id]).to_pylist()}
    for changed in ("ten", "baseline"):
        record_verdicts(store, run_id)
        assert _count(store) == 6 + 2
        store.finish_arm(ids[changed], answer_table(TASKS, BASELINE))
        assert _count(store) == 2, changed  # the other run's
    record_verdicts(store, run_id)
    assert store.query("SELECT DISTINCT difference FROM arm_verdicts").to_pylist() == [{"difference": 0.0}]


def test_the_baseline_has_to_be_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    with pytest.raises(VerdictError, match=f"run {run_id} has 0 finished baselines"):
        record_verdicts(store, run_id)
    baseline = begin_arm(store, run_id, "baseline", "baseline")
    store.finish_arm(baseline, answer_table(TASKS, BASELINE))
    record_verdicts(store, run_id)
    assert _count(store) == 0


#: As in MMLU: 57 subjects of 100 questions and more.
SIZES = np.linspace(100, 390, 57).astype(int)


def _subjects(rng: np.random.Generator, loss: float) -> dict[Scope, PairedDifference]:
    """Every seventh answer changes, and ``loss`` is lost of all, in each subject."""
    scopes = {}
    for number, questions in enumerate(SIZES):
        drawn = rng.choice([-1, 0, 1], questions, p=[0.07 + loss / 2, 0.86, 0.07 - loss / 2])
        scopes[Scope(f"subject {number}", False)] = compare(drawn < 0, drawn > 0)
    return scopes


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_of_57_subjects_none_fails_by_chance(loss: float) -> None:
    """With plain 95 % intervals every second arm that loses nothing would fail, and most that lose one point."""
    rng = np.random.default_rng(0)
    plain = widened = 0
    for _ in range(40):
        verdicts = task_verdicts(_subjects(rng, loss))
        plain += any(verdict.paired.high < -1 for verdict in verdicts)
        widened += any(verdict.failed for verdict in verdicts)
    assert plain >= 6
    assert widened <= 2


def test_the_clearest_loss_comes_first_and_one_task_keeps_its_interval() -> None:
    found = {
        Scope("large", False): compare(np.ones(1000), np.repeat([1, 0], [930, 70])),
        Scope("small", False): compare(np.ones(20), np.repeat([1, 0], [18, 2])),
        Scope("needle", True): compare(np.ones(1000), np.zeros(1000)),
    }
    large, small = task_verdicts(found)
    assert (large.task, small.task) == ("large", "small")
    assert large.failed and not small.failed
    assert large.wide.low < large.paired.low and large.wide.high > large.paired.high
    (alone,) = task_verdicts({Scope("large", False): large.paired})
    assert (alone.wide.low, alone.wide.high) == pytest.approx((large.paired.low, large.paired.high))


def test_the_widened_interval_is_bonferronis() -> None:
    """Of a difference with a normal error: 1.96 standard errors become 3.33 for 57 tasks."""
    delta = np.random.default_rng(0).choice([-1, 0, 1], 10_000, p=[0.3, 0.45, 0.25])
    paired = compare(delta < 0, delta > 0)
    low, value, high = paired.simultaneous_interval(57)
    error = paired.standard_error
    assert ((value - low) / error, (high - value) / error) == pytest.approx((3.327, 3.327), abs=0.08)


@pytest.mark.parametrize(("questions", "tasks"), [(100, 57), (40, 2), (1000, 57)])
def test_the_least_visible_loss_is_seen_in_four_of_five_cases(questions: int, tasks: int) -> None:
    """Of 100 questions in one of 57 tasks, a loss of 12 points is named in two of five cases."""
    rng = np.random.default_rng(0)

    def seen(loss: float) -> float:
        found = 0
        for _ in range(200):
            lost = rng.random(questions) < loss / 100
            paired = compare(np.ones(questions), ~lost)
            found += paired.simultaneous_interval(tasks).high < -1
        return found / 200

    visible = least_visible_loss(compare(np.ones(questions), np.ones(questions)), tasks)
    assert 0.7 <= seen(visible) <= 0.93
    if questions == 100:
        assert visible == pytest.approx(17, abs=1.5) and seen(12) < 0.5


def _asked(task: str, documents: list[str | None], recall: bool = False) -> list[dict[str, object]]:
    return [
        {"task": task, "question": number, "recall": recall, "doc_hash": document}
        for number, document in enumerate(documents)
    ]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Store:
    """A store for runs of several tests."""
    return Store(copy_store(empty_store, tmp_path_factory.mktemp("several") / "s.duckdb"))


def _parts(several: Store, questions: list[dict[str, object]], correct: float = 1.0) -> dict[tuple[str, int], str]:
    """The part of each question of a run, by task and number."""
    run_id = several.begin_run(RunRecord("evaluate", f"run {len(several.runs())}", "tiny", 3, 8)).run_id
    arm_id = begin_arm(several, run_id, "baseline", "baseline")
    rows = pa.Table.from_pylist([question | {"correct": correct} for question in questions])
    several.finish_arm(arm_id, rows, ablated_share=0.0)
    found = several.query("SELECT task, question, part FROM all_question_split WHERE run_id = ?", [run_id])
    assert found.num_rows == len(questions)
    return {(row["task"], row["question"]): row["part"] for row in found.to_pylist()}


QUESTIONS = [
    *_asked("letters", [f"doc {i}" for i in range(101)]),
    *_asked("sums", [f"sum {i}" for i in range(40)]),
    *_asked("unhashed", [None] * 30),
    *_asked("one", ["alone"]),
    *_asked("needle@512", [None] * 36, recall=True),
    *_asked("copying@512", [None] * 36, recall=True),
]


def test_half_of_every_task_selects_and_a_quarter_of_the_recall_texts(several: Store) -> None:
    parts = _parts(several, QUESTIONS)
    counts = Counter((task, part) for (task, _), part in parts.items())
    assert counts["letters", "confirmation"] == 51 and counts["letters", "selection"] == 50
    assert counts["sums", "confirmation"] == counts["sums", "selection"] == 20
    assert counts["unhashed", "confirmation"] == counts["unhashed", "selection"] == 15
    assert counts["one", "confirmation"] == 1
    # Nine texts of four questions each: what is asked about one text stays together.
    for task in ("needle@512", "copying@512"):
        assert (counts[task, "confirmation"], counts[task, "selection"]) == (28, 8)
        assert all(len({parts[task, 4 * text + i] for i in range(4)}) == 1 for text in range(9))
    first = [parts["letters", number] for number in range(50)]
    assert 15 < first.count("selection") < 35  # not by the order of the questions


def test_the_parts_depend_on_the_documents_alone(several: Store) -> None:
    """Not on the order of the questions, their numbers, the answers, or the other tasks of a run."""
    parts = _parts(several, QUESTIONS)
    assert _parts(several, QUESTIONS[::-1], correct=0.0) == parts
    backwards = _parts(several, _asked("letters", [f"doc {i}" for i in reversed(range(101))]))
    assert {("letters", 100 - number): part for (_, number), part in backwards.items()} == {
        key: part for key, part in parts.items() if key[0] == "letters"
    }


def test_a_document_in_two_tasks_is_in_one_part(several: Store) -> None:
    """Such as the letter and the cloze form of one question: the one would select by the other's answer."""
    documents: list[str | None] = [f"doc {i}" for i in range(60)]
    cloze = [*_asked("b letters", documents), *_asked("a cloze", [*documents[10:], "new 1", "new 2", documents[20]])]
    parts = _parts(several, cloze)
    for number in range(10, 60):
        assert parts["b letters", number] == parts["a cloze", number - 10]
    assert parts["a cloze", 52] == parts["a cloze", 10]
    counts = Counter((task, part) for (task, _), part in parts.items())
    assert abs(counts["b letters", "selection"] - 30) <= 2 and abs(counts["a cloze", "selection"] - 26) <= 2
