"""Rankings of heads by their importance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headscan.analysis.errors import SelectionError
from headscan.analysis.store.store import Store
from headscan.catalog import IMPORTANCES
from headscan.errors import unknown_name


@dataclass(frozen=True)
class ImportantHead:
    """One head of a ranking.

    Attributes:
        value: The score; NaN if it is undefined, as in a layer without any importance.
        mean_gate_gradient: Mean over the sequences of the derivative of the loss by the head's gate, in nats.
    """

    layer: int
    head: int
    kv_head: int
    value: float
    mean_gate_gradient: float


def rank_importance(
    store: Store, run_id: str, name: str = "importance", *, site: str = "self", descending: bool = False
) -> list[ImportantHead]:
    """Return all heads of a site, least important first; layer and head break ties.

    Args:
        run_id: An importance run.
        name: Name in `headscan.catalog.IMPORTANCES`.
        descending: Most important first.

    Raises:
        UnknownNameError: There is no such score.
        SelectionError: The run has no heads at the site.
    """
    if name not in IMPORTANCES:
        raise unknown_name("importance", name, IMPORTANCES)
    rows = store.query(
        f"SELECT layer, head, kv_head, {name} AS value, mean_gate_gradient FROM all_importance_summary"
        f" WHERE run_id = ? AND site = ? ORDER BY value {'DESC' if descending else 'ASC'} NULLS LAST, layer, head",
        [run_id, site],
    ).to_pylist()
    if not rows:
        raise SelectionError(f"run {run_id} has no importance at site {site}. Choose another run, or another site")
    return [
        ImportantHead(
            row["layer"],
            row["head"],
            row["kv_head"],
            *(math.nan if row[name] is None else row[name] for name in ("value", "mean_gate_gradient")),
        )
        for row in rows
    ]
