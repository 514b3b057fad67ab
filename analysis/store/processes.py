"""Which process works on a run, and whether it is still there: a run whose process is gone was interrupted.

A mark names a process well enough that no other one is taken for it: host, boot of that host, namespace of process
numbers (that of a container), number, and time of its start.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_UNKNOWN = "-"
_PROC = Path("/proc")
_PARTS = 5


def this_process() -> str:
    """The mark of the process that calls."""
    pid = os.getpid()
    return " ".join((socket.gethostname(), _boot(), _namespace(), str(pid), _start(pid)))


def host_of(mark: str) -> str:
    """The host of a mark."""
    return mark.partition(" ")[0]


def can_tell(mark: str) -> bool:
    """Whether the process of a mark would be seen from here."""
    parts = mark.split()
    if len(parts) != _PARTS or not parts[3].isdecimal():
        return False
    host, boot, namespace, *_ = parts
    return os.name == "posix" and host == socket.gethostname() and (boot != _boot() or namespace == _namespace())


def is_gone(mark: str) -> bool:
    """Whether the process of a mark has ended; False where that cannot be told from here."""
    if not can_tell(mark):
        return False
    _, boot, _, pid, start = mark.split()
    if boot != _boot():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is there, and somebody else's
    return start != _start(int(pid))


def _boot() -> str:
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return _UNKNOWN


def _namespace() -> str:
    with suppress(OSError):
        return str((_PROC / "self/ns/pid").readlink())
    return _UNKNOWN


def _start(pid: int) -> str:
    """When a process started, in clock ticks since the boot."""
    with suppress(OSError):
        # The name, in brackets, may hold blanks and brackets; the state is the first field after it.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return _UNKNOWN if fields[0] in "ZX" else fields[19]
    return _UNKNOWN
