"""Report sections on the costs of a smaller KV cache and of pruned models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from headscan.report import page_parts as pages
from headscan.report.ablation_costs import recall_share
from headscan.report.page_parts import byte_count
from headscan.report.profile_charts import removed_map
from headscan.report.share_chart import ArmPoint, cache_figure, pruning_figure
from headscan.store.records import ArmRecord
from headscan.store.store import Store
from headscan.store.tables import ACCURACY, BITS_PER_BYTE, LOSS
from headscan.store.verdict_limits import MARGIN, MIN_RETAINED, points_words
from headscan.text_tables import percent
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.criterion_points import heads_of_arms
from headscan.verdicts.judge import Verdict
from headscan.verdicts.metrics import metric_words

CACHE = "cache-cost"

#: The cache is counted at the plan's length that is nearest to this one.
_TOKENS = 32768

#: What a plan does in each mode.
_MODES = {
    "forward": "Forward: every token, of the context too, sees what the plan keeps.",
    "decode": "Decode: the context is read with full attention, keys are evicted, and the rest is read from the smaller"
    " cache.",
}


def cache_section(verdict: Verdict, tokens: int | None, left: Mapping[str, float]) -> str | None:
    """Return the section on the plans of an evaluation, with what `cache_left` returns; None if it has none."""
    if tokens is None:
        return None
    points = [ArmPoint(each, _method(each.arm), left[each.name]) for each in verdict.arms if each.name in left]
    modes = {each.arm.selection for each in verdict.by_name.values() if each.name in left}
    note = ["Each point is a plan in one mode.", *(text for mode, text in _MODES.items() if mode in modes)]
    note.append("Whiskers are 95 % intervals of the paired difference.")
    if any(point.verdict.kind.is_random for point in points):
        note.append("Random plans give the same windows to other KV heads or layers, so they have the same bytes.")
    note.append(f"Dashed lines: {points_words(MARGIN)} below the baseline, and {MIN_RETAINED:.0f} % of the recall.")
    return pages.section(
        "What a smaller KV cache costs",
        [
            pages.paragraph(" ".join(note), "note"),
            *([pages.figure(cache_figure(points, tokens), "cache")] if points else []),
            pages.columns(
                [arm for arm in verdict.by_name.values() if arm.name in left and not arm.kind.is_random],
                {
                    "plan": lambda arm: arm.name,
                    f"KV cache left at {tokens:,} tokens": lambda arm: percent(left[arm.name]),
                    "accuracy, points": _accuracy,
                    "recall left": lambda arm: "; ".join(each.words() for each in arm.judged_recall) or "–",
                    "measures": lambda arm: "; ".join(metric_words(arm.metrics)) or "–",
                },
            ),
        ],
        CACHE,
    )


def cache_left(verdict: Verdict | None) -> tuple[int | None, dict[str, float]]:
    """Return a length in tokens (None without plans), and by arm the share of the KV cache that is left at it."""
    if verdict is None:
        return None, {}
    shares = {
        name: {int(tokens): float(share) for tokens, share in each.arm.config["kv_shares"]}
        for name, each in verdict.by_name.items()
        if each.arm.config.get("kv_shares")
    }
    if not shares:
        return None, {}
    # The nearest length that all plans have.
    lengths = set.intersection(*map(set, shares.values()))
    tokens = min(lengths, key=lambda length: (abs(length - _TOKENS), length))
    return tokens, {name: of_plan[tokens] for name, of_plan in shares.items()}


def _method(plan: ArmRecord) -> str:
    """Return the method of a plan, with its unit if that is the layer."""
    return f"{plan.config['method']}{' by layer' if plan.config.get('granularity') == 'layer' else ''}"


REMOVAL = "removal"

_PRUNING_NOTE = (
    "Heads are removed from the files, and the projections that remain are solved again. Differences to the original"
    " model on the same questions, with 95 % intervals; the loss is paired by document. Dashed lines:"
    f" {points_words(MARGIN)} of accuracy, and {MIN_RETAINED:.0f} % of what the model recalls beyond guessing."
)
_CONTROLS_NOTE = (
    " Controls have about the same size and the same repair: random heads, and whole attention layers dropped (arXiv"
    " 2406.15786)."
)

#: Most methods, by unit and repair, with a map of their own.
_MOST_MAPS = 4


def pruning_section(store: Store, evaluation: Mapping[str, Any], verdict: Verdict) -> str | None:
    """Return the section on the pruned models of an evaluation; None if it has none."""
    arms = [each for each in verdict.by_name.values() if each.kind.is_pruned]
    if not arms:
        return None
    removed = heads_of_arms(store, verdict.run_id)
    points = [
        ArmPoint(
            each,
            each.arm.config.get("method", "unknown"),
            each.arm.ablated_share or 0.0,
            removed.get(each.name, ()),
            each.arm.selection or "",
        )
        for each in arms
    ]
    chosen = [point for point in points if not point.verdict.kind.is_control]
    note = _PRUNING_NOTE + _CONTROLS_NOTE * (len(chosen) < len(points))
    parts = [pages.paragraph(note, "note"), pages.figure(pruning_figure(points), "pruning")]
    heads_of = {site["layer"]: site["num_attention_heads"] for site in evaluation["grid"] if site["site"] == "self"}
    groups: dict[tuple[str, str], list[ArmPoint]] = defaultdict(list)
    for point in chosen:
        groups[point.method, point.selection].append(point)
    differ = len({selection for _, selection in groups}) > 1
    for number, ((method, selection), members) in enumerate(list(groups.items())[:_MOST_MAPS]):
        title = f"Heads removed by {method}" + (f", {selection}" if differ else "")
        parts.append(pages.figure(removed_map(members, heads_of, title), f"removed-{number}"))
    parts += [
        pages.heading("Losses"),
        _losses(arms),
        pages.heading("Sizes and times"),
        *_sizes([point.verdict.arm for point in chosen]),
    ]
    return pages.section("What removing heads costs", parts, REMOVAL)


def _losses(arms: Sequence[ArmVerdict]) -> str:
    families = list(dict.fromkeys(each.family for arm in arms for each in arm.judged_recall))
    increases = [loss_increase(arm.metrics) for arm in arms]
    units = sorted({increase.unit for increase in increases if increase is not None})
    loss = f"loss increase, {' or '.join(units)}" if units else "loss increase"
    cells: dict[str, Callable[[ArmVerdict], str]] = {
        "model": lambda arm: arm.name,
        "heads removed": lambda each: percent(each.arm.ablated_share or 0.0),
        loss: lambda arm: _increase(arm, (LOSS, BITS_PER_BYTE)),
        "next token, points": lambda arm: _increase(arm, ("next_token_accuracy",)),
        "accuracy, points": _accuracy,
    }
    if not any(measure.metric == "next_token_accuracy" for arm in arms for measure in arm.metrics):
        del cells["next token, points"]
    cells |= {f"{family} left": partial(recall_share, family) for family in families}
    return pages.columns(arms, cells)


def _increase(arm: ArmVerdict, metrics: tuple[str, ...]) -> str:
    increase_of = {each.metric: each.increase for each in arm.metrics if each.increase is not None}
    return next((increase_of[metric].numbers() for metric in metrics if metric in increase_of), "–")


def _accuracy(arm: ArmVerdict) -> str:
    difference = arm.value(ACCURACY)
    return "–" if difference is None else difference.words()


class _ModelCost(NamedTuple):
    """Sizes and times of a model; ``before`` are those of the original, None for the original itself."""

    name: str
    cost: Mapping[str, Any]
    before: Mapping[str, Any] | None = None

    def cache(self) -> str:
        measured = self.cost.get("measured_cache_bytes")
        count = self.cost.get("cache_bytes") if measured is None else measured
        return "–" if count is None else byte_count(count)

    def time(self, name: str) -> str:
        seconds = self.cost.get(name)
        if seconds is None:
            return "–"
        whole = None if self.before is None else self.before.get(name)
        return f"{1000 * seconds:.2f} ms" + (f" ({whole / seconds:.2f}x)" if whole else "")


def _sizes(arms: Sequence[ArmRecord]) -> list[str]:
    measured = [arm for arm in arms if "after" in arm.config]
    if not measured:
        return [pages.paragraph("No sizes are stored.", "note")]
    models = [_ModelCost("original", measured[0].config["before"])]
    models += [_ModelCost(arm.name, arm.config["after"], arm.config["before"]) for arm in measured]
    skipped = [
        f"{arm.name} has no attention in {'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, layers))}."
        for arm in measured
        if (layers := arm.config.get("skipped_layers"))
    ]
    cells: dict[str, Callable[[_ModelCost], str]] = {
        "model": lambda model: model.name,
        "query heads": lambda model: str(model.cost["query_heads"]),
        "KV heads": lambda model: str(model.cost["kv_heads"]),
        "parameters": lambda model: f"{model.cost['parameters']:,}",
        "weights": lambda model: byte_count(model.cost["weight_bytes"]),
        "KV cache of a token": _ModelCost.cache,
    }
    notes = skipped
    if any(model.cost.get("prefill_seconds") is not None for model in models):
        cells["prefill"] = lambda model: model.time("prefill_seconds")
        cells["token"] = lambda model: model.time("token_seconds")
        times = "Times are medians of repetitions in turn with the original, in brackets as a multiple of its speed."
        notes = [times, *skipped]
    return [pages.columns(models, cells), *([pages.paragraph(" ".join(notes), "note")] if notes else [])]
