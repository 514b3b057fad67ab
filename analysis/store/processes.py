"""Identity of the process that writes a run.

A run whose process has ended was interrupted. A process mark is unique: host, boot id, PID namespace (of a container),
PID and start time.
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
    """Return the mark of the current process."""
    pid = os.getpid()
    return " ".join((socket.gethostname(), _boot(), _namespace(), str(pid), _start(pid)))


def host_of(mark: str) -> str:
    """Return the host of a mark."""
    return mark.partition(" ")[0]


def is_visible(mark: str) -> bool:
    """Return True if this process can see the process of a mark."""
    parts = mark.split()
    if len(parts) != _PARTS or not parts[3].isdecimal():
        return False
    host, boot, namespace, *_ = parts
    return os.name == "posix" and host == socket.gethostname() and (boot != _boot() or namespace == _namespace())


def has_ended(mark: str) -> bool:
    """Return True if a mark's process has ended.

    It is False if this process cannot see it.
    """
    if not is_visible(mark):
        return False
    _, boot, _, pid, start = mark.split()
    if boot != _boot():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it runs and belongs to another user
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
    """Return the start time of a process in clock ticks since boot."""
    with suppress(OSError):
        # The command name is in parentheses and may contain spaces and parentheses; the state follows it.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return _UNKNOWN if fields[0] in "ZX" else fields[19]
    return _UNKNOWN
