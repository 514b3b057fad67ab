"""A mark of a process shows whether that process still runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from headscan.analysis.store.processes import has_ended, host_of, is_visible, this_process
from tests.analysis.conftest import Scan


def changed(mark: str, **fields: str) -> str:
    names = ("host", "boot", "namespace", "pid", "start")
    return " ".join({**dict(zip(names, mark.split(), strict=True)), **fields}.values())


def test_a_process_is_there_until_it_ends() -> None:
    assert not has_ended(this_process())
    code = "from headscan.analysis.store.processes import this_process; print(this_process(), flush=True); input()"
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
