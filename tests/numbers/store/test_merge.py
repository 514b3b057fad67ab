"""Merged stores hold evaluations, masks and results of runs; what two stores share must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.errors import MergeError
from headscan.store.merge_stores import merge_stores
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.store.tables import ALL_BUT_ONE, EACH, TABLES
from headscan.verdicts.head_effects import record_effects
from headscan.verdicts.judge import judge
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.conftest import HEADS, LAYERS, Scan, answer_table, make_stats, write_scan
from tests.numbers.sweep_fixtures import write_sweep
from tests.stores import arm_record, begin_arm, copy_store

TASKS = np.array(["sums"] * 40 + ["needle@512"] * 40)
EVALUATION = RunRecord("evaluate", "e", "tiny", LAYERS, HEADS, config={"requests": 80})
ARMS = ("baseline", "mask", "rule")


@pytest.fixture
def new(tmp_path: Path, empty_store: Path) -> dict[str, Store]:
    """Three stores: one and two have no rows, all does not exist."""
    paths = {name: tmp_path / f"{name}.duckdb" for name in ("one", "two", "all")}
    for name in ("one", "two"):
        copy_store(empty_store, paths[name])
    return {name: Store(path) for name, path in paths.items()}


def answers_of(name: str) -> pa.Table:
    rng = np.random.default_rng(ARMS.index(name))
    return answer_table(TASKS, (rng.random(len(TASKS)) < 0.8).astype(float))


def write_arms(store: Store, names: Sequence[str], *, open_arms: Sequence[str] = (), judged: bool = True) -> str:
    """Write an evaluation with finished arms, and arms with a few answers: a unit of each store, and a common one."""
    with store.one_transaction():
        run_id = store.begin_run(EVALUATION).run_id
        for name in names:
            store.finish_arm(begin_arm(store, run_id, name, name), answers_of(name), ablated_share=0.1)
        for name in open_arms:
            arm_id = begin_arm(store, run_id, name, name)
            units = [{"unit": unit, "what": "answers", "numbers": [-1.0]} for unit in (store.path.stem, "both")]
            store.add_units(run_id, pa.Table.from_pylist([each | {"arm_id": arm_id} for each in units]))
        if not open_arms:
            store.finish_run(run_id)
    if judged:
        record_verdicts(store, run_id)
    return run_id


def content(store: Store, table: str) -> list[dict[str, object]]:
    """Return the rows of a table without times."""
    columns = [
        c.name for c in TABLES[table].columns if c.type != "TIMESTAMPTZ" and c.name not in ("writer", "provenance")
    ]
    return store.query(f"SELECT {', '.join(columns)} FROM {table} ORDER BY ALL").to_pylist()


def test_a_merged_store_equals_its_only_source(scan: Scan, new: dict[str, Store]) -> None:
    """A scan, its mask, a probe and a judged sweep: every table comes along."""
    store = scan.store
    store.add_mask("few", [(0, 1), (2, 3)], run_id=scan.run_id, criterion="entropy", share=0.1)
    write_sweep(store, scores=("entropy", "output_norm_ln"), shares=(0.1, 0.3), questions=200)
    run_id = write_arms(store, ARMS)
    store.replace_split_verdicts(run_id, _split_rows(store, run_id))
    with store.one_transaction():
        probe = store.begin_run(RunRecord("probe", "p", "tiny", LAYERS, HEADS)).run_id
        store.add_behaviours(probe, _behaviours(0.5))
        store.finish_run(probe)
    merged = merge_stores([store], new["all"])
    assert {run.status for run in merged} == {"finished"}
    with store.reading(), new["all"].reading():
        for table in TABLES:
            assert content(new["all"], table) == content(store, table), table
        filled = {table for table in TABLES if content(store, table)}
    assert filled >= {"masks", "mask_heads", "arm_verdicts", "split_verdicts", "head_behaviours", "answers"}
    assert judge(new["all"], run_id) == judge(store, run_id)


def _split_rows(store: Store, run_id: str) -> pa.Table:
    rows = store.query(
        "SELECT v.*, 'selection' AS part, true AS safe, NULL::INTEGER AS comparisons, NULL::DOUBLE AS wide_low,"
        " NULL::BOOLEAN AS selected FROM arm_verdicts v JOIN arms USING (arm_id) WHERE run_id = ?",
        [run_id],
    )
    assert rows.num_rows
    return rows


def _behaviours(value: float) -> pa.Table:
    names = {"site": ["self"], "layer": [0], "head": [1], "behaviour": ["induction_score"], "value": [value]}
    return pa.table(names)


def test_arms_of_one_evaluation_come_together(new: dict[str, Store]) -> None:
    run_id = write_arms(new["one"], ("baseline", "mask"))
    write_arms(new["two"], ("baseline", "rule"))
    first, second = merge_stores([new["one"]], new["all"]), merge_stores([new["two"]], new["all"])
    assert (first[0].added_arms, second[0].added_arms, second[0].status) == (2, 1, "finished")
    whole = Store(new["all"].path.with_name("whole.duckdb"))
    write_arms(whole, ARMS)
    with new["all"].reading(), whole.reading():
        for table in ("arms", "answers", "arm_verdicts"):
            assert content(new["all"], table) == content(whole, table), table
        assert judge(new["all"], run_id) == judge(whole, run_id)


def test_a_finished_arm_replaces_an_unfinished_one(new: dict[str, Store]) -> None:
    write_arms(new["one"], ("baseline",), open_arms=("mask",), judged=False)
    write_arms(new["two"], ("baseline", "mask"))
    for order in (("one", "two"), ("two", "one")):
        into = Store(new["all"].path.with_name(f"{order[0]}-first.duckdb"))
        [merged] = merge_stores([new[name] for name in order], into)
        assert (merged.status, merged.added_arms) == ("finished", 2)
        with into.reading():
            assert content(into, "units") == []
            assert content(into, "answers") == content(new["two"], "answers")


def test_an_evaluation_with_an_open_arm_is_running(new: dict[str, Store]) -> None:
    write_arms(new["one"], ("baseline",))
    write_arms(new["two"], ("baseline",), open_arms=("mask",), judged=False)
    for order in (("one", "two"), ("two", "one")):
        into = Store(new["all"].path.with_name(f"{order[0]}-first.duckdb"))
        [merged] = merge_stores([new[name] for name in order], into)
        [run] = into.runs()
        assert merged.status == "running"
        assert run["finished_at"] is None and run["status"] in ("running", "interrupted")


def test_units_of_an_unfinished_arm_come_together(new: dict[str, Store]) -> None:
    for name in ("one", "two"):
        write_arms(new[name], ("baseline",), open_arms=("mask",), judged=False)
    [merged] = merge_stores([new["one"], new["two"]], new["all"])
    assert merged.status == "running"
    assert new["all"].runs()[0]["status"] == "running"  # of this process; it is interrupted when that has ended
    assert [row["unit"] for row in content(new["all"], "units")] == ["both", "one", "two"]


def test_other_answers_are_a_contradiction(new: dict[str, Store]) -> None:
    run_id = write_arms(new["one"], ARMS)
    write_arms(new["two"], ARMS)
    with new["two"].connect() as connection:
        connection.execute("UPDATE answers SET correct = 1 - correct WHERE question = 3 AND task = 'sums'")
    with pytest.raises(MergeError, match=rf"run {run_id}: arm baseline has other answers in .*two.* and in .*all"):
        merge_stores([new["one"], new["two"]], new["all"])


def test_arms_and_masks_of_one_name_must_be_equal(new: dict[str, Store]) -> None:
    for name, share in (("one", 0.1), ("two", 0.2)):
        run_id = new[name].begin_run(EVALUATION).run_id
        begin_arm(new[name], run_id, "mask", "mask", share=share)
    with pytest.raises(MergeError, match="arm mask has other settings"):
        merge_stores([new["one"], new["two"]], new["all"])
    new["one"].add_mask("few", [(0, 1)])
    new["two"].add_mask("few", [(0, 2)])
    into = Store(new["all"].path.with_name("masks.duckdb"))
    with pytest.raises(MergeError, match=r"mask few of .*two.* has other heads"):
        merge_stores([new["one"], new["two"]], into)


def test_results_of_a_run_must_be_equal(new: dict[str, Store]) -> None:
    for name, value in (("one", 0.5), ("two", 0.75)):
        with new[name].one_transaction():
            run_id = new[name].begin_run(RunRecord("probe", "p", "tiny", LAYERS, HEADS)).run_id
            new[name].add_behaviours(run_id, _behaviours(value))
            new[name].finish_run(run_id)
    with pytest.raises(MergeError, match=f"run {run_id}: other rows of head_behaviours"):
        merge_stores([new["one"], new["two"]], new["all"])


def test_an_interrupted_scan_continues_in_the_merged_store(scan: Scan, new: dict[str, Store]) -> None:
    """Two unfinished stores of one scan that together have all shards need one to have read the corpus to its end."""
    with scan.store.connect() as connection:
        connection.execute("DELETE FROM head_statistics WHERE sequence < 15")
        connection.execute("DELETE FROM sequences WHERE shard = 0")
        connection.execute("DELETE FROM shards WHERE shard = 0")
        connection.execute("UPDATE runs SET status = 'running', total_shards = NULL, report = NULL")
    [merged] = merge_stores([scan.store], new["all"])
    assert (merged.status, merged.shards, merged.total_shards) == ("part", 1, None)
    whole = write_scan(new["all"].path.with_name("whole.duckdb"), scan.stats)
    [merged] = merge_stores([whole.store], new["all"])
    assert (merged.status, merged.added_shards, merged.total_shards) == ("finished", 1, 2)
    for table in ("sequences", "head_statistics"):
        assert content(new["all"], table) == content(whole.store, table)
    assert new["all"].runs()[0]["report"] == {"empty": 1}


def test_other_runs_stay(scan: Scan, new: dict[str, Store]) -> None:
    other = write_scan(new["all"].path, make_stats(1), "other")
    merge_stores([scan.store], new["all"])
    assert {run["run_id"] for run in new["all"].runs()} == {scan.run_id, other.run_id}
    summary = "FROM head_summary WHERE run_id = ? ORDER BY layer, head"
    assert new["all"].query(summary, [scan.run_id]).equals(scan.store.query(summary, [scan.run_id]))


def test_every_table_has_an_owner() -> None:
    """The first column of a table says what its rows belong to; otherwise merge would leave the table out."""
    owners = {table.columns[0].name for name, table in TABLES.items() if name != "meta"}
    assert owners == {"run_id", "arm_id", "mask_id"}


def _units(store: Store, numbers: dict[str, list[float]], *, finished: bool) -> str:
    rows = [{"unit": unit, "what": "damage", "numbers": values} for unit, values in numbers.items()]
    with store.one_transaction():
        run_id = store.begin_run(RunRecord("prune", "p", "tiny", LAYERS, HEADS)).run_id
        store.add_units(run_id, pa.Table.from_pylist(rows))
        if finished:
            store.finish_run(run_id)
    return run_id


def _numbers(store: Store, run_id: str) -> dict[str, list[float]]:
    return {row["unit"]: row["numbers"] for row in store.units(run_id).to_pylist()}


def test_measured_units_of_two_stores_come_together(new: dict[str, Store]) -> None:
    _units(new["one"], {"a": [1.0, 2.0], "b": [0.1]}, finished=False)
    run_id = _units(new["two"], {"b": [0.1], "c": []}, finished=True)
    (merged,) = merge_stores([new["one"], new["two"]], new["all"])
    assert (merged.kind, merged.status) == ("prune", "finished")
    assert _numbers(new["all"], run_id) == {"a": [1.0, 2.0], "b": [0.1], "c": []}
    merge_stores([new["one"], new["two"]], new["all"])
    assert new["all"].query("FROM units").num_rows == 3


def test_other_numbers_of_a_measured_unit_are_a_contradiction(new: dict[str, Store]) -> None:
    _units(new["one"], {"a": [1.0, float("nan")], "b": [0.1]}, finished=True)
    run_id = _units(new["two"], {"a": [1.0, float("nan")], "b": [0.2], "c": []}, finished=True)
    with pytest.raises(MergeError, match=rf"run {run_id}: unit b \(damage\) has other numbers in .*two.* and in .*all"):
        merge_stores([new["one"], new["two"]], new["all"])
    assert _numbers(new["all"], run_id).keys() == {"a", "b"}


def _ablate(store: Store, *modes: str, open_heads: Sequence[int] = (), effects: bool = True) -> str:
    """Write a table of two heads of one layer, as `run_ablate` does; arms of ``open_heads`` are unfinished."""
    with store.one_transaction():
        run_id = store.begin_run(RunRecord("ablate", "a", "tiny", LAYERS, HEADS)).run_id
        arms = [arm_record(run_id, "baseline", "baseline")]
        for mode in modes:
            for head in (0, 1):
                config = {"mode": mode, "site": "self", "layer": 0, "head": head, "kv_head": 0}
                arms.append(arm_record(run_id, f"{mode} {head}", "mask", replacement="zero", config=config))
        for number, arm in enumerate(arms):
            finished = store.begin_arm(arm)
            right = (np.arange(len(TASKS)) % (number + 2) > 0).astype(float)
            if not finished and arm.config.get("head") not in open_heads:
                store.finish_arm(arm.arm_id, answer_table(TASKS, right), ablated_share=0.1)
        if not open_heads:
            store.finish_run(run_id)
    if effects and not open_heads:
        record_effects(store, run_id)
    return run_id


def test_effects_of_both_stores_come_together(new: dict[str, Store]) -> None:
    _ablate(new["one"], EACH)
    _ablate(new["two"], EACH, ALL_BUT_ONE)
    for order in (("one", "two"), ("two", "one")):
        into = Store(new["all"].path.with_name(f"{order[0]}-first.duckdb"))
        merged = [merge_stores([new[name]], into)[0] for name in order]
        assert [run.status for run in merged] == ["finished", "finished"]
        with into.reading(), new["two"].reading():
            for table in ("arms", "answers", "head_effects"):
                assert content(into, table) == content(new["two"], table), table


def test_a_run_without_the_effects_of_its_arms_is_running(new: dict[str, Store]) -> None:
    """Two stores have half of the arms of all but one each, and neither has the effects."""
    _ablate(new["one"], EACH)
    _ablate(new["one"], EACH, ALL_BUT_ONE, open_heads=[0])
    run_id = _ablate(new["two"], EACH, ALL_BUT_ONE, open_heads=[1])
    third = Store(new["all"].path.with_name("third.duckdb"))
    _ablate(third, EACH)
    [merged] = merge_stores([new["one"], new["two"], third], new["all"])
    assert merged.status == "running"
    assert {row["mode"] for row in content(new["all"], "head_effects")} == {EACH}
    _ablate(new["all"], EACH, ALL_BUT_ONE)
    [merged] = merge_stores([third], new["all"])
    assert merged.status == "finished"
    assert run_id == merged.run_id and {row["mode"] for row in content(new["all"], "head_effects")} == {
        EACH,
        ALL_BUT_ONE,
    }


def test_a_restarted_run_has_no_units_and_its_new_software(new: dict[str, Store]) -> None:
    store = new["one"]
    run_id = _units(store, {"a": [1.0]}, finished=True)
    store.restart_run(RunRecord("prune", "p", "tiny", LAYERS, HEADS, packages={"torch": "9"}))
    (run,) = store.runs("prune")
    assert (run["status"], _numbers(store, run_id)) == ("running", {})
    assert [each["packages"] for each in run["provenance"]] == [{"torch": "9"}]
    store.add_units(run_id, pa.table({"unit": ["a"], "what": ["damage"], "numbers": [[2.0]]}))
    assert _numbers(store, run_id) == {"a": [2.0]}
