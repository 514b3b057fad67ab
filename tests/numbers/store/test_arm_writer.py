"""Arms are written completely or not at all; a finished arm does not change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.errors import StoreError
from headscan.store.records import ArmRecord, RunRecord
from headscan.store.store import Store
from tests.numbers.conftest import answer_table
from tests.stores import arm_record


def _rows(store: Store, table: str) -> int:
    return store.query(f"FROM {table}").num_rows


@pytest.fixture
def arm(tmp_path: Path) -> tuple[Store, ArmRecord, str]:
    """A store with an arm that was begun, and its id."""
    store = Store(tmp_path / "new.duckdb")
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", 1, 1)).run_id
    record = arm_record(run_id, "random-0", "random_rule", share=0.1, seed=0, config={"tasks": ["a"]})
    assert not store.begin_arm(record)
    return store, record, record.arm_id


TASKS = np.array(["a", "a", "b"])


def result_table(value: float) -> pa.Table:
    return pa.table(
        {
            "task": ["a", "both"],
            "is_group": [False, True],
            "metric": ["acc", "acc"],
            "filter": ["none", "none"],
            "value": [value, None],
            "standard_error": [0.1, None],
            "questions": [2, 3],
        }
    )


def test_answers_are_replaced_and_a_finished_arm_is_known(arm: tuple[Store, ArmRecord, str]) -> None:
    store, record, arm_id = arm
    assert not store.begin_arm(record)
    store.finish_arm(arm_id, answer_table(TASKS, np.array([0, 0, 0])), results=result_table(0.0), ablated_share=0.08)
    assert store.begin_arm(record)
    store.finish_arm(
        arm_id, answer_table(TASKS[:2], np.array([1, np.nan])), results=result_table(0.5), ablated_share=0.07
    )
    rows = store.query("SELECT question, correct, log_likelihoods FROM answers ORDER BY question").to_pylist()
    assert [(r["question"], r["correct"], r["log_likelihoods"]) for r in rows] == [
        (0, 1.0, [-1.0, -2.0]),
        (1, None, [-1.0, -2.0]),
    ]
    results = store.query("SELECT task, is_group, value FROM arm_results ORDER BY task").to_pylist()
    assert [tuple(row.values()) for row in results] == [("a", False, 0.5), ("both", True, None)]
    columns = "kind, share, seed, ablated_share, status"
    assert [tuple(row.values()) for row in store.query(f"SELECT {columns} FROM arms").to_pylist()] == [
        ("random_rule", 0.1, 0, 0.07, "finished")
    ]


def test_an_arm_is_written_completely_or_not_at_all(arm: tuple[Store, ArmRecord, str]) -> None:
    store, record, arm_id = arm
    answers = answer_table(TASKS, np.zeros(3))
    store.add_units(record.run_id, unit("first", arm_id, -1.0))
    with pytest.raises(StoreError, match="uplicate key"):
        store.finish_arm(arm_id, pa.concat_tables([answers, answers]))
    with pytest.raises(StoreError, match="Add or remove value"):
        store.finish_arm(arm_id, answers, results=result_table(0.5).drop_columns(["value"]))
    with pytest.raises(StoreError, match="no arm nobody"):
        store.finish_arm("nobody", answers)
    assert not store.begin_arm(record)
    assert (_rows(store, "answers"), _rows(store, "arm_results"), _rows(store, "units")) == (0, 0, 1)


def test_an_arm_is_found_by_its_id_and_takes_another_name(arm: tuple[Store, ArmRecord, str]) -> None:
    store, record, arm_id = arm
    store.finish_arm(arm_id, answer_table(TASKS, np.ones(3)), ablated_share=0.5)
    assert store.begin_arm(dataclasses.replace(record, name="drawn"))
    assert store.query("SELECT arm_id, name, share FROM arms").to_pylist() == [
        {"arm_id": arm_id, "name": "drawn", "share": 0.1}
    ]
    with pytest.raises(StoreError, match="another arm named drawn"):
        store.begin_arm(dataclasses.replace(record, arm_id="other", name="drawn"))
    assert not store.begin_arm(dataclasses.replace(record, arm_id="other", name="random-0"))
    with pytest.raises(StoreError, match="another arm named random-0"):
        store.begin_arm(record)


def test_an_arm_that_is_begun_again_gets_new_settings(arm: tuple[Store, ArmRecord, str]) -> None:
    """Such as the mark of a sweep on an arm that was evaluated before; the first values stay."""
    store, record, arm_id = arm
    store.finish_arm(arm_id, answer_table(TASKS, np.zeros(3)))
    for config in ({"folder": "a"}, {"folder": "b", "swept": True}, {}):
        assert store.begin_arm(dataclasses.replace(record, config=config))
    (config,) = store.query("SELECT config FROM arms WHERE arm_id = ?", [arm_id])["config"].to_pylist()
    assert json.loads(config) == {**record.config, "folder": "a", "swept": True}


def test_recall_is_false_by_default(arm: tuple[Store, ArmRecord, str]) -> None:
    store, _, arm_id = arm
    store.finish_arm(arm_id, answer_table(np.array(["a", "needle@64"]), np.ones(2)))
    assert store.query("SELECT recall FROM answers ORDER BY question")["recall"].to_pylist() == [False, True]
    store.finish_arm(arm_id, answer_table(TASKS, np.ones(3)).drop_columns(["recall"]))
    assert store.query("SELECT DISTINCT recall FROM answers").to_pylist() == [{"recall": False}]


def unit(name: str, arm_id: str, *numbers: float) -> pa.Table:
    return pa.table({"unit": [name], "what": ["answers"], "arm_id": [arm_id], "numbers": [[*numbers]]})


def test_units_are_kept_until_their_arm_is_finished(arm: tuple[Store, ArmRecord, str]) -> None:
    store, record, arm_id = arm
    other, run_id = "0123456789ab", record.run_id
    store.begin_arm(dataclasses.replace(record, arm_id=other, name="other"))
    store.add_units(run_id, unit("theirs", other, -1.0))
    store.add_units(run_id, unit("first", arm_id, -1.0))
    store.add_units(run_id, unit("second", arm_id, -2.0, 1.0))
    store.add_units(run_id, unit("first", arm_id, -3.0))
    assert not store.begin_arm(record)
    kept = store.query("SELECT unit, numbers FROM units WHERE arm_id = ? ORDER BY unit", [arm_id]).to_pylist()
    assert kept == [{"unit": "first", "numbers": [-3.0]}, {"unit": "second", "numbers": [-2.0, 1.0]}]
    store.finish_arm(arm_id, answer_table(TASKS, np.ones(3)))
    store.add_units(run_id, unit("late", arm_id, -1.0))  # of another process
    assert store.units(run_id)["unit"].to_pylist() == ["theirs"]
    with pytest.raises(StoreError, match="no run nobody"):
        store.add_units("nobody", unit("first", arm_id, -1.0))


def test_arms_begin_in_one_transaction(arm: tuple[Store, ArmRecord, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store, record, _ = arm
    opened: list[str] = []
    connect = Store.connect
    monkeypatch.setattr(Store, "connect", lambda self, **options: opened.append("") or connect(self, **options))
    with store.one_transaction():
        for name in ("one", "two"):
            store.begin_arm(dataclasses.replace(record, arm_id=name, name=name))
        assert not store.begin_arm(record)
    assert len(opened) == 1

    def begin_and_fail() -> None:
        with store.one_transaction():
            store.add_mask("kept by nobody", [(0, 1)])
            store.begin_arm(dataclasses.replace(record, arm_id="unknown", run_id="unknown"))

    with pytest.raises(StoreError, match="unknown"):
        begin_and_fail()
    assert store.query("select * from masks where name = 'kept by nobody'").num_rows == 0
    store.add_mask("kept by nobody", [(0, 1)])
    names = store.query("select name from arms order by all").to_pylist()
    assert {"one", "two", record.name} <= {row["name"] for row in names}
    assert store.query("select * from masks where name = 'kept by nobody'").num_rows == 1


def test_a_finished_run_that_gets_new_arms_is_running(arm: tuple[Store, ArmRecord, str]) -> None:
    store, record, arm_id = arm

    def state() -> tuple[str, bool]:
        run = store.resolve_run(record.run_id, "evaluate")
        return run["status"], run["finished_at"] is None

    store.finish_run(record.run_id)
    assert state() == ("finished", False)
    store.begin_arm(record)  # begun before, and not finished
    assert state() == ("running", True)
    store.finish_arm(arm_id, answer_table(TASKS, np.ones(3)))
    store.finish_run(record.run_id)
    store.begin_arm(record)
    assert state() == ("finished", False)
    store.begin_arm(dataclasses.replace(record, arm_id="new", name="new"))
    assert state() == ("running", True)
