"""OpenMP settings for torch's CPU threads."""

from __future__ import annotations

import os

#: Spin count of an idle thread before it sleeps, a few microseconds. OpenMP's default of 300,000 takes the cores from
#: other processes: next to two of them a scan took 1.4 to 2 times as long. On an idle machine both are equally fast.
_SPINS = 3000


def share_cores() -> None:
    """Let torch's idle threads sleep, unless the user set a wait policy. Child processes inherit the setting. Call this
    before torch is imported, because OpenMP reads its variables once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def max_threads() -> int | None:
    """Return the thread limit of OMP_NUM_THREADS; None without a number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None
