"""Provenance of runs, and the process that writes one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headscan.errors import ResumeError
from headscan.report.write_report import write_report
from headscan.store import provenance
from headscan.store.provenance import has_ended, host_of, is_visible, provenance_changes, this_process
from headscan.store.records import RunRecord
from headscan.store.store import Store
from tests.numbers.conftest import Scan, scan_record

SOFTWARE: dict[str, Any] = {
    "packages": {"torch": "2.12.0", "numpy": "2.1.0"},
    "code_version": "0.1.0+aaaaaaaa",
    "device": "cpu",
    "code_files_hash": None,
}
#: One change each, and how it is named.
CHANGES = [
    ({"packages": {"torch": "2.13.0", "numpy": "2.1.0"}}, "torch 2.12.0 -> 2.13.0"),
    ({"packages": {"torch": "2.12.0"}}, "numpy 2.1.0 -> none"),
    ({"code_version": "0.1.0+bbbbbbbb"}, "headscan 0.1.0+aaaaaaaa -> 0.1.0+bbbbbbbb"),
    ({"device": "cuda (NVIDIA H200)"}, "device cpu -> cuda (NVIDIA H200)"),
    ({"code_files_hash": "c0de"}, "model code files none -> c0de"),
]


def record(**changes: Any) -> RunRecord:
    return scan_record(**(SOFTWARE | changes))


def rows(store: Store) -> list[dict[str, Any]]:
    return store.query("FROM runs ORDER BY run_id").to_pylist()


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_an_unfinished_run_resumes_with_other_software_only_on_request(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(record()).run_id
    assert store.begin_run(record()).changes == ()
    store.finish_run(run_id, status="failed")
    before = rows(store)
    with pytest.raises(ResumeError) as refused:
        store.begin_run(record(**change))
    assert f"cannot resume run {run_id}" in str(refused.value) and named in str(refused.value)
    assert "resume_anyway=True" in str(refused.value) and "\n" not in str(refused.value)
    assert rows(store) == before

    state = store.begin_run(record(**change), resume_anyway=True)
    assert (state.run_id, state.status, state.changes) == (run_id, "running", (named,))
    run = store.resolve_run(run_id)
    assert [{k: v for k, v in entry.items() if k != "since"} for entry in run["provenance"]] == [
        SOFTWARE,
        SOFTWARE | change,
    ]
    assert all(datetime.fromisoformat(entry["since"]).tzinfo for entry in run["provenance"])
    assert run["packages"] == SOFTWARE["packages"]
    # The last provenance counts: the first one is a change again.
    assert store.begin_run(record(**change)).changes == ()
    with pytest.raises(ResumeError):
        store.begin_run(record())


def test_a_finished_run_is_left_as_it_is_unless_more_is_added(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(record()).run_id
    store.finish_run(run_id)
    before, newer = rows(store), record(device="cuda (NVIDIA H200)")
    state = store.begin_run(newer)
    assert (state.status, state.changes) == ("finished", ("device cpu -> cuda (NVIDIA H200)",))
    with pytest.raises(ResumeError):
        store.begin_run(newer, extends=True)
    assert rows(store) == before
    assert store.begin_run(newer, extends=True, resume_anyway=True).status == "finished"
    assert [entry["device"] for entry in store.resolve_run(run_id)["provenance"]] == ["cpu", "cuda (NVIDIA H200)"]


def test_equal_provenances_have_no_changes() -> None:
    assert provenance_changes(SOFTWARE, dict(SOFTWARE)) == ()
    assert provenance_changes({}, {"packages": {}, "device": "cpu"}) == ()


def test_a_report_names_both_provenances(scan: Scan, tmp_path: Path) -> None:
    scan.store.finish_run(scan.run_id, status="failed")
    scan.store.begin_run(dataclasses.replace(scan_record(), packages={"torch": "2.13.0"}), resume_anyway=True)
    scan.store.finish_run(scan.run_id)
    report = write_report(scan.store, tmp_path / "r.html", scan_run=scan.run_id).read_text("utf-8")
    assert "torch none -&gt; 2.13.0" in report


def changed(mark: str, **fields: str) -> str:
    names = ("host", "boot", "namespace", "pid", "start")
    return " ".join({**dict(zip(names, mark.split(), strict=True)), **fields}.values())


def test_a_process_is_there_until_it_ends() -> None:
    assert not has_ended(this_process())
    code = "from headscan.store.provenance import this_process; print(this_process(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        mark = other.stdout.readline().strip()
        assert not has_ended(mark)
        other.kill()
        other.wait()
        assert has_ended(mark)


@pytest.mark.parametrize(
    ("change", "visible", "ended"),
    [
        ({"start": "1"}, True, True),  # the number was given to another process
        ({"boot": "an-earlier-one"}, True, True),
        ({"host": "elsewhere"}, False, False),
        ({"namespace": "another-container"}, False, False),
    ],
)
def test_processes_of_other_hosts_are_unknown(change: dict[str, str], visible: bool, ended: bool) -> None:
    mark = changed(this_process(), **change)
    assert (is_visible(mark), has_ended(mark)) == (visible, ended)
    assert host_of(mark) == change.get("host", host_of(this_process()))


def test_a_process_of_another_user_has_ended_only_if_its_number_is_seen_to_be_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = changed(this_process(), start="7")

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(provenance, "_start", lambda pid: "7")
    assert not has_ended(mark) and has_ended(changed(mark, start="1"))
    monkeypatch.setattr(provenance, "_start", lambda pid: "-")  # /proc mounted with hidepid
    assert not has_ended(mark)


@pytest.mark.parametrize("mark", ["", "host", "a b c d", f"{host_of(this_process())} - - x 1"])
def test_text_that_is_no_mark_is_unknown(mark: str) -> None:
    assert (is_visible(mark), has_ended(mark)) == (False, False)
    assert host_of(mark) in mark


def test_a_running_run_whose_process_ended_was_interrupted(scan: Scan) -> None:
    def status_with(writer: Callable[[str], str]) -> str:
        with scan.store.connect() as connection:
            connection.execute("UPDATE runs SET status = 'running', writer = ?", [writer(this_process())])
        return scan.store.runs()[0]["status"]

    assert status_with(lambda mark: mark) == "running"
    assert status_with(lambda mark: changed(mark, start="1")) == "interrupted"
    assert status_with(lambda mark: changed(mark, host="elsewhere")) == "running"
    with scan.store.connect() as connection:
        connection.execute("UPDATE runs SET status = 'finished', writer = ?", [changed(this_process(), start="1")])
    assert scan.store.runs()[0]["status"] == "finished"
