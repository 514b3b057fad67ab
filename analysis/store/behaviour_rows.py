"""Behaviours of heads from probes, ranked."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.analysis.errors import SelectionError
from headscan.analysis.store.store import Store
from headscan.catalog import BEHAVIOURS


@dataclass(frozen=True)
class BehavingHead:
    """A head and its strength of a behaviour, 0 to 1."""

    layer: int
    head: int
    value: float


def measured_behaviours(store: Store, run_id: str) -> tuple[str, ...]:
    """Return the behaviours that a run probed, in catalogue order."""
    found = store.query("SELECT DISTINCT behaviour FROM head_behaviours WHERE run_id = ?", [run_id])
    names = set(found["behaviour"].to_pylist())
    return tuple(name for name in BEHAVIOURS if name in names)


def behaving_heads(store: Store, run_id: str, behaviour: str, *, site: str = "self") -> list[BehavingHead]:
    """Return all heads of a site, strongest behaviour first.

    Layer and head break ties.

    Raises:
        SelectionError: The run did not probe the behaviour.
    """
    rows = store.query(
        "SELECT layer, head, value FROM head_behaviours WHERE run_id = ? AND behaviour = ? AND site = ?"
        " ORDER BY value DESC, layer, head",
        [run_id, behaviour, site],
    ).to_pylist()
    if not rows:
        raise SelectionError(
            f"run {run_id} has no {behaviour} at site {site}. Choose another probe run, or probe"
            f" {behaviour} with `headscan probe`"
        )
    return [BehavingHead(row["layer"], row["head"], row["value"]) for row in rows]
