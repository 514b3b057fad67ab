"""Scans that are killed at a known place: a process waits there for its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from headscan.store.store import Store
from tests.warm_python import WarmProcess

# However fast the machine, the scan cannot end before it is killed: after `shards` shards its writer waits for ever.
_WAITING_SCAN = """
import sys, threading
from headscan.store.store import Store
from headscan.cli.main import main

write = Store.add_shards

def write_and_wait(store, run_id, waiting):
    write(store, run_id, waiting)
    if store.runs()[0]["finished_shards"] >= {shards}:
        print("waiting", flush=True)
        threading.Event().wait()

Store.add_shards = write_and_wait
sys.exit(main({command!r}))
"""


def kill_after(shards: int, command: list[str], before_the_kill: Callable[[], None] = lambda: None) -> None:
    """Start a scan and SIGKILL it when so many shards are stored.

    Args:
        shards: Number of stored shards, or a few more: a writer stores all shards that wait.
        command: Arguments of the command line.
        before_the_kill: Called while the scan waits.
    """
    code = _WAITING_SCAN.format(shards=shards, command=command)
    process = WarmProcess("-c", code)
    try:
        assert process.line("waiting") == "waiting", "the scan ended before it could be killed"
        before_the_kill()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.result()


def stored_shards(store: Path) -> int:
    return int(Store(store).runs()[0]["finished_shards"])
