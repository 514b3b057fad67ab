"""The verb rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headscan.catalog import BEHAVIOURS, EFFECT, IMPORTANCES, SCORES, STATISTICS
from headscan.options import Option
from headscan.pipelines.cli.results import Json, Result
from headscan.pipelines.cli.verb_base import StoreVerb, say_run
from headscan.pipelines.settings.measure_settings import Site

#: Ranks by the gates of a fit.
GATE = "gate"

if TYPE_CHECKING:
    from headscan.analysis.store.records import RunKind
    from headscan.analysis.store.store import Store


_NAMES = tuple(dict.fromkeys([*SCORES, *STATISTICS, *BEHAVIOURS, *IMPORTANCES, GATE, EFFECT]))


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
            f"score, statistic, behaviour, importance, gate or effect: {', '.join(_NAMES)}",
            metavar="NAME",
            kind="score",
            names=_NAMES,
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
        from headscan.pipelines.runs.text_tables import table_cells, text_table

        ranking = _ranking(self.by)
        store = self.store.open()
        run = store.resolve_run(self.run_id or _newest_effects(store, self.by), ranking.kind)
        say_run(run)
        heads = ranking.heads(store, str(run["run_id"]), self)
        rows = [{"rank": place, **asdict(head)} for place, head in enumerate(heads, 1)][: self.limit or None]
        columns = {"rank": "rank", "layer": "layer", "head": "head", **ranking.columns}
        columns = {title: value for title, value in columns.items() if title not in _empty(rows)}
        facts = {"run_id": run["run_id"], "by": self.by, "site": self.site, "heads": len(heads)}
        notes = []
        if self.by in IMPORTANCES:
            from headscan.analysis.heads.head_ranking import halves_agreement

            agreement = halves_agreement(store, str(run["run_id"]), self.by, site=self.site)
            facts["halves"] = None if agreement is None else asdict(agreement)
            notes += [] if agreement is None else [agreement.line()]
        return Result(rows, lambda: text_table(table_cells(rows, columns)), facts, notes)


def _newest_effects(store: Store, by: str) -> str | None:
    """Return the newest finished run with effects; ablate runs that compare criteria have none."""
    if by != EFFECT:
        return None
    found = {row["run_id"] for row in store.query("SELECT DISTINCT run_id FROM head_effects").to_pylist()}
    runs = (run for run in store.runs("ablate") if run["status"] == "finished" and run["run_id"] in found)
    return next((str(run["run_id"]) for run in runs), None)


@dataclass(frozen=True)
class _Ranking:
    """A way to order heads.

    Attributes:
        kind: Kind of the run that is read.
        heads: Returns the heads in order, from the store, the run's id and the options.
        columns: Columns of the table after layer and head, as for `table_cells`.
    """

    kind: RunKind
    heads: Callable[[Store, str, Rank], Sequence[Any]]
    columns: dict[str, str | Callable[[Mapping[str, Any]], Any]]


def _ranking(by: str) -> _Ranking:
    """Return the way to order heads by a name."""
    if by == GATE:
        columns = {name: name for name in ("kv_head", "gate", "p_open", "closed")}
        return _Ranking("gates", _gated, {**columns, "gate up": "gate_up", "class": "head_class"})
    if by == EFFECT:
        columns = {name: name for name in ("kv_head", "effect", "low", "high")}
        return _Ranking(
            "ablate", _effective, {**columns, "q": "q_value", "metric": "metric", "replaced by": "replacement"}
        )
    if by in IMPORTANCES:
        return _Ranking(
            "importance", _important, {"kv_head": "kv_head", by: "value", "mean gate gradient": "mean_gate_gradient"}
        )
    if by in BEHAVIOURS:
        return _Ranking("probe", _behaving, {by: "value"})
    return _Ranking("scan", _scored, {"kv_head": "kv_head", by: "value", "std": "std", "inactive in": _inactive})


def _inactive(row: Mapping[str, Any]) -> str:
    return f"{row['inactive_share']:.0%}"


def _empty(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the titles of optional columns without a value."""
    optional = {"gate_up": "gate up", "head_class": "class", "inactive_share": "inactive in"}
    return {title for name, title in optional.items() if not rows or rows[0].get(name) is None}


def _behaving(store: Store, run_id: str, options: Rank) -> Sequence[Any]:
    from headscan.analysis.heads.head_ranking import behaving_heads

    ranked = behaving_heads(store, run_id, options.by, site=options.site)
    return ranked[::-1] if options.lowest else ranked


def _important(store: Store, run_id: str, options: Rank) -> Sequence[Any]:
    from headscan.analysis.heads.head_ranking import rank_importance

    return rank_importance(store, run_id, options.by, site=options.site, descending=options.highest)


def _gated(store: Store, run_id: str, options: Rank) -> Sequence[Any]:
    from headscan.analysis.heads.head_ranking import gated_heads

    return gated_heads(store, run_id, site=options.site, descending=options.highest)


def _effective(store: Store, run_id: str, options: Rank) -> Sequence[Any]:
    from headscan.analysis.verdicts.head_effects import rank_effects

    ranked = rank_effects(store, run_id, site=options.site)
    if options.highest or options.lowest:
        ranked.sort(key=lambda found: found.effect, reverse=options.highest)
    return ranked


def _scored(store: Store, run_id: str, options: Rank) -> Sequence[Any]:
    from headscan.analysis.heads.head_ranking import rank_heads

    descending = True if options.highest else False if options.lowest else None
    return rank_heads(store, run_id, options.by, site=options.site, descending=descending)
