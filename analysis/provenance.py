"""Model, software and hardware of a run, and their changes.

A provenance is a mapping with ``packages`` (name to version), ``code_version``, ``device`` and ``code_files_hash``. A
missing key is unknown and equals every value; a value of None means "none".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

#: What each single value is called in a message.
_LABELS = {"code_version": "headscan", "device": "device", "code_files_hash": "model code files"}


def same_model(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two rows of ``runs`` are of one model.

    The name decides if the weights have no hash.
    """
    keys = ["model_config_hash", "weights_hash", "model_revision"]
    if run["weights_hash"] is None:
        keys.append("model")
    return all(run[key] == other[key] for key in keys)


def provenance_since(provenance: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
    """Return an entry of ``runs.provenance`` with its start time.

    Args:
        seconds: That time since the epoch, unless the entry names one; None: now.
    """
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return {"since": moment.isoformat(timespec="seconds"), **provenance}


def provenance_history(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every provenance of a run, oldest first.

    Args:
        run: Its row of ``runs``, JSON decoded. A run from before schema 6 has ``packages`` and ``code_version`` only.
    """
    known = {key: run[key] for key in ("packages", "code_version")}
    return list(run.get("provenance") or [known])


def provenance_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences of two provenances as ``name old -> new``."""
    before, now = old.get("packages") or {}, new.get("packages") or {}
    found = [(name, before.get(name), now.get(name)) for name in sorted({*before, *now})]
    found += [(label, old[key], new[key]) for key, label in _LABELS.items() if key in old and key in new]
    return tuple(f"{name} {was or 'none'} -> {value or 'none'}" for name, was, value in found if was != value)
