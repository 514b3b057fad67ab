"""Model, software, hardware and writing process of a run.

A provenance is a mapping with ``packages`` (name to version), ``code_version``, ``device`` and ``code_files_hash``. A
missing key is unknown and equals every value; a value of None means "none".

A run whose process has ended was interrupted. A process mark is unique: host, boot id, PID namespace (of a container),
PID and start time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: What each single value is called in a message.
_LABELS = {"code_version": "headscan", "device": "device", "code_files_hash": "model code files"}


def same_model(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two rows of ``runs`` are of one model. The name decides if the weights have no hash."""
    keys = ["model_config_hash", "weights_hash", "model_revision"]
    if run["weights_hash"] is None:
        keys.append("model")
    return all(run[key] == other[key] for key in keys)


def provenance_since(provenance: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
    """Return an entry of ``runs.provenance`` with its start: its own, else ``seconds`` since the epoch, else now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return {"since": moment.isoformat(timespec="seconds"), **provenance}


def provenance_history(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every provenance of a row of ``runs``, oldest first; before schema 6 it has only packages and version."""
    known = {key: run[key] for key in ("packages", "code_version")}
    return list(run.get("provenance") or [known])


def provenance_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences of two provenances as ``name old -> new``."""
    before, now = old.get("packages") or {}, new.get("packages") or {}
    changes = [(name, before.get(name), now.get(name)) for name in sorted({*before, *now})]
    changes += [(label, old[key], new[key]) for key, label in _LABELS.items() if key in old and key in new]
    return tuple(f"{name} {was or 'none'} -> {value or 'none'}" for name, was, value in changes if was != value)


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
    """Return True if this process can see that a mark's process has ended."""
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
