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

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headscan.catalog import BEHAVIOURS, IMPORTANCES, SCORES, STATISTICS
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

#: Ranks by the gates of a fit.
GATE = "gate"
#: Ranks by the effects of single heads.
EFFECT = "effect"

if TYPE_CHECKING:
    from headscan.analysis.store.records import RunKind
    from headscan.analysis.store.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    add_json(parser)
    names = list(dict.fromkeys([*SCORES, *STATISTICS, *BEHAVIOURS, *IMPORTANCES, GATE, EFFECT]))
    parser.add_argument(
        "--by",
        type=arguments.one_name("score", names),
        default="output_norm_ln",
        metavar="NAME",
        help=f"score, statistic, behaviour, importance, gate or effect: {', '.join(names)} (default: output_norm_ln)",
    )
    parser.add_argument("--run", help="first characters of the id of the run (default: the newest finished one)")
    parser.add_argument("--site", default="self", help="attention of the layer: self, encoder or cross (default: self)")
    parser.add_argument(
        "--limit", type=arguments.whole(0), default=20, help="number of heads; 0 shows all (default: 20)"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--highest", action="store_true", help="highest values first, for any score")
    order.add_argument("--lowest", action="store_true", help="lowest values first, for any score")


def run(options: argparse.Namespace) -> Result:
    from headscan.pipelines.runs.text_tables import table_cells, text_table

    ranking = _ranking(options.by)
    store = shared.open_store(options)
    run = store.resolve_run(options.run or _newest_effects(store, options.by), ranking.kind)
    shared.say_run(run)
    heads = ranking.heads(store, str(run["run_id"]), options)
    rows = [{"rank": place, **asdict(head)} for place, head in enumerate(heads, 1)][: options.limit or None]
    columns = {"rank": "rank", "layer": "layer", "head": "head", **ranking.columns}
    columns = {title: value for title, value in columns.items() if title not in _empty(rows)}
    facts = {"run_id": run["run_id"], "by": options.by, "site": options.site, "heads": len(heads)}
    notes = []
    if options.by in IMPORTANCES:
        from headscan.analysis.heads.importance_ranking import halves_agreement

        agreement = halves_agreement(store, str(run["run_id"]), options.by, site=options.site)
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
    heads: Callable[[Store, str, argparse.Namespace], Sequence[Any]]
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


def _behaving(store: Store, run_id: str, options: argparse.Namespace) -> Sequence[Any]:
    from headscan.analysis.store.behaviour_rows import behaving_heads

    ranked = behaving_heads(store, run_id, options.by, site=options.site)
    return ranked[::-1] if options.lowest else ranked


def _important(store: Store, run_id: str, options: argparse.Namespace) -> Sequence[Any]:
    from headscan.analysis.heads.importance_ranking import rank_importance

    return rank_importance(store, run_id, options.by, site=options.site, descending=options.highest)


def _gated(store: Store, run_id: str, options: argparse.Namespace) -> Sequence[Any]:
    from headscan.analysis.heads.importance_ranking import gated_heads

    return gated_heads(store, run_id, site=options.site, descending=options.highest)


def _effective(store: Store, run_id: str, options: argparse.Namespace) -> Sequence[Any]:
    from headscan.analysis.effects.head_effects import rank_effects

    ranked = rank_effects(store, run_id, site=options.site)
    if options.highest or options.lowest:
        ranked.sort(key=lambda found: found.effect, reverse=options.highest)
    return ranked


def _scored(store: Store, run_id: str, options: argparse.Namespace) -> Sequence[Any]:
    from headscan.analysis.heads.selection import rank_heads

    descending = True if options.highest else False if options.lowest else None
    return rank_heads(store, run_id, options.by, site=options.site, descending=descending)
