"""The verb rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headscan.catalog import ORDERS
from headscan.cli.verb_base import StoreVerb, say_run
from headscan.options import Option, Site
from headscan.steps.results import Json, Result
from headscan.text_tables import counted, percent

if TYPE_CHECKING:
    from headscan.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Rank(StoreVerb):
    """order the heads by a score, a statistic, a behaviour, an importance, a gate or an effect

        headscan rank --by output_norm_ln --limit 10
        headscan rank --by induction_score
        headscan rank --by importance
        headscan rank --by gate
        headscan rank --by effect

    Scores (most inactive first) and statistics come from a scan, behaviours (strongest first) from a probe, importances
    (least important first) from `headscan importance`, gates (most closed first) from `headscan gates`, effects (least
    harm by ablation first) from `headscan ablate`.
    """

    json: Json = False
    by: Annotated[
        str,
        Option(
            f"score, statistic, behaviour, importance, gate or effect: {', '.join(ORDERS)}",
            metavar="NAME",
            kind="score",
            names=ORDERS,
        ),
    ] = "output_norm_ln"
    run_id: Annotated[
        str | None, Option("first characters of the id of the run (default: the newest finished one)", flag="--run")
    ] = None
    site: Site = "self"
    limit: Annotated[int, Option("number of heads; 0 shows all", least=0)] = 20
    highest: Annotated[bool, Option("highest values first, for any score", one_of="order")] = False
    lowest: Annotated[bool, Option("lowest values first, for any score", one_of="order")] = False

    def run(self) -> Result:
        store = self.store.open()
        with store.reading():
            return self._ranked(store)

    def _ranked(self, store: Store) -> Result:
        from headscan.runs.head_orders import finished_runs, head_order, run_kind
        from headscan.text_tables import table_cells, text_table

        kind = run_kind(self.by)
        newest = [] if self.run_id else finished_runs(store, self.by)[:1]
        run = store.resolve_run(self.run_id or next((str(each["run_id"]) for each in newest), None), kind)
        say_run(run)
        descending = True if self.highest else False if self.lowest else None
        heads = head_order(store, str(run["run_id"]), self.by, site=self.site, descending=descending)
        rows = [{"rank": place, **asdict(head)} for place, head in enumerate(heads, 1)][: self.limit or None]
        columns = {"rank": "rank", "layer": "layer", "head": "head", **_columns(kind, self.by)}
        columns = {title: value for title, value in columns.items() if title not in _empty(rows)}
        facts = {"run_id": run["run_id"], "by": self.by, "site": self.site, "heads": len(heads)}
        notes = []
        if kind == "scan" and "inactive in" in columns:
            count = store.query("SELECT count(*) AS n FROM sequences WHERE run_id = ?", [run["run_id"]])["n"][0]
            facts["sequences"] = count.as_py()
            notes.append(f"inactive in: share of {counted(facts['sequences'], 'sequence')}")
        if self.by == "distant_mass":
            from headscan.ranking.head_ranking import covering_window

            notes += filter(None, [covering_window(store, run)])
        if kind == "importance":
            from headscan.ranking.head_ranking import halves_agreement

            agreement = halves_agreement(store, str(run["run_id"]), self.by, site=self.site)
            facts["halves"] = None if agreement is None else asdict(agreement)
            notes += [] if agreement is None else [agreement.line()]
        return Result(rows, lambda: text_table(table_cells(rows, columns)), facts, notes)


def _columns(kind: str, by: str) -> dict[str, str | Callable[[Mapping[str, Any]], Any]]:
    """Return the columns of a table after layer and head, as for `table_cells`, by the kind of the run."""
    if kind == "gates":
        columns = {name: name for name in ("kv_head", "gate", "p_open", "closed")}
        return {**columns, "gate up": "gate_up", "class": "head_class"}
    if kind == "ablate":
        columns = {name: name for name in ("kv_head", "effect", "low", "high")}
        return {**columns, "q": "q_value", "metric": "metric", "replaced by": "replacement"}
    if kind == "importance":
        return {"kv_head": "kv_head", by: "value", "mean gate gradient": "mean_gate_gradient"}
    if kind == "probe":
        return {by: "value"}
    inactive = {"inactive in": lambda row: percent(row["inactive_share"])}
    return {"kv_head": "kv_head", by: "value", "std": "std", **inactive}


def _empty(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the titles of optional columns without a value."""
    optional = {"gate_up": "gate up", "head_class": "class", "inactive_share": "inactive in"}
    return {title for name, title in optional.items() if not rows or rows[0].get(name) is None}
