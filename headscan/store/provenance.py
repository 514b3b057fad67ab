"""Model, software, hardware and writing process of a run.

A provenance is a mapping with ``packages`` (name to version), ``code_version``, ``device`` and ``code_files_hash``. A
missing key is unknown and equals every value; a value of None means "none".

A run whose process has ended was interrupted. A process mark is unique: host, boot id, PID namespace (of a container),
PID and start time.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headscan.store.records import SHARDED_KINDS, RunRecord
from headscan.text_tables import counted

#: What each single value is called in a message.
_LABELS = {"code_version": "headscan", "device": "device", "code_files_hash": "model code files"}


def same_model(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two rows of ``runs`` are of one model. The name decides if the weights have no hash."""
    keys = ["model_config_hash", "weights_hash", "model_revision"]
    if run["weights_hash"] is None:
        keys.append("model")
    return all(run[key] == other[key] for key in keys)


def provenance_since(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of ``runs.provenance`` that begins now."""
    return {"since": datetime.now(UTC).isoformat(timespec="seconds"), **provenance}


def provenance_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences of two provenances as ``name old -> new``."""
    before, now = old.get("packages") or {}, new.get("packages") or {}
    changes = [(name, before.get(name), now.get(name)) for name in sorted({*before, *now})]
    changes += [(label, old[key], new[key]) for key, label in _LABELS.items() if key in old and key in new]
    return tuple(f"{name} {was or 'none'} -> {value or 'none'}" for name, was, value in changes if was != value)


#: Columns of ``runs`` that identify a command's inputs, and their names in messages.
_INPUTS = {
    "corpus_hash": "corpus",
    "model_revision": "revision",
    "model_config_hash": "model configuration",
    "weights_hash": "weights",
    "tokenizer_hash": "tokenizer",
    "dtype": "dtype",
}
#: Runs whose ``corpus_hash`` is not of a corpus.
_TEXTS = {"recording": "prompts", "evaluate": "questions", "ablate": "questions"}
#: Options that decide no numbers: locations, and the panel, whose statistics are listed separately.
_PLACES = ("model.source", "model.revision", "model.trust_remote_code", "model.safetensors", "corpus.name", "panel")


def unfinished_runs(runs: Iterable[Mapping[str, Any]], record: RunRecord, run_id: str) -> Iterator[str]:
    """Yield a line for each unfinished run of the same model and corpus as the new run ``run_id``: the user may have
    meant to resume it with this command.
    """
    model = {column: getattr(record, column) for column in (*_INPUTS, "model")}
    for run in runs:
        if run["run_id"] == run_id or run["status"] == "finished" or run["corpus"] != record.corpus:
            continue
        if run["model"] != record.model and not same_model(model, run):
            continue
        shards = ""
        if record.kind in SHARDED_KINDS:
            total = run["total_shards"]
            shards = f", {run['finished_shards']} of {counted(total, 'shard') if total else '? shards'}"
        yield (
            f"{', '.join(_differences(run, record)) or 'settings'} changed since run {run['run_id']} ({run['status']}"
            f"{shards}). A new run begins; the old rows stay, and summary views leave out unfinished runs"
        )


def _differences(run: Mapping[str, Any], record: RunRecord) -> list[str]:
    """Return the names of inputs and options that differ. Values unknown to either run count as equal."""
    pairs = {column: (run[column], getattr(record, column)) for column in _INPUTS}
    names = _INPUTS | ({"corpus_hash": _TEXTS[record.kind]} if record.kind in _TEXTS else {})
    inputs = [names[column] for column, pair in pairs.items() if None not in pair and pair[0] != pair[1]]
    theirs, ours = _options(run["config"]), _options(record.config)
    options = [name.rpartition(".")[2] for name in ours if name in theirs and ours[name] != theirs[name]]
    return list(dict.fromkeys(inputs + options))


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide numbers, by dotted names. The values are as read from JSON."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(config)).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in _PLACES}


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
        # The process belongs to another user. Where `/proc` hides such processes, its start time is unknown.
        return _start(int(pid)) not in (start, _UNKNOWN)
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
