"""The view of importance runs: one row per head."""

from __future__ import annotations

from headscan.catalog import IMPORTANCE_WEIGHT, IMPORTANCES

_HEADS = "PARTITION BY run_id, site"

IMPORTANCE_SUMMARY = f"""
    WITH heads AS (
        SELECT run_id, site, layer, head, kv_head, count(*) AS sequences,
            avg(abs(gate_gradient)) AS importance,
            stddev_samp(abs(gate_gradient)) AS importance_std,
            avg(gate_gradient) AS mean_gate_gradient,
            avg(entropy / nullif(ln(tokens), 0)) AS relative_entropy
        FROM head_importance JOIN sequences USING (run_id, sequence)
        GROUP BY run_id, site, layer, head, kv_head
    ),
    scaled AS (
        SELECT *,
            importance / nullif(sqrt(sum(importance ** 2) OVER ({_HEADS}, layer)), 0) AS importance_ln,
            (importance - min(importance) OVER ({_HEADS}))
                / nullif(max(importance) OVER ({_HEADS}) - min(importance) OVER ({_HEADS}), 0) AS scaled_importance,
            (relative_entropy - min(relative_entropy) OVER ({_HEADS}))
                / nullif(max(relative_entropy) OVER ({_HEADS}) - min(relative_entropy) OVER ({_HEADS}), 0)
                AS scaled_entropy
        FROM heads
    )
    SELECT run_id, model, corpus, site, layer, head, kv_head, sequences, importance, importance_ln,
        {IMPORTANCE_WEIGHT} * scaled_importance + {1 - IMPORTANCE_WEIGHT} * (1 - scaled_entropy) AS importance_entropy,
        importance_std, mean_gate_gradient, relative_entropy
    FROM scaled JOIN runs USING (run_id)
"""

IMPORTANCE_VIEWS: dict[str, str] = {"importance_summary": IMPORTANCE_SUMMARY}

IMPORTANCE_VIEW_COMMENTS: dict[str, str] = {
    "importance_summary": "one row per head of an importance run; low importance marks heads to remove first"
}

IMPORTANCE_COLUMN_COMMENTS: dict[str, dict[str, str]] = {
    "importance_summary": {
        **{each.name: f"{each.formula} ({each.source})" for each in IMPORTANCES.values()},
        "importance_std": "standard deviation over sequences of |dL/dg|",
        "mean_gate_gradient": (
            "mean over sequences of dL/dg, with its sign: removing a head of negative mean raises the loss, to first"
            " order"
        ),
        "relative_entropy": "mean over sequences of entropy / ln N, 0 to 1",
    }
}
