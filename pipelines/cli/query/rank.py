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
from typing import TYPE_CHECKING, Any

from headscan.catalog import BEHAVIOURS, IMPORTANCES, SCORES, STATISTICS
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared

#: Ranks by the gates of a fit.
GATE = "gate"
#: Ranks by the effects of single heads.
EFFECT = "effect"

if TYPE_CHECKING:
    from headscan.analysis.store.records import RunKind
    from headscan.analysis.store.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
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


def run(options: argparse.Namespace) -> None:
    from headscan.pipelines.runs.text_tables import text_table

    store = shared.open_store(options)
    if options.by == GATE:
        rows = _gated(store, options)
    elif options.by == EFFECT:
        rows = _effective(store, options)
    elif options.by in IMPORTANCES:
        rows = _important(store, options)
    else:
        rows = _behaving(store, options) if options.by in BEHAVIOURS else _scored(store, options)
    print(text_table(rows[: options.limit or None]))


def _resolved(store: Store, options: argparse.Namespace, kind: RunKind) -> str:
    """Return the id of the run that is ranked, and print its origin."""
    run = store.resolve_run(options.run, kind)
    shared.say_run(run)
    return str(run["run_id"])


def _behaving(store: Store, options: argparse.Namespace) -> list[dict[str, Any]]:
    from headscan.analysis.store.behaviour_rows import behaving_heads

    run_id = _resolved(store, options, "probe")
    ranked = behaving_heads(store, run_id, options.by, site=options.site)
    if options.lowest:
        ranked.reverse()
    return [
        {"rank": place, "layer": head.layer, "head": head.head, options.by: head.value}
        for place, head in enumerate(ranked, 1)
    ]


def _important(store: Store, options: argparse.Namespace) -> list[dict[str, Any]]:
    from headscan.analysis.heads.importance_ranking import rank_importance

    run_id = _resolved(store, options, "importance")
    ranked = rank_importance(store, run_id, options.by, site=options.site, descending=options.highest)
    return [
        {
            "rank": place,
            "layer": head.layer,
            "head": head.head,
            "kv_head": head.kv_head,
            options.by: head.value,
            "mean gate gradient": head.mean_gate_gradient,
        }
        for place, head in enumerate(ranked, 1)
    ]


def _gated(store: Store, options: argparse.Namespace) -> list[dict[str, Any]]:
    from headscan.analysis.heads.gate_ranking import gated_heads

    run_id = _resolved(store, options, "gates")
    heads = gated_heads(store, run_id, site=options.site, descending=options.highest)
    return [{"rank": place, **head.row()} for place, head in enumerate(heads, 1)]


def _effective(store: Store, options: argparse.Namespace) -> list[dict[str, Any]]:
    from headscan.analysis.effects.head_effects import rank_effects

    ranked = rank_effects(store, _resolved(store, options, "ablate"), site=options.site)
    if options.highest or options.lowest:
        ranked.sort(key=lambda found: found.effect, reverse=options.highest)
    return [
        {
            "rank": place,
            "layer": found.layer,
            "head": found.head,
            "kv_head": found.kv_head,
            "effect": found.effect,
            "low": found.low,
            "high": found.high,
            "q": found.q_value,
            "metric": found.metric,
            "replaced by": found.replacement,
        }
        for place, found in enumerate(ranked, 1)
    ]


def _scored(store: Store, options: argparse.Namespace) -> list[dict[str, Any]]:
    from headscan.analysis.heads.selection import rank_heads

    run_id = _resolved(store, options, "scan")
    descending = True if options.highest else False if options.lowest else None
    ranked = rank_heads(store, run_id, options.by, site=options.site, descending=descending)
    return [
        {
            "rank": place,
            "layer": head.layer,
            "head": head.head,
            "kv_head": head.kv_head,
            options.by: head.value,
            "std": head.std,
            **({} if head.inactive_share is None else {"inactive in": f"{head.inactive_share:.0%}"}),
        }
        for place, head in enumerate(ranked, 1)
    ]
