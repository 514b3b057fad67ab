"""Report section on what a smaller KV cache costs."""

from __future__ import annotations

import json

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.cache_chart import PlanPoint, cache_figure
from headscan.analysis.report.sections import page as pages
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import Verdict

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
    read = _points(store, verdict)
    if read is None:
        return None
    tokens, points = read
    rows = [
        [
            point.arm.name,
            f"{point.kv_share:.1%}",
            f"{point.arm.paired.difference:+.2f} [{point.arm.paired.low:+.2f}, {point.arm.paired.high:+.2f}]",
            "; ".join(each.points() for each in point.arm.recall if each.informative) or "–",
        ]
        for point in points
        if not point.arm.is_random
    ]
    return pages.section(
        "What a smaller KV cache costs",
        [
            pages.paragraph(_NOTE, "note"),
            pages.figure(cache_figure(points, tokens), "cache"),
            pages.table(["plan", "KV cache left", "accuracy, points", "recall left"], rows, texts=1),
        ],
    )


def _points(store: Store, verdict: Verdict) -> tuple[int, list[PlanPoint]] | None:
    """Return the length at which caches are counted, and the plans; None if there are none."""
    kinds = [kind.value for kind in ArmKind if kind.shrinks_cache]
    rows = store.query(
        "SELECT name, config FROM arms WHERE run_id = ? AND list_contains(?::VARCHAR[], kind)",
        [verdict.run_id, kinds],
    ).to_pylist()
    details = {}
    for row in rows:
        config = row["config"] if isinstance(row["config"], dict) else json.loads(row["config"] or "{}")
        if config.get("kv_shares"):
            details[row["name"]] = (str(config["method"]), {int(n): float(share) for n, share in config["kv_shares"]})
    points = [arm for arm in verdict.arms if arm.name in details]
    lengths = set.intersection(*(set(details[arm.name][1]) for arm in points)) if points else set()
    if not lengths:
        return None
    tokens = min(lengths, key=lambda length: (abs(length - _TOKENS), length))
    return tokens, [PlanPoint(arm, details[arm.name][0], details[arm.name][1][tokens]) for arm in points]
