"""The threads that torch computes with on a CPU: what OpenMP's own environment variables ask for."""

from __future__ import annotations

import os

#: Turns that an idle thread of torch waits busily, a few microseconds, before it sleeps. OpenMP's own choice is
#: 300,000, which takes the cores from other processes: beside two of them a scan took 1.4 to 2 times as long as with
#: this. On an otherwise idle machine the two are equally fast.
_SPINS = 3000


def share_cores() -> None:
    """Let torch's idle threads sleep, unless the user chose how they wait.

    Works on the processes that are started from here too. OpenMP reads its variables once, so this comes before torch
    is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def max_threads() -> int | None:
    """The threads of one worker that the user allows with OMP_NUM_THREADS; None where it is unset or not a number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None
