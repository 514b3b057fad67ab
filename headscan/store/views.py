"""Views of a store, generated from the catalogue.

``head_scores``: the scores of each sequence; ``head_summary``: one row per head; ``head_profiles``: one row per head
and bin of a profile; ``positional_heads``: heads that attend to one offset; ``behaviour_summary``: one row per head
of a probe. Importance runs and roles have views of one row per head. The views of effects are in `tables`,
those of evaluations in ``arm_views``.

Views that summarise runs contain finished runs only. The prefix ``all_`` names the same view of all runs, for code
that reads a given run. No view averages over the sites of a layer. Layer- and head-normalised scores are ratios
within one sequence, so means over sequences are computed from ``head_scores``: a mean of ratios is not a ratio of
means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from headscan.catalog import (
    BEHAVIOURS,
    IMPORTANCES,
    PROFILES,
    PROMPT_IMPORTANCE,
    SCORES,
    STATISTICS,
    Importance,
    Profile,
    Score,
    Term,
    TermMean,
    TermScale,
)
from headscan.store.arm_views import ARM_VIEWS
from headscan.store.macros import MACROS, TABLE_MACROS, macro_statements
from headscan.store.scan_tables import HEAD, INACTIVE_QUANTILE, LAYER, RUN, SITE, View, comment_statements, literal
from headscan.store.tables import ACCURACY, BLEU, EACH, FALSE_DISCOVERY_RATE, HEAD_EFFECTS, HIGHER_IS_BETTER, TABLES
from headscan.store.verdict_limits import MARGIN
from headscan.text_tables import percent

#: Thresholds without a paper.
OWN = "headscan"

#: Weight above which a head attends mostly to one kind of key.
_MOSTLY = 0.5

_HARM = "upper end of the 95 % interval of the harm"
_SCALE = "the harm is the accuracy lost (0 to 1), the hundredth of the BLEU lost, or the loss added divided by the loss"


@dataclass(frozen=True)
class Role:
    """A role: a number of a query head, measured by runs of one kind, which ``comparison`` compares with a threshold in
    its unit. ``numbers`` is SQL for run_id, site, layer, head, value and key_offset. The sources are the papers that
    define the number and the threshold, or headscan. ``options`` are those of the verb ``measured_by`` that measure it.
    """

    name: str
    formula: str
    numbers: str
    measured_by: Literal["scan", "probe", "ablate"]
    comparison: Literal[">", ">=", "<"]
    threshold: float
    source: str
    threshold_source: str = OWN
    options: tuple[str, ...] = ()

    @property
    def reads_texts(self) -> bool:
        """The verb needs a corpus."""
        return self.measured_by != "probe"

    @property
    def rule(self) -> str:
        """Comparison and threshold, such as ``> 0.3``."""
        return f"{self.comparison} {self.threshold:g}"


_HEAD = "run_id, site, layer, head"

# Offsets of the open bins at both ends are not numbers.
_OFFSETS = f"""
    SELECT {_HEAD}, max(share) AS value, arg_max(key_offset, share) AS key_offset
    FROM (
        SELECT {_HEAD}, share, try_cast(label AS SMALLINT) AS key_offset
        FROM all_head_profiles WHERE profile = 'argmax_offsets'
    ) WHERE key_offset IS NOT NULL GROUP BY {_HEAD}
"""


_UNSUMMARISED_RUNS = "SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM head_summaries)"
#: The rows of runs whose summary is not stored: unfinished ones, and those that lack a new score. If there are none,
#: DuckDB reads no row.
_UNSUMMARISED = f"(SELECT * FROM head_statistics WHERE run_id IN ({_UNSUMMARISED_RUNS}))"

_KEYS = "run_id, sequence, site, layer, head, kv_head"


def pool_quantile(score: Score, quantile: float) -> float:
    """Return the quantile with a share ``quantile`` (0 to 1) on the inactive side."""
    return quantile if score.inactive == "low" else 1.0 - quantile


def _score_sql(score: Score) -> str:
    """Return SQL for one score; NULL if its denominator is zero."""
    if score.normaliser is None:
        return score.statistic if score.name == score.statistic else f"{score.statistic} AS {score.name}"
    own = score.over == "head"
    denominator = score.normaliser if own else f"avg({score.normaliser}) OVER layer_heads"
    # Computed as DOUBLE, because REAL / REAL would round the ratio.
    return f"{score.statistic}::DOUBLE / nullif({denominator}, 0) AS {score.name}"


def _scores_sql(statistics: tuple[str, ...] = (), source: str = "head_statistics") -> str:
    columns = [*(_score_sql(score) for score in SCORES.values()), *statistics]
    return (
        f"SELECT {_KEYS}, {', '.join(columns)} FROM {source}"
        " WINDOW layer_heads AS (PARTITION BY run_id, sequence, site, layer)"
    )


# Not from head_scores, which computes its window over all runs before a subquery selects some.
_UNSUMMARISED_SCORES = _scores_sql(source=_UNSUMMARISED)

# Not from all_head_summary, because reading that view three times takes long to plan.
_LOW_OUTPUT = f"""
    SELECT {_HEAD}, inactive AS value, NULL::SMALLINT AS key_offset
    FROM head_summaries WHERE measure = 'output_norm_ln'
    UNION ALL
    SELECT {_HEAD}, count_if(output_norm_ln < low) / nullif(count(output_norm_ln), 0), NULL
    FROM ({_UNSUMMARISED_SCORES}) JOIN (
        SELECT run_id, site, quantile_cont(output_norm_ln, {INACTIVE_QUANTILE}) AS low
        FROM ({_UNSUMMARISED_SCORES}) GROUP BY run_id, site
    ) USING (run_id, site) GROUP BY {_HEAD}
"""


def _scanned(statistic: str) -> str:
    return f"""
        SELECT {_HEAD}, mean AS value, NULL::SMALLINT AS key_offset
        FROM head_summaries WHERE measure = {literal(statistic)}
        UNION ALL
        SELECT {_HEAD}, avg({statistic}), NULL FROM {_UNSUMMARISED} GROUP BY {_HEAD}
    """


def _harm(replacement: str) -> str:
    return (
        f"SELECT {_HEAD}, CASE metric WHEN {literal(ACCURACY)} THEN -low WHEN 'bleu' THEN -low / 100"
        " ELSE high / nullif(baseline, 0) END AS value,"
        f" NULL::SMALLINT AS key_offset FROM head_effects"
        f" WHERE mode = {literal(EACH)} AND replacement = {literal(replacement)}"
    )


def _behaviour(role: str, behaviour: str) -> Role:
    declared = BEHAVIOURS[behaviour]
    limit, source = (_MOSTLY, OWN) if declared.threshold is None else (declared.threshold, declared.source)
    of_heads = f"SELECT {_HEAD}, value, NULL::SMALLINT AS key_offset FROM head_behaviours"
    numbers = f"{of_heads} WHERE behaviour = {literal(behaviour)}"
    return Role(role, behaviour, numbers, "probe", ">", limit, declared.source, source)


#: Options of a scan that computes the attention weights.
_WEIGHTS = ("--panel", "full")

ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            "positional",
            "largest share of queries whose largest weight is at one offset k - q; key_offset is the offset",
            _OFFSETS,
            "scan",
            ">=",
            0.9,
            "arXiv 1905.09418",
            "arXiv 1905.09418",
            _WEIGHTS,
        ),
        Role(
            "confident",
            "confidence",
            _scanned("confidence"),
            "scan",
            ">",
            _MOSTLY,
            "arXiv 1905.09418",
            options=_WEIGHTS,
        ),
        _behaviour("previous_token", "previous_token_score"),
        _behaviour("induction", "induction_score"),
        _behaviour("retrieval", "retrieval_score"),
        Role(
            "sink",
            "first_token_weight",
            _scanned("first_token_weight"),
            "scan",
            ">",
            0.3,
            "arXiv 2410.10781",
            "arXiv 2410.10781",
        ),
        Role(
            "low_output",
            "output_norm_ln_inactive: share of sequences in which output_norm_ln is among the lowest of the scan",
            _LOW_OUTPUT,
            "scan",
            ">",
            _MOSTLY,
            "arXiv 2504.03889",
        ),
        Role(
            "inactive",
            f"{_HARM} when zeros replace the head's output; {_SCALE}",
            _harm("zero"),
            "ablate",
            "<",
            MARGIN / 100,
            "arXiv 2504.03889",
            "arXiv 2504.03889 for accuracy, headscan for losses",
            ("--each",),
        ),
        Role(
            "constant",
            f"{_HARM} when its mean replaces the head's output; {_SCALE}",
            _harm("mean"),
            "ablate",
            "<",
            MARGIN / 100,
            OWN,
            options=("--each", "--replace", "mean"),
        ),
    )
}


def _role_rows(role: Role) -> str:
    """Return SQL for the rows of one role; the cast to REAL, as stored, lets a number equal the threshold."""
    return f"""
        SELECT {_HEAD}, {literal(role.name)} AS role, value::DOUBLE AS value, key_offset,
            value::REAL {role.comparison} {role.threshold}::REAL AS holds,
            {literal(role.comparison)} AS comparison, {role.threshold}::DOUBLE AS threshold,
            {literal(role.threshold_source)} AS source
        FROM ({role.numbers}) WHERE value IS NOT NULL
    """


_HEAD_ROLES = f"""
    SELECT run_id, model, site, layer, head, role, value, key_offset, comparison, threshold, holds, source
    FROM ({" UNION ALL ".join(_role_rows(role) for role in ROLES.values())}) JOIN runs USING (run_id)
"""

ROLE_VIEWS = {
    "head_roles": View(
        _HEAD_ROLES,
        "one row per head and role that a run measured: its number, the threshold, and the verdict (holds)",
        {
            **{column.name: column.comment for column in (RUN, SITE, LAYER, HEAD)},
            "model": "path of the model, or its name on the hub",
            "role": "; ".join(f"{role.name} ({role.measured_by}): {role.formula}" for role in ROLES.values()),
            "value": "the number of the role",
            "key_offset": "position of the key minus that of the query; NULL unless positional",
            "comparison": "comparison of the value with the threshold that gives the role",
            "threshold": "threshold of the role, in the unit of the value",
            "holds": "true if the head has the role",
            "source": "paper that defines the threshold, or headscan",
        },
    )
}


def importance_sql(sequences: str = "sequences", part: str = "run_id") -> str:
    """Return a query for the importances of every head: one row per ``part``, a column of ``sequences`` (a table or
    query) that divides the sequences of a run, and per site, layer and head. Recall prompts count in
    `PROMPT_IMPORTANCE` alone.
    """
    parts = "run_id, site" if part == "run_id" else f"run_id, {part}, site"
    of_site = f"PARTITION BY {parts}"
    of_texts = "FILTER (recall_task IS NULL)"
    scores = [_importance_sql(each, of_site) for each in IMPORTANCES.values()]
    others = [mean for mean in get_args(TermMean) if mean not in IMPORTANCES]
    return f"""
    WITH heads AS (
        SELECT {parts}, layer, head, kv_head, count(*) {of_texts} AS sequences,
            avg(token_gradient) {of_texts} AS importance,
            stddev_samp(token_gradient) {of_texts} AS importance_std,
            avg(abs(gate_gradient)) {of_texts} AS sequence_importance,
            stddev_samp(abs(gate_gradient)) {of_texts} AS sequence_importance_std,
            avg(gate_gradient) {of_texts} AS mean_gate_gradient,
            avg(entropy / nullif(ln(tokens), 0)) {of_texts} AS relative_entropy,
            avg(token_gradient) FILTER (recall_task IS NOT NULL) AS {PROMPT_IMPORTANCE}
        FROM head_importance JOIN {sequences} USING (run_id, sequence)
        GROUP BY {parts}, layer, head, kv_head
    )
    SELECT {parts}, layer, head, kv_head, sequences, {", ".join(scores)},
        importance_std, sequence_importance_std, mean_gate_gradient, {", ".join(others)}
    FROM heads
"""


def _scaled_sql(term: Term, of_site: str) -> str:
    """Return SQL for a term of an importance without its weight."""
    value, over = term.mean, f"OVER ({of_site})"

    def divided(numerator: str, divisor: str) -> str:
        """Return SQL for a quotient; zeros over zero stay zeros."""
        return f"{numerator} / coalesce(nullif({divisor}, 0), 1)"

    in_range = divided(f"({value} - min({value}) {over})", f"max({value}) {over} - min({value}) {over}")
    scales: dict[TermScale, str] = {
        "none": value,
        "norm": divided(value, f"sqrt(sum({value} ** 2) OVER ({of_site}, layer))"),
        "mean": divided(value, f"avg({value}) {over}"),
        "range": in_range,
        "1 - range": f"(1 - {in_range})",
    }
    return scales[term.scale]


def _importance_sql(importance: Importance, of_site: str) -> str:
    """Return SQL for an importance; NULL if one of its means was not measured."""
    terms = [
        f"{'' if term.weight == 1 else f'{term.weight} * '}{_scaled_sql(term, of_site)}" for term in importance.terms
    ]
    if importance.combined == "sum":
        return f"{' + '.join(terms)} AS {importance.name}"
    measured = " AND ".join(f"{term.mean} IS NOT NULL" for term in importance.terms)
    return f"CASE WHEN {measured} THEN greatest({', '.join(terms)}) END AS {importance.name}"


_EFFECT_SUMMARY = f"""
    SELECT run_id, model, corpus, mode, site, layer, head, kv_head, replacement, metric, baseline, effect,
        CASE WHEN metric IN ({", ".join(map(literal, HIGHER_IS_BETTER))}) THEN -effect ELSE effect END AS harm,
        standard_error, low, high, p_value, q_value, q_value <= {FALSE_DISCOVERY_RATE}
            AND (harm >= 0 OR metric IN ({", ".join(map(literal, HIGHER_IS_BETTER))}) OR coalesce(confirmed, false))
            AS significant, n, confirmed
    FROM head_effects JOIN runs USING (run_id)
"""

EFFECT_VIEWS = {
    "effect_summary": View(
        _EFFECT_SUMMARY,
        f"rows of head_effects with the direction of the effect; select one mode ({EACH} for single heads) and join"
        " with head_summary by site, layer and head",
        {
            **{column.name: column.comment for column in HEAD_EFFECTS.columns},
            "harm": f"positive if ablation makes the model worse: minus effect for {ACCURACY} and {BLEU}, effect for"
            " the others",
            "significant": f"true if q_value is at most {FALSE_DISCOVERY_RATE:g}; a loss that falls must also be"
            " confirmed, because a harm in few documents may be missing from the texts",
        },
    )
}


IMPORTANCE_SUMMARY = f"""
    SELECT run_id, model, corpus, heads.* EXCLUDE (run_id)
    FROM ({importance_sql()}) AS heads JOIN runs USING (run_id)
"""

IMPORTANCE_VIEWS = {
    "importance_summary": View(
        IMPORTANCE_SUMMARY,
        "one row per head of an importance run; low importance marks heads to remove first",
        {
            **{each.name: f"{each.formula} ({each.source})" for each in IMPORTANCES.values()},
            "importance_std": "standard deviation over sequences of the sum over tokens of |dL/dg of the token|",
            "sequence_importance_std": "standard deviation over sequences of |dL/dg|",
            "mean_gate_gradient": (
                "mean over sequences of dL/dg, with its sign: removing a head of negative mean raises the loss, to"
                " first order"
            ),
            "relative_entropy": "mean over sequences of entropy / ln N, 0 to 1",
            PROMPT_IMPORTANCE: "importance on recall prompts; NULL in a run without them",
        },
    )
}


#: Statistics that are not scores of the same name: they are summarised, but have no direction.
PLAIN_STATISTICS: tuple[str, ...] = tuple(name for name in STATISTICS if name not in SCORES)

#: Scores and statistics of which ``head_summary`` has the mean.
SUMMARISED: tuple[str, ...] = (*SCORES, *PLAIN_STATISTICS)

#: Least share of queries whose largest weight is at one offset in a positional head.
POSITIONAL_SHARE = ROLES["positional"].threshold


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
        WITH measured AS NOT MATERIALIZED ({_scores_sql(PLAIN_STATISTICS, _UNSUMMARISED)}),
        pool AS (SELECT run_id, site, {", ".join(pool)} FROM measured GROUP BY run_id, site),
        computed AS (
            SELECT run_id, site, layer, head, kv_head, count(*) AS sequences, {", ".join(groups)}
            FROM measured JOIN pool USING (run_id, site) GROUP BY run_id, site, layer, head, kv_head
        ),
        heads AS (
            SELECT run_id, site, layer, head, kv_head, sequences, {", ".join((*SUMMARISED, *spread, *inactive))}
            FROM computed
            UNION ALL BY NAME ({_stored_summary_sql()})
        )
        SELECT run_id, model, corpus, heads.* EXCLUDE (run_id) FROM heads JOIN runs USING (run_id)
    """


def _stored_summary_sql() -> str:
    """Return SQL for the stored rows, one per head, with the types of the computed ones."""
    columns = ("mean", "std", "p10", "median", "p90", "inactive")
    # One aggregate per measure, because one per number takes five times as long.
    packed = ", ".join(f"{column} := {column}" for column in columns)
    values = [f"any_value(struct_pack({packed})) FILTER (measure = '{name}') AS {name}" for name in SUMMARISED]
    numbers = [f"{name}.mean AS {name}" for name in SUMMARISED]
    for name in SUMMARISED:
        kind = "DOUBLE" if name in SCORES and SCORES[name].normaliser is not None else "REAL"
        numbers.append(f"{name}.std AS {name}_std")
        numbers += [f"{name}.{column}::{kind} AS {name}_{column}" for column in ("p10", "median", "p90")]
    numbers += [f"{name}.inactive AS {name}_inactive" for name in SCORES]
    return f"""
        SELECT run_id, site, layer, head, kv_head, sequences, {", ".join(numbers)} FROM (
            SELECT run_id, site, layer, head, kv_head, max(sequences)::BIGINT AS sequences, {", ".join(values)}
            FROM head_summaries GROUP BY run_id, site, layer, head, kv_head
        )
    """


def profile_means_sql(profile: Profile, source: str) -> str:
    """Return SQL for the mean share of each bin of a profile, one row per head with a value in ``source``."""
    means = ", ".join(f"avg({profile.name}[{i}])" for i in range(1, len(profile.bins) + 1))
    return (
        f"SELECT run_id, site, layer, head, kv_head, count(*) AS measured, [{means}] AS shares FROM {source}"
        f" WHERE {profile.name} IS NOT NULL GROUP BY run_id, site, layer, head, kv_head"
    )


def _profile_sql(profile: Profile) -> str:
    """Return SQL for one row per head and bin of a profile; with a branch per profile, a query reads one column."""
    return f"""
        SELECT run_id, site, layer, head, kv_head, {literal(profile.name)} AS profile,
            unnest(range({len(profile.bins)}))::SMALLINT AS bin,
            unnest([{", ".join(map(literal, profile.bins))}]) AS label,
            unnest(shares) AS share
        FROM (
            SELECT run_id, site, layer, head, kv_head, shares FROM head_summaries
            WHERE measure = {literal(profile.name)}
            UNION ALL
            SELECT run_id, site, layer, head, kv_head, shares
            FROM ({profile_means_sql(profile, _UNSUMMARISED)})
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

_SCORE_COLUMNS = {s.name: f"{s.formula} ({s.paper_name}); inactive when {s.inactive}" for s in SCORES.values()}
_STATISTIC_COLUMNS = {name: f"{STATISTICS[name].formula} [{STATISTICS[name].unit}]" for name in PLAIN_STATISTICS}

#: Views that summarise runs, over all runs: ``all_head_summary`` and so on.
_SUMMARIES: dict[str, View] = {
    "head_summary": View(
        _head_summary_sql(),
        "one row per head of a run: means of the scores and statistics over sequences; _std, _p10, _median and _p90;"
        f" _inactive: share of sequences in which the head is beyond the {percent(INACTIVE_QUANTILE)} quantile of all"
        " heads and sequences of the run at the same site",
        {name: f"{text}; mean over sequences" for name, text in (_SCORE_COLUMNS | _STATISTIC_COLUMNS).items()},
    ),
    "head_profiles": View(
        " UNION ALL ".join(map(_profile_sql, PROFILES.values())),
        "one row per head of a run and bin of a profile: index of the bin from 0, its label, and its share, mean over"
        " sequences",
    ),
    "positional_heads": View(
        _POSITIONAL_HEADS,
        f"heads whose largest weight is at one offset for at least {percent(POSITIONAL_SHARE)} of queries, mean over"
        " sequences (arXiv 1905.09418); key_offset is the key's position minus the query's",
    ),
    "behaviour_summary": View(
        _BEHAVIOUR_SUMMARY,
        "one row per head of a probe: strength of each behaviour, 0 to 1; NULL if not probed",
        {b.name: f"{b.formula} ({b.source})" for b in BEHAVIOURS.values()},
    ),
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
    **{ALL_RUNS + name: view.query for name, view in _SUMMARIES.items()},
    **{name: f"SELECT * FROM {ALL_RUNS}{name} WHERE run_id IN {_FINISHED}" for name in _SUMMARIES},
}

VIEW_COMMENTS: dict[str, str] = {
    "head_scores": "one row per sequence, site, layer and query head, of all runs: the scores, not averaged",
    **{name: f"{view.comment}; of finished runs, {ALL_RUNS}{name} of all runs" for name, view in _SUMMARIES.items()},
    **{ALL_RUNS + name: f"{view.comment}; of all runs" for name, view in _SUMMARIES.items()},
}


_COLUMN_COMMENTS: dict[str, Mapping[str, str]] = {
    "head_scores": _SCORE_COLUMNS,
    **{prefix + name: view.columns for prefix in ("", ALL_RUNS) for name, view in _SUMMARIES.items()},
}


def view_statements() -> list[str]:
    """Return the statements that create macros, views and all comments, in order. The tables must exist."""
    return [
        *macro_statements(MACROS),
        *(f"CREATE VIEW {name} AS {sql}" for name, sql in VIEWS.items()),
        *(f"COMMENT ON VIEW {name} IS {literal(text)}" for name, text in VIEW_COMMENTS.items()),
        *(
            f"COMMENT ON COLUMN {view}.{column} IS {literal(text)}"
            for view, columns in _COLUMN_COMMENTS.items()
            for column, text in columns.items()
        ),
        *macro_statements(TABLE_MACROS),
        *(comment for table in TABLES.values() for comment in comment_statements(table)),
    ]
