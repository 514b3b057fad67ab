"""The view of importance runs: one row per head."""

from __future__ import annotations

from headscan.catalog import IMPORTANCE_WEIGHT, IMPORTANCES


def importance_sql(sequences: str = "sequences", part: str = "run_id") -> str:
    """Return a query for the importances of every head: one row per part of the sequences, site, layer and head.

    Args:
        sequences: Table or query of the sequences.
        part: Column of ``sequences`` that divides the sequences of a run.
    """
    parts = "run_id, site" if part == "run_id" else f"run_id, {part}, site"
    of_site = f"PARTITION BY {parts}"
    return f"""
    WITH heads AS (
        SELECT {parts}, layer, head, kv_head, count(*) AS sequences,
            avg(token_gradient) AS importance,
            stddev_samp(token_gradient) AS importance_std,
            avg(abs(gate_gradient)) AS sequence_importance,
            stddev_samp(abs(gate_gradient)) AS sequence_importance_std,
            avg(gate_gradient) AS mean_gate_gradient,
            avg(entropy / nullif(ln(tokens), 0)) AS relative_entropy
        FROM head_importance JOIN {sequences} USING (run_id, sequence)
        GROUP BY {parts}, layer, head, kv_head
    ),
    scaled AS (
        SELECT *,
            importance / nullif(sqrt(sum(importance ** 2) OVER ({of_site}, layer)), 0) AS importance_ln,
            (importance - min(importance) OVER ({of_site}))
                / nullif(max(importance) OVER ({of_site}) - min(importance) OVER ({of_site}), 0) AS scaled_importance,
            (relative_entropy - min(relative_entropy) OVER ({of_site}))
                / nullif(max(relative_entropy) OVER ({of_site}) - min(relative_entropy) OVER ({of_site}), 0)
                AS scaled_entropy
        FROM heads
    )
    SELECT {parts}, layer, head, kv_head, sequences, importance, importance_ln,
        {IMPORTANCE_WEIGHT} * scaled_importance + {1 - IMPORTANCE_WEIGHT} * (1 - scaled_entropy) AS importance_entropy,
        importance_std, sequence_importance, sequence_importance_std, mean_gate_gradient, relative_entropy
    FROM scaled
"""


IMPORTANCE_SUMMARY = f"""
    SELECT run_id, model, corpus, heads.* EXCLUDE (run_id)
    FROM ({importance_sql()}) AS heads JOIN runs USING (run_id)
"""

IMPORTANCE_VIEWS: dict[str, str] = {"importance_summary": IMPORTANCE_SUMMARY}

IMPORTANCE_VIEW_COMMENTS: dict[str, str] = {
    "importance_summary": "one row per head of an importance run; low importance marks heads to remove first"
}

IMPORTANCE_COLUMN_COMMENTS: dict[str, dict[str, str]] = {
    "importance_summary": {
        **{each.name: f"{each.formula} ({each.source})" for each in IMPORTANCES.values()},
        "importance_std": "standard deviation over sequences of the sum over tokens of |dL/dg of the token|",
        "sequence_importance_std": "standard deviation over sequences of |dL/dg|",
        "mean_gate_gradient": (
            "mean over sequences of dL/dg, with its sign: removing a head of negative mean raises the loss, to first"
            " order"
        ),
        "relative_entropy": "mean over sequences of entropy / ln N, 0 to 1",
    }
}
