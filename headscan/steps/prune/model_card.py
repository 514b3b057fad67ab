"""Tables and card of pruned models: what was removed, what it costs, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headscan.export.servable_model import command_lines, serving_commands
from headscan.steps.prune.held_out_losses import loss_rows
from headscan.steps.prune.model_costs import CostComparison
from headscan.steps.prune.pruned_arms import BuiltModel, skipped_layers
from headscan.text_tables import percent
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.judge import Verdict


def cost_rows(costs: CostComparison) -> list[tuple[str, str, str]]:
    """Return names, and values before and after, as text; unmeasured values are left out."""
    fields = {
        "parameters": ("parameters", 1, ""),
        "weights": ("weight_bytes", 2**20, " MiB"),
        "query heads": ("query_heads", 1, ""),
        "KV heads": ("kv_heads", 1, ""),
        "layers with attention": ("attention_layers", 1, ""),
        "KV cache of a token in the dtype of the weights, by arithmetic": ("cache_bytes", 1, " B"),
        "KV cache of a token in the dtype of the weights, measured": ("measured_cache_bytes", 1, " B"),
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
    """Return one table row for each pruned model, controls included; without a verdict the losses are left out."""
    outcomes = {} if verdict is None else verdict.by_name
    rows: list[Mapping[str, Any]] = []
    for each, name in zip(built, names, strict=True):
        row: dict[str, Any] = {
            "share": percent(each.share),
            "method": each.method if each.seed is None else f"{each.method} {each.seed}",
            "heads": f"-{len(each.removed)}",
            "KV heads": f"-{each.costs.before.kv_heads - each.costs.after.kv_heads}",
        }
        if name in outcomes:
            row |= _losses(outcomes[name])
        costs = each.costs
        row |= {
            "weights": percent(costs.weights_left),
            "cache": "" if costs.cache_left is None else percent(costs.cache_left),
            "prefill": _times(costs.prefill_ratio),
            "token": _times(costs.token_ratio),
        }
        if (arm := outcomes.get(name)) is not None and arm.accuracy is not None:
            row["verdict"] = "" if each.is_control else arm.label
        rows.append(row)
    return rows


def _losses(arm: ArmVerdict) -> dict[str, str]:
    columns = {}
    increase = loss_increase(arm.metrics)
    if increase is not None:
        low_high = f" [{increase.low:+.3f}, {increase.high:+.3f}]" if increase.interval.known else ""
        columns["loss, nats" if increase.unit == "nats per token" else "loss, bits"] = (
            f"{increase.difference:+.3f}{low_high}"
        )
    for measure in arm.metrics:
        if measure.metric == "next_token_accuracy" and measure.increase is not None:
            columns["next token"] = f"{measure.increase.difference:+.2f}"
    if (p := arm.accuracy) is not None:
        columns["accuracy, points"] = f"{p.difference:+.2f} [{p.low:+.2f}, {p.high:+.2f}]"
    for each in arm.recall:
        if (left := arm.value(each.family)) is not None:
            columns[f"{each.family} left"] = f"{left.value:.0f} %"
    return columns


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or value >= 1e4 else f"{value:,.2f}"


def model_card(
    built: BuiltModel,
    *,
    model: str,
    revision: str | None,
    calibration: str,
    version: str,
    remote_code: bool = False,
    is_servable: bool = False,
    verdict: Sequence[str] = (),
) -> str:
    """Return the text of ``README.md``. ``revision`` None is that of a folder, ``calibration`` is what chose the heads
    and repaired the projections, and ``verdict`` are the sentences of an evaluation, if there was one.
    """
    before, after = built.costs.before, built.costs.after
    head = [
        "---",
        f"base_model: {json.dumps(model)}",
        "library_name: transformers",
        "tags: [headscan, pruned]",
        "---",
        "",
        f"# {model} without {before.query_heads - after.query_heads} of {before.query_heads} attention heads",
        "",
        f"Made with headscan {version} from `{model}`{f' at `{revision}`' if revision else ''}. Method"
        f" `{built.method}`, unit {built.unit}, repaired: {built.repair}. Calibration: {calibration}. The licence is"
        " that of the original model.",
        "",
    ]
    if note := skipped_layers(built.skipped):
        head += [f"{note[0].upper()}{note[1:]}.", ""]
    rows = ["| | before | after |", "| --- | ---: | ---: |"]
    rows += [f"| {name} | {one} | {other} |" for name, one, other in cost_rows(built.costs)]
    if losses := loss_rows(built.losses):
        columns = list(losses[0])
        rows += ["", f"| {' | '.join(columns)} |", "| --- | ---: | ---: | ---: |"]
        rows += [f"| {' | '.join(row.values())} |" for row in losses]
    judged = [f"- {sentence}" for sentence in verdict] or ["Not judged."]
    loading = ["## Load", "", "```python", *_loading(remote_code), "```", ""]
    if is_servable:
        commands = serving_commands("THIS_FOLDER", serves_itself=remote_code and built.has_equal_groups)
        loading += ["## Serve", "", "```bash", *command_lines(commands), "```", ""]
    gone = ["## Removed heads", "", _heads(built), ""]
    return "\n".join([*head, *rows, "", "## Verdict", "", *judged, "", *loading, *gone])


def _loading(remote_code: bool) -> list[str]:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if not remote_code:
        lines.insert(0, "import headscan  # registers pruned models with transformers")
    trust = ", trust_remote_code=True" if remote_code else ""
    return [
        *lines,
        f'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER"{trust})',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    ]


def _heads(built: BuiltModel) -> str:
    layers = sorted({head[0] for head in built.removed})
    return "\n".join(
        f"- layer {layer}: {', '.join(str(head) for each, head in built.removed if each == layer)}" for layer in layers
    )
