"""SIGTERM ends a command as Ctrl-C does: with its line and exit code, and everything that was stored is kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headscan.cli.main import main
from headscan.store.store import Store
from tests.warm_python import WarmProcess

ROWS = "select * exclude (run_id) from head_statistics order by sequence, layer, head"
#: A scan whose second shard waits until the process gets a signal, so that it comes in the middle of the work.
_WAITING = """
import sys, time
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool

run = InProcessPool.map

def run_and_wait(pool, task, items):
    for number, result in enumerate(run(pool, task, items)):
        yield result
        if number == 1:
            print("waiting", flush=True)
            while True:
                time.sleep(0.05)

InProcessPool.map = run_and_wait
sys.exit(main({command!r}))
"""


def test_a_scan_that_gets_sigterm_says_so_and_resumes_to_equal_rows(
    model_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    store, quiet = tmp_path / "ended.duckdb", tmp_path / "quiet.duckdb"
    command = ["scan", str(model_folder), "--corpus", str(corpus_folder), "--device", "cpu", "--max-tokens", "60"]
    command += ["--shard-size", "2", "--statistics", "entropy", "--store"]
    process = WarmProcess("-c", _WAITING.format(command=[*command, str(store)]))
    try:
        assert process.line("waiting") == "waiting", "the scan ended before the signal"
        for _ in range(2):  # `timeout` sends it twice
            os.kill(process.pid, signal.SIGTERM)
    finally:
        ended = process.result()
    assert ended.returncode == 130
    assert ended.stderr.endswith("interrupted: stored results are kept; run the same command again to resume\n")
    assert "Traceback" not in ended.stderr
    stored = Store(store).runs()[0]["finished_shards"]
    assert 0 < stored < 5
    assert main([*command, str(store)]) == main([*command, str(quiet)]) == 0
    assert Store(store).query(ROWS) == Store(quiet).query(ROWS)


_FORKED = """
import os, signal, sys, time
from headscan.cli import main as cli

def forks(verb):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"!")
        time.sleep(60)
        os._exit(1)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print("child ended by", os.WTERMSIG(status), flush=True)

cli._run = forks
code = cli.main(["status"])
print("handler is the default again:", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


def test_children_end_as_before_and_the_handler_goes_with_the_command() -> None:
    done = WarmProcess("-c", _FORKED).result()
    assert done.stdout.splitlines() == [
        f"child ended by {signal.SIGTERM.value}",
        "handler is the default again: True",
    ], done.stderr


def test_a_handler_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None: ...

    found: list[object] = []
    monkeypatch.setattr("headscan.cli.main._run", lambda verb: found.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, own)
    try:
        assert main(["status"]) == 0
        assert found == [own] == [signal.getsignal(signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGTERM, before)
