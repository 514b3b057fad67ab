"""Rankings of heads by their gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headscan.analysis.errors import SelectionError
from headscan.analysis.store.store import Store


@dataclass(frozen=True)
class GatedHead:
    """A head and its gate, as in the table ``head_gates``."""

    layer: int
    head: int
    kv_head: int
    gate: float
    p_open: float
    closed: bool
    gate_up: float | None
    head_class: str | None

    def row(self) -> dict[str, Any]:
        """Return a row of a printed table; columns of the second fit only if there is one."""
        twice = {} if self.head_class is None else {"gate up": self.gate_up, "class": self.head_class}
        return {
            "layer": self.layer,
            "head": self.head,
            "kv_head": self.kv_head,
            "gate": self.gate,
            "p_open": self.p_open,
            "closed": self.closed,
            **twice,
        }


def gated_heads(store: Store, run_id: str, *, site: str = "self", descending: bool = False) -> list[GatedHead]:
    """Return all heads of a site, the most closed first; layer and head break ties.

    Args:
        descending: The most open first.

    Raises:
        SelectionError: The run has no gates at the site.
    """
    # p_open orders like the location of the gate; the gate itself is 0 or 1 for many heads.
    rows = store.query(
        "SELECT layer, head, kv_head, gate, p_open, closed, gate_up, class AS head_class FROM head_gates"
        f" WHERE run_id = ? AND site = ? ORDER BY p_open {'DESC' if descending else 'ASC'}, layer, head",
        [run_id, site],
    ).to_pylist()
    if not rows:
        raise SelectionError(f"run {run_id} has no gates at site {site}. Choose another run, or another site")
    return [GatedHead(**row) for row in rows]
