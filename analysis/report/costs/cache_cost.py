"""Report section on the cost of a smaller KV cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.cache_chart import PlanPoint, cache_figure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import ArmOutcome, ArmVerdict, Verdict

IDENTITY = "cache-cost"

#: The cache is counted at the plan's length that is nearest to this one.
_TOKENS = 32768

_NOTE = (
    "Each point is a plan in one mode. Forward: every token, of the context too, sees what the plan keeps. Decode: the"
    " context is read with full attention, keys are evicted, and the rest is read from the smaller cache. Whiskers are"
    " 95 % intervals of the paired difference. Random plans give the same windows to other KV heads, so they have the"
    " same bytes. Dashed lines: one point below the baseline, and 90 % of the recall."
)


def cache_section(store: Store, verdict: Verdict) -> str | None:
    """Return the section on the plans of an evaluation; None if it has none."""
    details = _details(store, verdict.run_id)
    arms = _arms(verdict, details)
    if not arms:
        return None
    tokens = _common_tokens(arms, details)
    points = [
        PlanPoint(arm, details[arm.name].method, details[arm.name].kv_shares[tokens])
        for arm in verdict.arms
        if arm.name in details
    ]
    rows = [
        [
            arm.name,
            f"{details[arm.name].kv_shares[tokens]:.1%}",
            _accuracy(arm),
            "; ".join(each.points() for each in arm.recall if each.informative) or "–",
            "; ".join(measure.words() for measure in arm.measures) or "–",
        ]
        for arm in arms
        if not arm.is_random
    ]
    return pages.section(
        "What a smaller KV cache costs",
        [
            pages.paragraph(_NOTE, "note"),
            *([pages.figure(cache_figure(points, tokens), "cache")] if points else []),
            pages.table(
                ["plan", f"KV cache left at {tokens:,} tokens", "accuracy, points", "recall left", "measures"],
                rows,
                texts=1,
            ),
        ],
        IDENTITY,
    )


def cache_left(store: Store, verdict: Verdict) -> tuple[int | None, dict[str, float]]:
    """Return a length in tokens, and the share of the KV cache that each plan leaves at it, by arm.

    Without plans the length is None.
    """
    details = _details(store, verdict.run_id)
    arms = _arms(verdict, details)
    if not arms:
        return None, {}
    tokens = _common_tokens(arms, details)
    return tokens, {arm.name: details[arm.name].kv_shares[tokens] for arm in arms}


def _arms(verdict: Verdict, details: Mapping[str, _Details]) -> list[ArmOutcome]:
    return [arm for arm in (*verdict.arms, *verdict.unjudged) if arm.name in details]


def _common_tokens(arms: Iterable[ArmOutcome], details: Mapping[str, _Details]) -> int:
    """Return the length nearest to `_TOKENS` that all plans have."""
    lengths = set.intersection(*(set(details[arm.name].kv_shares) for arm in arms))
    return min(lengths, key=lambda length: (abs(length - _TOKENS), length))


class _Details(NamedTuple):
    """Method of a plan, and the share of the KV cache that is left by tokens."""

    method: str
    kv_shares: dict[int, float]


def _details(store: Store, run_id: str) -> dict[str, _Details]:
    """Return the details of plan arms by name."""
    kinds = [kind.value for kind in ArmKind if kind.shrinks_cache]
    rows = store.query(
        "SELECT name, config FROM arms WHERE run_id = ? AND list_contains(?::VARCHAR[], kind)", [run_id, kinds]
    ).to_pylist()
    found = {}
    for row in rows:
        config = row["config"] if isinstance(row["config"], dict) else json.loads(row["config"] or "{}")
        shares = {int(tokens): float(share) for tokens, share in config.get("kv_shares") or ()}
        if shares:
            found[row["name"]] = _Details(str(config["method"]), shares)
    return found


def _accuracy(arm: ArmOutcome) -> str:
    """Return the paired difference with its interval; a dash without right answers."""
    if not isinstance(arm, ArmVerdict):
        return "–"
    return f"{arm.paired.difference:+.2f} [{arm.paired.low:+.2f}, {arm.paired.high:+.2f}]"
