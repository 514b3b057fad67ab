"""Tables of pruned models: sizes, times and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headscan.analysis.verdicts.controls import loss_increase
from headscan.analysis.verdicts.judge import ArmOutcome, ArmVerdict, Verdict
from headscan.pipelines.pruning.model_costs import CostComparison
from headscan.pipelines.pruning.pruned_arms import BuiltModel


def cost_rows(costs: CostComparison) -> list[tuple[str, str, str]]:
    """Return names, and values before and after, as text; unmeasured values are left out."""
    fields = {
        "parameters": ("parameters", 1, ""),
        "weights": ("weight_bytes", 2**20, " MiB"),
        "query heads": ("query_heads", 1, ""),
        "KV heads": ("kv_heads", 1, ""),
        "layers with attention": ("attention_layers", 1, ""),
        "KV cache of a token, by arithmetic": ("cache_bytes", 1, " B"),
        "KV cache of a token, measured": ("measured_cache_bytes", 1, " B"),
        "prefill": ("prefill_seconds", 1e-3, " ms"),
        "generated token": ("token_seconds", 1e-3, " ms"),
    }
    rows = []
    for name, (field, unit, suffix) in fields.items():
        values = [getattr(cost, field) for cost in (costs.before, costs.after)]
        if None not in values:
            before, after = (_amount(value / unit) + suffix for value in values)
            rows.append((name, before, after))
    return rows


def model_rows(built: Sequence[BuiltModel], names: Sequence[str], verdict: Verdict | None) -> list[Mapping[str, Any]]:
    """Return one table row for each pruned model, controls included.

    Args:
        names: Names of their arms.
        verdict: Verdict on the arms; None leaves the losses out.
    """
    outcomes = {} if verdict is None else {arm.name: arm for arm in (*verdict.arms, *verdict.unjudged)}
    rows: list[Mapping[str, Any]] = []
    for each, name in zip(built, names, strict=True):
        row: dict[str, Any] = {
            "share": f"{100 * each.share:.3g}%",
            "method": each.method if each.seed is None else f"{each.method} {each.seed}",
            "heads": f"-{len(each.removed)}",
            "KV heads": f"-{each.costs.before.kv_heads - each.costs.after.kv_heads}",
        }
        if name in outcomes:
            row |= _losses(outcomes[name])
        costs = each.costs
        row |= {
            "weights": f"{costs.weights_left:.1%}",
            "cache": "" if costs.cache_left is None else f"{costs.cache_left:.1%}",
            "prefill": _times(costs.prefill_ratio),
            "token": _times(costs.token_ratio),
        }
        rows.append(row)
    return rows


def _losses(arm: ArmOutcome) -> dict[str, str]:
    """Return the columns of losses: of text, accuracy and recall."""
    columns = {}
    increase = loss_increase(arm.measures)
    if increase is not None:
        low_high = f" [{increase.low:+.3f}, {increase.high:+.3f}]" if increase.documents > 1 else ""
        columns["loss, nats" if increase.unit == "nats per token" else "loss, bits"] = (
            f"{increase.difference:+.3f}{low_high}"
        )
    for measure in arm.measures:
        if measure.metric == "next_token_accuracy" and measure.increase is not None:
            columns["next token"] = f"{measure.increase.difference:+.2f}"
    if isinstance(arm, ArmVerdict):
        p = arm.paired
        columns["accuracy, points"] = f"{p.difference:+.2f} [{p.low:+.2f}, {p.high:+.2f}]"
    for family in arm.recall:
        if (left := arm.value(family.family)) is not None:
            columns[f"{family.family} left"] = f"{left.value:.0f} %"
    return columns


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or value >= 1e4 else f"{value:,.2f}"
