"""The table of the effects of ablated heads, and the view of it."""

from __future__ import annotations

from headscan.analysis.schema.ddl import Column, Table, literal
from headscan.analysis.schema.scan_tables import HEAD, KV_HEAD, LAYER, RUN, SITE

#: A single head is ablated, or all heads of its layer but this one.
EACH, ALL_BUT_ONE = "each", "all_but_one"

#: Metrics of effects.
ACCURACY, LOSS, BITS_PER_BYTE, BLEU = "accuracy", "loss", "bits_per_byte", "bleu"
#: Metrics that grow as a model gets better; the others fall.
HIGHER_IS_BETTER = (ACCURACY, BLEU)

#: Largest q-value of a significant effect.
FALSE_DISCOVERY_RATE = 0.05

HEAD_EFFECTS = Table(
    "head_effects",
    "one row per head of an ablate run: the change of a metric, ablated minus baseline, paired by question or document",
    (
        RUN,
        Column(
            "mode",
            "VARCHAR",
            f"{EACH}: this head alone is ablated; {ALL_BUT_ONE}: all other heads of its layer are, one row per layer",
        ),
        SITE,
        LAYER,
        HEAD,
        KV_HEAD,
        Column("replacement", "VARCHAR", "what replaces the output of ablated heads: zero, mean or resample"),
        Column(
            "metric", "VARCHAR", f"{ACCURACY} (0 to 1), {LOSS} (nats per token), {BITS_PER_BYTE} or {BLEU} (0 to 100)"
        ),
        Column("baseline", "DOUBLE", "metric without ablation, on the same questions or documents"),
        Column("effect", "DOUBLE", "metric with ablated heads minus baseline"),
        Column("standard_error", "DOUBLE", "standard error of the effect; NULL with one document", nullable=True),
        Column("low", "DOUBLE", "lower end of the effect's 95 % interval; NULL with too few documents", nullable=True),
        Column("high", "DOUBLE", "upper end of the same interval; NULL with too few documents", nullable=True),
        Column(
            "p_value",
            "DOUBLE",
            f"two-sided p-value: McNemar's exact test for {ACCURACY}, a paired bootstrap over sentences for {BLEU}, a"
            " studentised bootstrap over documents for the others",
        ),
        Column("q_value", "DOUBLE", "p-value adjusted by Benjamini and Hochberg over all rows of the run and mode"),
        Column("n", "INTEGER", "number of questions, or of documents"),
        Column(
            "confirmed",
            "BOOLEAN",
            f"{EACH}: true if the effect is significant in one half of the questions (q at most"
            f" {FALSE_DISCOVERY_RATE:g}) and the interval of the other half is on the same side of 0; {ALL_BUT_ONE}:"
            " true if one half chose the head and the other half judges it. NULL if there are too few to split",
            nullable=True,
        ),
    ),
    (("run_id", "mode", "site", "layer", "head"),),
)

EFFECT_SUMMARY = f"""
    SELECT run_id, model, corpus, mode, site, layer, head, kv_head, replacement, metric, baseline, effect,
        CASE WHEN metric IN ({", ".join(map(literal, HIGHER_IS_BETTER))}) THEN -effect ELSE effect END AS harm,
        standard_error, low, high, p_value, q_value, q_value <= {FALSE_DISCOVERY_RATE}
            AND (harm >= 0 OR metric IN ({", ".join(map(literal, HIGHER_IS_BETTER))}) OR coalesce(confirmed, false))
            AS significant, n, confirmed
    FROM head_effects JOIN runs USING (run_id)
"""

EFFECT_VIEWS: dict[str, str] = {"effect_summary": EFFECT_SUMMARY}

EFFECT_VIEW_COMMENTS: dict[str, str] = {
    "effect_summary": (
        f"rows of head_effects with the direction of the effect; select one mode ({EACH} for single heads) and join"
        " with head_summary by site, layer and head"
    )
}

EFFECT_COLUMN_COMMENTS: dict[str, dict[str, str]] = {
    "effect_summary": {
        **{column.name: column.comment for column in HEAD_EFFECTS.columns},
        "harm": (
            f"positive if ablation makes the model worse: minus effect for {ACCURACY} and {BLEU}, effect for the others"
        ),
        "significant": f"true if q_value is at most {FALSE_DISCOVERY_RATE:g}; a loss that falls must also be confirmed,"
        " because a harm in few documents may be missing from the texts",
    }
}
