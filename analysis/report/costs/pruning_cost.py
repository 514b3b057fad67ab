"""Report section on pruned models: losses, removed heads, sizes and times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.pruning_chart import PrunedPoint, pruning_figure, removed_map
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import byte_count, percent
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.controls import loss_increase
from headscan.analysis.verdicts.judge import ArmOutcome, ArmVerdict, Verdict

IDENTITY = "removal"

_NOTE = (
    "Heads are removed from the files, and the projections that remain are solved again. Differences to the original"
    " model on the same questions, with 95 % intervals; the loss is paired by document. Controls have about the same"
    " size and the same repair: random heads, and whole attention layers dropped (arXiv 2406.15786). Dashed lines: one"
    " point of accuracy, and 90 % of the model's recall above chance."
)

#: Most methods, by unit and repair, with a map of their own.
_MOST_MAPS = 4


def pruning_section(store: Store, evaluation: Mapping[str, Any], verdict: Verdict) -> str | None:
    """Return the section on the pruned models of an evaluation; None if it has none."""
    details = _details(store, verdict.run_id)
    arms = [arm for arm in (*verdict.arms, *verdict.unjudged) if arm.name in details]
    if not arms:
        return None
    removed = _removed(store, verdict.run_id)
    points = [
        PrunedPoint(
            arm,
            details[arm.name]["method"],
            arm.zeroed_share or 0.0,
            removed.get(arm.name, ()),
            details[arm.name]["selection"],
        )
        for arm in arms
    ]
    chosen = [point for point in points if not point.arm.is_control]
    parts = [pages.paragraph(_NOTE, "note"), pages.figure(pruning_figure(points), "pruning")]
    heads_of = {site["layer"]: site["num_attention_heads"] for site in evaluation["grid"] if site["site"] == "self"}
    groups: dict[tuple[str, str], list[PrunedPoint]] = defaultdict(list)
    for point in chosen:
        groups[point.method, point.selection].append(point)
    differ = len({selection for _, selection in groups}) > 1
    for number, ((method, selection), members) in enumerate(list(groups.items())[:_MOST_MAPS]):
        title = f"Heads removed by {method}" + (f", {selection}" if differ else "")
        parts.append(pages.figure(removed_map(members, heads_of, title), f"removed-{number}"))
    parts += [pages.heading("Losses"), _losses(points), pages.heading("Sizes and times"), *_sizes(chosen, details)]
    return pages.section("What removing heads costs", parts, IDENTITY)


def _details(store: Store, run_id: str) -> dict[str, dict[str, Any]]:
    """Return the settings of pruned arms by name."""
    kinds = [kind.value for kind in ArmKind if kind.is_pruned]
    rows = store.query(
        "SELECT name, selection, config FROM arms WHERE run_id = ? AND list_contains(?::VARCHAR[], kind)",
        [run_id, kinds],
    ).to_pylist()
    found = {}
    for row in rows:
        config = row["config"] if isinstance(row["config"], dict) else json.loads(row["config"] or "{}")
        found[row["name"]] = {"method": "unknown", **config, "selection": row["selection"] or ""}
    return found


def _removed(store: Store, run_id: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the removed heads by arm."""
    rows = store.query(
        "SELECT name, layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE run_id = ? ORDER BY ALL", [run_id]
    ).to_pylist()
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        found[row["name"]].append((row["layer"], row["head"]))
    return {name: tuple(heads) for name, heads in found.items()}


def _losses(points: list[PrunedPoint]) -> str:
    families = list(dict.fromkeys(each.family for point in points for each in point.arm.recall))
    rows = [
        [
            point.arm.name,
            percent(point.share),
            _increase(point.arm, ("loss", "bits_per_byte")),
            _increase(point.arm, ("next_token_accuracy",)),
            _accuracy(point.arm),
            *(_recall(point.arm, family) for family in families),
        ]
        for point in points
    ]
    increases = [loss_increase(point.arm.measures) for point in points]
    unit = " or ".join(sorted({found.unit for found in increases if found is not None}))
    columns = ["model", "heads removed", f"loss increase, {unit}", "next token, points", "accuracy, points"]
    return pages.table([*columns, *(f"{family} left" for family in families)], rows)


def _recall(arm: ArmOutcome, family: str) -> str:
    return next((each.share_left() for each in arm.recall if each.family == family and each.informative), "–")


def _increase(arm: ArmOutcome, metrics: tuple[str, ...]) -> str:
    found = {each.metric: each.increase for each in arm.measures if each.increase is not None}
    return next((found[metric].numbers() for metric in metrics if metric in found), "–")


def _accuracy(arm: ArmOutcome) -> str:
    if not isinstance(arm, ArmVerdict):
        return "–"
    return f"{arm.paired.difference:+.2f} [{arm.paired.low:+.2f}, {arm.paired.high:+.2f}]"


def _sizes(points: list[PrunedPoint], details: Mapping[str, Mapping[str, Any]]) -> list[str]:
    measured = [(point, details[point.arm.name]) for point in points if "after" in details[point.arm.name]]
    if not measured:
        return [pages.paragraph("No sizes are stored.", "note")]
    rows = [_size_row("original", measured[0][1]["before"], None)]
    rows += [_size_row(point.arm.name, config["after"], config["before"]) for point, config in measured]
    skipped = [
        f"{point.arm.name} has no attention in layer{'s' * (len(config['skipped_layers']) > 1)}"
        f" {', '.join(map(str, config['skipped_layers']))}."
        for point, config in measured
        if config.get("skipped_layers")
    ]
    note = "Times are medians of repetitions in turn with the original, in brackets as a multiple of its speed."
    return [
        pages.table(
            ["model", "query heads", "KV heads", "parameters", "weights", "KV cache of a token", "prefill", "token"],
            rows,
        ),
        pages.paragraph(" ".join([note, *skipped]), "note"),
    ]


def _size_row(name: str, cost: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    cache = cost.get("measured_cache_bytes")
    cache = cost.get("cache_bytes") if cache is None else cache
    return [
        name,
        str(cost["query_heads"]),
        str(cost["kv_heads"]),
        f"{cost['parameters']:,}",
        byte_count(cost["weight_bytes"]),
        "–" if cache is None else byte_count(cache),
        _time(cost, before, "prefill_seconds"),
        _time(cost, before, "token_seconds"),
    ]


def _time(cost: Mapping[str, Any], before: Mapping[str, Any] | None, name: str) -> str:
    seconds = cost.get(name)
    if seconds is None:
        return "–"
    ratio = "" if before is None or not before.get(name) else f" ({before[name] / seconds:.2f}x)"
    return f"{1000 * seconds:.2f} ms{ratio}"
