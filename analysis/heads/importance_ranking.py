"""Rankings of heads by their importance, and by their gates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scipy.stats import kendalltau, spearmanr

from headscan.analysis.errors import SelectionError
from headscan.analysis.schema.views import importance_sql
from headscan.analysis.store.store import Store
from headscan.catalog import IMPORTANCES
from headscan.errors import unknown_name


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
        SelectionError: The run has no heads at the site, or an older version measured it without this importance.
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
    if all(row["value"] is None for row in rows):
        raise SelectionError(
            f"run {run_id} has no {name}: an older version measured it. Measure again, or rank by sequence_importance"
        )
    return [
        ImportantHead(
            row["layer"],
            row["head"],
            row["kv_head"],
            *(math.nan if row[key] is None else row[key] for key in ("value", "mean_gate_gradient")),
        )
        for row in rows
    ]


#: Least share of the sequences in the smaller half.
_LEAST_HALF = 0.25


@dataclass(frozen=True)
class HalvesAgreement:
    """Agreement of two halves of a run's sequences on the order of the heads.

    Attributes:
        sequences: Sequences of each half.
        spearman: Rank correlation of the two orders, -1 to 1.
        kendall: Kendall's tau-b of the two orders, -1 to 1.
    """

    sequences: tuple[int, int]
    spearman: float
    kendall: float

    def line(self) -> str:
        """Return the agreement as text."""
        first, second = self.sequences
        return (
            f"orders of the heads by {first} and by {second} other sequences agree with Spearman {self.spearman:.2f},"
            f" Kendall {self.kendall:.2f}"
        )


def halves_agreement(
    store: Store, run_id: str, name: str = "importance", *, site: str = "self"
) -> HalvesAgreement | None:
    """Return the agreement of two halves of the sequences on the order of a site's heads.

    The halves are every other document, so that they share no text; if one would hold less than a quarter of the
    sequences, they are every other sequence.

    Args:
        run_id: An importance run.
        name: Name in `headscan.catalog.IMPORTANCES`.

    Returns:
        None for fewer than two sequences, fewer than three heads, or all heads equal.

    Raises:
        UnknownNameError: There is no such score.
    """
    if name not in IMPORTANCES:
        raise unknown_name("importance", name, IMPORTANCES)
    for half in ("dense_rank() OVER (ORDER BY document)", "row_number() OVER (ORDER BY sequence)"):
        divided = f"(SELECT *, {half} % 2 AS half FROM sequences WHERE run_id = ?)"
        (counts,) = store.query(
            f"SELECT count(*) FILTER (half = 1) AS first, count(*) FILTER (half = 0) AS second FROM {divided}", [run_id]
        ).to_pylist()
        sizes = counts["first"], counts["second"]
        if min(sizes) >= _LEAST_HALF * sum(sizes):
            break
    values = store.query(
        f"SELECT max({name}) FILTER (half = 1) AS first, max({name}) FILTER (half = 0) AS second"
        f" FROM ({importance_sql(divided, 'half')}) WHERE site = ? GROUP BY layer, head"
        " HAVING first IS NOT NULL AND second IS NOT NULL",
        [run_id, site],
    ).to_pydict()
    if min(sizes) < 1 or len(values["first"]) < 3:
        return None
    if any(len(set(of_half)) == 1 for of_half in values.values()):
        return None
    both = values["first"], values["second"]
    return HalvesAgreement(sizes, float(spearmanr(*both).statistic), float(kendalltau(*both).statistic))
