from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.analysis.errors import VerdictError
from headscan.analysis.store.records import ArmRecord, RunRecord
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, Scope
from headscan.analysis.verdicts.paired import compare
from headscan.analysis.verdicts.retention import retained
from headscan.analysis.verdicts.verdict_rows import compared_by_arm, read_verdict_rows, record_verdicts
from tests.analysis.conftest import answer_table

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
    (found,) = compared_by_arm(read_verdict_rows(store, run_id).computed).values()
    assert _count(store) == 0
    record_verdicts(store, run_id)
    stored, computed = read_verdict_rows(store, run_id)
    assert compared_by_arm(stored) == {stored[0]["arm_id"]: found} and computed == []
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
        assert numbers == pytest.approx(pair), scope
        assert (share is not None) is (scope == Scope("copying", True))
        if share is not None:
            own_text = 1000 * np.unique(tasks, return_inverse=True)[1] + texts
            assert share == pytest.approx(astuple(retained(*answers, own_text, 0.0)))


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
        arm_id = store.begin_arm(ArmRecord(run_id, name, kind)).arm_id  # type: ignore[arg-type]
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
    found = compared_by_arm(read_verdict_rows(store, run_id).stored)
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


def test_comparisons_without_the_columns_of_later_rules_are_made_again(run: tuple[Store, str]) -> None:
    """As in a store that was upgraded: new columns are NULL there."""
    store, run_id = run
    record_verdicts(store, run_id)
    before = store.query("FROM arm_verdicts ORDER BY ALL")
    for column in ("failed", "retained", "informative"):
        old = before.set_column(before.column_names.index(column), column, pa.nulls(before.num_rows))
        store.add_verdicts(old)
        assert store.query("FROM arm_verdicts ORDER BY ALL") != before
        record_verdicts(store, run_id)
        assert store.query("FROM arm_verdicts ORDER BY ALL") == before


def test_only_missing_rows_are_computed(run: tuple[Store, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store, run_id = run
    record_verdicts(store, run_id)
    before = store.query("FROM arm_verdicts ORDER BY ALL")
    arm_id = store.begin_arm(ArmRecord(run_id, "twenty", "mask")).arm_id
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
        arm_id = store.begin_arm(ArmRecord(others, name, kind)).arm_id  # type: ignore[arg-type]
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
    baseline = store.begin_arm(ArmRecord(run_id, "baseline", "baseline")).arm_id
    store.finish_arm(baseline, answer_table(TASKS, BASELINE))
    record_verdicts(store, run_id)
    assert _count(store) == 0
