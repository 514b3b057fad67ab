"""Views of a store, generated from the catalogue.

``head_scores``: the scores of each sequence; ``head_summary``: one row per head; ``head_profiles``: one row per head
and bin of a profile; ``positional_heads``: heads that attend to one offset; ``behaviour_summary``: one row per head of
a probe. The views of importance runs are in ``importance_views``, those of the effects of heads in ``effect_tables``,
those of roles in ``role_views``, those of evaluations in ``arm_views``.

Views that summarise runs contain finished runs only. The prefix ``all_`` names the same view of all runs, for code that
reads a given run. No view averages over the sites of a layer. Layer- and head-normalised scores are ratios within one
sequence, so means over sequences are computed from ``head_scores``: a mean of ratios is not a ratio of means.
"""

from __future__ import annotations

from headscan.analysis.role_definitions import ROLES
from headscan.analysis.schema.arm_views import ARM_COLUMN_COMMENTS, ARM_VIEW_COMMENTS, ARM_VIEWS
from headscan.analysis.schema.comparison_macros import comparison_statements
from headscan.analysis.schema.ddl import literal
from headscan.analysis.schema.effect_tables import (
    EFFECT_COLUMN_COMMENTS,
    EFFECT_VIEW_COMMENTS,
    EFFECT_VIEWS,
)
from headscan.analysis.schema.importance_views import (
    IMPORTANCE_COLUMN_COMMENTS,
    IMPORTANCE_VIEW_COMMENTS,
    IMPORTANCE_VIEWS,
)
from headscan.analysis.schema.macros import macro_statements
from headscan.analysis.schema.role_views import ROLE_COLUMN_COMMENTS, ROLE_VIEW_COMMENTS, ROLE_VIEWS
from headscan.analysis.verdict_limits import INACTIVE_QUANTILE
from headscan.catalog import BEHAVIOURS, PROFILES, SCORES, STATISTICS, Profile, Score

#: Statistics that are not scores of the same name: they are summarised, but have no direction.
PLAIN_STATISTICS: tuple[str, ...] = tuple(name for name in STATISTICS if name not in SCORES)

#: Scores and statistics of which ``head_summary`` has the mean.
SUMMARISED: tuple[str, ...] = (*SCORES, *PLAIN_STATISTICS)

#: Least share of queries whose largest weight is at one offset in a positional head.
POSITIONAL_SHARE = ROLES["positional"].threshold

_KEYS = "run_id, sequence, site, layer, head, kv_head"


def pool_quantile(score: Score, quantile: float) -> float:
    """Return the quantile with a share ``quantile`` (0 to 1) on the inactive side."""
    return quantile if score.inactive == "low" else 1.0 - quantile


def _score_sql(score: Score) -> str:
    """Return SQL for one score; NULL if its denominator is zero."""
    if score.normaliser is None:
        return score.statistic
    own = score.over == "head"
    denominator = score.normaliser if own else f"avg({score.normaliser}) OVER layer_heads"
    # Computed as DOUBLE, because REAL / REAL would round the ratio.
    return f"{score.statistic}::DOUBLE / nullif({denominator}, 0) AS {score.name}"


def _scores_sql(statistics: tuple[str, ...] = ()) -> str:
    columns = [*(_score_sql(score) for score in SCORES.values()), *statistics]
    return (
        f"SELECT {_KEYS}, {', '.join(columns)} FROM head_statistics"
        " WINDOW layer_heads AS (PARTITION BY run_id, sequence, site, layer)"
    )


def _head_summary_sql() -> str:
    pool = [
        f"quantile_cont({s.name}, {pool_quantile(s, INACTIVE_QUANTILE)}) AS {s.name}_limit" for s in SCORES.values()
    ]
    groups = [f"avg({n}) AS {n}, stddev_samp({n}) AS {n}_std" for n in SUMMARISED]
    # One list of quantiles per column, because three separate quantiles would keep three copies of the values.
    groups += [f"quantile_cont({n}, [0.1, 0.5, 0.9]) AS {n}_quantiles" for n in SUMMARISED]
    groups += [
        f"count_if({s.name} {'<' if s.inactive == 'low' else '>'} {s.name}_limit) / nullif(count({s.name}), 0)"
        f" AS {s.name}_inactive"
        for s in SCORES.values()
    ]
    spread = [
        f"{n}_std, {n}_quantiles[1] AS {n}_p10, {n}_quantiles[2] AS {n}_median, {n}_quantiles[3] AS {n}_p90"
        for n in SUMMARISED
    ]
    inactive = [f"{s}_inactive" for s in SCORES]
    return f"""
        WITH measured AS NOT MATERIALIZED ({_scores_sql(PLAIN_STATISTICS)}),
        pool AS (SELECT run_id, site, {", ".join(pool)} FROM measured GROUP BY run_id, site),
        heads AS (
            SELECT run_id, site, layer, head, kv_head, count(*) AS sequences, {", ".join(groups)}
            FROM measured JOIN pool USING (run_id, site) GROUP BY run_id, site, layer, head, kv_head
        )
        SELECT run_id, model, corpus, site, layer, head, kv_head, sequences,
            {", ".join((*SUMMARISED, *spread, *inactive))}
        FROM heads JOIN runs USING (run_id)
    """


def _profile_sql(profile: Profile) -> str:
    """Return SQL for one row per head and bin of a profile.

    Each profile has its own branch of the view, so that a query for one profile reads one column.
    """
    means = ", ".join(f"avg({profile.name}[{i}])" for i in range(1, len(profile.bins) + 1))
    return f"""
        SELECT run_id, site, layer, head, kv_head, {literal(profile.name)} AS profile,
            unnest(range({len(profile.bins)}))::SMALLINT AS bin,
            unnest([{", ".join(map(literal, profile.bins))}]) AS label,
            unnest(means) AS share
        FROM (
            SELECT run_id, site, layer, head, kv_head, [{means}] AS means FROM head_statistics
            WHERE {profile.name} IS NOT NULL GROUP BY run_id, site, layer, head, kv_head
        )
    """


# The labels of the open bins at both ends are not numbers. The cast to REAL, the stored type, lets exactly 0.9 pass.
_POSITIONAL_HEADS = f"""
    SELECT run_id, site, layer, head, kv_head, try_cast(label AS SMALLINT) AS key_offset, share
    FROM all_head_profiles
    WHERE profile = 'argmax_offsets' AND try_cast(label AS SMALLINT) IS NOT NULL
        AND share::REAL >= {POSITIONAL_SHARE}::REAL
"""

_BEHAVIOUR_SUMMARY = f"""
    SELECT run_id, model, site, layer, head,
        {", ".join(f"max(value) FILTER (behaviour = {literal(name)}) AS {name}" for name in BEHAVIOURS)}
    FROM head_behaviours JOIN runs USING (run_id) GROUP BY ALL
"""

#: Views that summarise runs, over all runs: ``all_head_summary`` and so on.
_SUMMARIES: dict[str, str] = {
    "head_summary": _head_summary_sql(),
    "head_profiles": " UNION ALL ".join(map(_profile_sql, PROFILES.values())),
    "positional_heads": _POSITIONAL_HEADS,
    "behaviour_summary": _BEHAVIOUR_SUMMARY,
    **IMPORTANCE_VIEWS,
    **EFFECT_VIEWS,
    **ROLE_VIEWS,
    **ARM_VIEWS,
}

#: Prefix of the same view of all runs, including running, failed and stopped ones.
ALL_RUNS = "all_"

_FINISHED = "(SELECT run_id FROM runs WHERE status = 'finished')"

VIEWS: dict[str, str] = {
    "head_scores": _scores_sql(),
    **{ALL_RUNS + name: sql for name, sql in _SUMMARIES.items()},
    **{name: f"SELECT * FROM {ALL_RUNS}{name} WHERE run_id IN {_FINISHED}" for name in _SUMMARIES},
}

_SUMMARY_COMMENTS: dict[str, str] = {
    "head_summary": (
        "one row per head of a run: means of the scores and statistics over sequences; _std, _p10, _median and _p90;"
        f" _inactive: share of sequences in which the head is beyond the {INACTIVE_QUANTILE:.0%} quantile of all heads"
        " and sequences of the run at the same site"
    ),
    "head_profiles": (
        "one row per head of a run and bin of a profile: index of the bin from 0, its label, and its share, mean over"
        " sequences"
    ),
    "positional_heads": (
        f"heads whose largest weight is at one offset for at least {POSITIONAL_SHARE:.0%} of queries, mean over"
        " sequences (arXiv 1905.09418); key_offset is the key's position minus the query's"
    ),
    "behaviour_summary": "one row per head of a probe: strength of each behaviour, 0 to 1; NULL if not probed",
    **IMPORTANCE_VIEW_COMMENTS,
    **EFFECT_VIEW_COMMENTS,
    **ROLE_VIEW_COMMENTS,
    **ARM_VIEW_COMMENTS,
}

VIEW_COMMENTS: dict[str, str] = {
    "head_scores": "one row per sequence, site, layer and query head, of all runs: the scores, not averaged",
    **{name: f"{text}; of finished runs, {ALL_RUNS}{name} of all runs" for name, text in _SUMMARY_COMMENTS.items()},
    **{ALL_RUNS + name: f"{text}; of all runs" for name, text in _SUMMARY_COMMENTS.items()},
}


def _column_comments() -> dict[str, dict[str, str]]:
    """Return the column comments of each view."""
    scores = {s.name: f"{s.formula} ({s.paper_name}); inactive when {s.inactive}" for s in SCORES.values()}
    statistics = {name: f"{STATISTICS[name].formula} [{STATISTICS[name].unit}]" for name in PLAIN_STATISTICS}
    summaries = {
        "head_summary": {name: f"{text}; mean over sequences" for name, text in (scores | statistics).items()},
        "behaviour_summary": {b.name: f"{b.formula} ({b.source})" for b in BEHAVIOURS.values()},
        **IMPORTANCE_COLUMN_COMMENTS,
        **EFFECT_COLUMN_COMMENTS,
        **ROLE_COLUMN_COMMENTS,
        **ARM_COLUMN_COMMENTS,
    }
    return {"head_scores": scores, **summaries, **{ALL_RUNS + view: columns for view, columns in summaries.items()}}


def view_statements() -> list[str]:
    """Return the statements that create macros and views, in order.

    The tables must exist.
    """
    return [
        *macro_statements(),
        *(f"CREATE VIEW {name} AS {sql}" for name, sql in VIEWS.items()),
        *(f"COMMENT ON VIEW {name} IS {literal(text)}" for name, text in VIEW_COMMENTS.items()),
        *(
            f"COMMENT ON COLUMN {view}.{column} IS {literal(text)}"
            for view, columns in _column_comments().items()
            for column, text in columns.items()
        ),
        *comparison_statements(),
    ]
