"""Tables of effects as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared.json_output import Result

if TYPE_CHECKING:
    from headscan.analysis.effects.head_effects import HeadEffect

#: Heads shown at either end of the table.
_SHOWN = 10
#: Factor and digits of a metric; others are shown as they are, with four digits.
_FORMATS = {"accuracy": (100, 2), "bleu": (1, 2)}


def effects_result(run_id: str, store: str, effects: Sequence[HeadEffect]) -> Result:
    """Return the effects of a run; the text shows both ends of the table."""
    rows = [{**asdict(effect), "harm": effect.harm, "significant": effect.significant} for effect in effects]
    facts = {"run_id": run_id, "store": store}
    return Result(rows, lambda: f"run {run_id} in {store}\n\n{effects_text(effects)}", facts)


def effects_text(effects: Sequence[HeadEffect]) -> str:
    """Return the tables of effects as text."""
    from headscan.analysis.effects.head_effects import effect_facts
    from headscan.analysis.schema.effect_tables import ALL_BUT_ONE, EACH, FALSE_DISCOVERY_RATE
    from headscan.pipelines.runs.text_tables import text_table

    parts = []
    sites = len({effect.site for effect in effects}) > 1
    single = sorted((e for e in effects if e.mode == EACH), key=lambda e: (-e.harm, e.site, e.layer, e.head))
    if single:
        first, found = single[0], effect_facts(single)
        parts.append(
            f"{_title(first)}\n{found['significant']} of {found['heads']} heads have a significant effect (q at most"
            f" {FALSE_DISCOVERY_RATE:g}): {found['harmful']} are needed, {found['helpful']} do harm;"
            f" {found['confirmed']} of them are confirmed on halves."
        )
        ends = single if len(single) <= 2 * _SHOWN else [*single[:_SHOWN], *single[-_SHOWN:]]
        parts.append(text_table([_cells(effect, sites) for effect in ends]))
        if len(ends) < len(single):
            parts.append(f"the {_SHOWN} most needed heads, then the {_SHOWN} least needed of {len(single)}")
    layers = [effect for effect in effects if effect.mode == ALL_BUT_ONE]
    if layers:
        judged = "chosen on one half, judged on the other" if layers[0].confirmed else "too few documents to split"
        parts.append(f"Each layer reduced to its best head ({judged}). {_title(layers[0])}")
        parts.append(text_table([_cells(effect, sites) for effect in layers]))
    return "\n\n".join(parts)


def _title(effect: HeadEffect) -> str:
    """Return metric, unit and replacement in words."""
    units = {"accuracy": "accuracy, in percentage points", "loss": "loss, in nats per token", "bleu": "BLEU"}
    metric = units.get(effect.metric, "bits per byte")
    baseline = f"{100 * effect.baseline:.2f} %" if effect.metric == "accuracy" else f"{effect.baseline:.4f}"
    replaced = {"zero": "zero", "mean": "their means", "resample": "their outputs on other texts"}[effect.replacement]
    unit = {"accuracy": "questions", "bleu": "sentences"}.get(effect.metric, "documents")
    return (
        f"Change of {metric}, with ablated heads at {replaced}; baseline {baseline} on {effect.n} {unit}, paired 95 %"
        " intervals."
    )


def _cells(effect: HeadEffect, sites: bool) -> dict[str, object]:
    """Return a row of a table; with the site if there are several.

    The number of digits depends on the metric.
    """

    scale, digits = _FORMATS.get(effect.metric, (1, 4))

    def number(value: float | None) -> str:
        return "" if value is None else f"{scale * value:+.{digits}f}"

    return {
        **({"site": effect.site} if sites else {}),
        "layer": effect.layer,
        "head": effect.head,
        "effect": number(effect.effect),
        "low": number(effect.low),
        "high": number(effect.high),
        "p": effect.p_value,
        "q": effect.q_value,
        "": ("*" if effect.significant else "") + ("+" if effect.mode == "each" and effect.confirmed else ""),
    }
