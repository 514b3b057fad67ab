"""SQL functions of a store: scopes of tasks, measures of curves, and comparisons of scores.

A curve is two lists of one length: shares of ablated heads in any order, and the accuracy at each. It is linear
between its points. If several points have one share, the worst counts. Points with NULL are ignored; without points
the result is NULL. A comparison of scores within a run or between two runs reads a run in one pass, because a store
has tens of millions of scores.

``list_transform([x], lambda name: ...)[1]`` names ``x``: a macro has no other way to use a value twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from headscan.catalog import SCORES, Score
from headscan.store.scan_tables import literal
from headscan.store.tables import ALL_TASKS


class Macro(NamedTuple):
    """An SQL function; ``signature`` is its name with parameters, ``sql`` an expression or the query of its rows."""

    signature: str
    sql: str
    comment: str
    returns_rows: bool = False

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


_TASK_SCOPES = Macro(
    "task_scopes(task, recall)",
    f"CASE WHEN recall THEN list_distinct([task, split_part(task, '@', 1)]) ELSE [task, {literal(ALL_TASKS)}] END",
    f"scopes of a task: the task itself, and {ALL_TASKS} or, for a recall task (needle@512), its family (needle)",
)

_CURVE_POINTS = Macro(
    "curve_points(shares, accuracies)",
    """
    list_transform(
        [list_sort(list_filter(
            list_transform(list_zip(shares, accuracies), lambda pair: {'share': pair[1], 'accuracy': pair[2]}),
            lambda point: point.share IS NOT NULL AND point.accuracy IS NOT NULL
        ))],
        lambda points: list_filter(points, lambda point, i: i = 1 OR point.share > points[i - 1].share)
    )[1]
    """,
    "points of a curve by ascending share; of several points at one share, the worst",
)

# The line from the last point at or above the level to the next point crosses the level.
_LAST_CROSSING = Macro(
    "last_crossing(shares, accuracies, level)",
    """
    list_transform(
        [curve_points(shares, accuracies)],
        lambda points: list_max(list_transform(range(1, len(points) + 1), lambda i: CASE
            WHEN points[i].accuracy < level THEN 0.0
            WHEN i = len(points) OR points[i + 1].accuracy >= level THEN points[i].share
            ELSE points[i].share + (points[i + 1].share - points[i].share)
                * (points[i].accuracy - level) / (points[i].accuracy - points[i + 1].accuracy)
        END))
    )[1]
    """,
    "largest share at which a curve is at or above the level: where it last falls below, its last share if it ends"
    " above, 0 if it never reaches the level (arXiv 2504.03889: % of heads within one point)",
)

_CURVE_AREA = Macro(
    "curve_area(shares, accuracies, upto)",
    """
    list_transform(
        [curve_points(shares, accuracies)],
        lambda points: CASE WHEN points[-1].share >= upto THEN list_sum(list_transform(
            list_filter(range(1, len(points)), lambda i: points[i].share < upto),
            lambda i: (least(points[i + 1].share, upto) - points[i].share) * (
                points[i].accuracy + (points[i + 1].accuracy - points[i].accuracy) / 2
                    * (least(points[i + 1].share, upto) - points[i].share) / (points[i + 1].share - points[i].share)
            )
        )) / nullif(upto - points[1].share, 0) END
    )[1]
    """,
    "mean of a curve from its first share to upto, by the trapezoidal rule; NULL if it ends before",
)

MACROS: tuple[Macro, ...] = (_TASK_SCOPES, _CURVE_POINTS, _LAST_CROSSING, _CURVE_AREA)


_table_macro = partial(Macro, returns_rows=True)


def _limit(score: Score) -> str:
    # The cast keeps the quantile unrounded, as in `selection.threshold`.
    level = "quantile" if score.inactive == "low" else "1 - quantile"
    return f"quantile_cont({score.name}::DOUBLE, {level}) AS {score.name}"


def _picked_bit(bit: int, score: Score) -> str:
    beyond = "<" if score.inactive == "low" else ">"
    return f"CASE WHEN measured.{score.name} {beyond} limits.{score.name} THEN {1 << bit} ELSE 0 END"


#: One bit per score marks the heads that it picks, so one count per bit pattern gives the overlap of every pair.
_OVERLAPS_OF_PATTERNS = f"""
    scores AS (SELECT unnest([{", ".join(map(literal, SCORES))}]) AS score, unnest(range({len(SCORES)})) AS bit),
    pairs AS (
        SELECT a.score AS score_a, b.score AS score_b, a.bit AS bit_a, b.bit AS bit_b,
            coalesce(sum(cells) FILTER (bits & (1 << a.bit) > 0), 0)::BIGINT AS picked_a,
            coalesce(sum(cells) FILTER (bits & (1 << b.bit) > 0), 0)::BIGINT AS picked_b,
            coalesce(sum(cells) FILTER (bits & (1 << a.bit) > 0 AND bits & (1 << b.bit) > 0), 0)::BIGINT AS both
        FROM scores a JOIN scores b ON a.bit < b.bit CROSS JOIN patterns
        GROUP BY ALL
    )
    SELECT score_a, score_b, picked_a, picked_b, "both", "both" / (picked_a + picked_b - "both") AS overlap
    FROM pairs WHERE picked_a > 0 AND picked_b > 0
    ORDER BY bit_a, bit_b
"""

_OVERLAP_COLUMNS = (
    "score_a, score_b; picked_a, picked_b: number of heads that each picks; both: number that both pick; overlap:"
    " both / (picked_a + picked_b - both), 0 to 1. Scores that pick nothing, or were not measured, have no rows"
)

_SCORE_OVERLAP = _table_macro(
    "score_overlap(run, quantile, at_site := 'self')",
    f"""
    WITH limits AS (
        SELECT {", ".join(map(_limit, SCORES.values()))} FROM head_scores WHERE run_id = run AND site = at_site
    ),
    patterns AS (
        SELECT {" + ".join(_picked_bit(bit, score) for bit, score in enumerate(SCORES.values()))} AS bits,
            count(*) AS cells
        FROM head_scores AS measured CROSS JOIN limits WHERE run_id = run AND site = at_site
        GROUP BY bits
    ),
    {_OVERLAPS_OF_PATTERNS}
    """,
    "overlap of the rules of each pair of scores: a rule picks the heads of a sequence beyond the quantile (0 to 1) of"
    f" all heads and sequences of the run, on the score's inactive side. Columns: {_OVERLAP_COLUMNS}",
)


def _inactivity(score: Score) -> str:
    """Return SQL for the mean score, negated if high is inactive."""
    return f"{'-' if score.inactive == 'high' else ''}avg({score.name})"


_MASK_OVERLAP = _table_macro(
    "mask_overlap(run, share, at_site := 'self')",
    f"""
    WITH means AS (
        SELECT layer, head, unnest(range({len(SCORES)})) AS bit,
            unnest([{", ".join(map(_inactivity, SCORES.values()))}]) AS inactivity
        FROM head_scores WHERE run_id = run AND site = at_site GROUP BY layer, head
    ),
    ranked AS (
        SELECT *, row_number() OVER (PARTITION BY bit ORDER BY inactivity NULLS LAST, layer, head) AS place,
            count(*) OVER (PARTITION BY bit) AS heads
        FROM means
    ),
    patterns AS (
        SELECT layer, head, sum(1 << bit)::BIGINT AS bits, 1 AS cells
        FROM ranked WHERE inactivity IS NOT NULL AND place <= greatest(1, floor(share * heads + 0.5))
        GROUP BY layer, head
    ),
    {_OVERLAPS_OF_PATTERNS}
    """,
    "overlap of the masks of each pair of scores: a mask has a share (0 to 1) of all heads, the most inactive ones by"
    f" their mean. Columns: {_OVERLAP_COLUMNS}",
)


def _distance(by: str = "") -> str:
    """Return SQL for the Wasserstein-1 distance of one score between two runs, by layer if ``by`` is ``layer``.

    The distance is the area between the two cumulative distributions. Both are constant between neighbouring values, so
    the area is a sum over the sorted values of both. Each value of A counts with the size of B and vice versa: these
    are integers, which doubles hold exactly.
    """
    key, joined, grouped = (f"{by}, ", f"USING ({by})", f"GROUP BY {by}") if by else ("", "ON true", "")
    return f"""
    WITH pool AS (
        SELECT * FROM (
            SELECT {key}true AS in_a, COLUMNS(lambda name: name = of_score)::DOUBLE AS value
            FROM head_scores WHERE run_id = run_a AND site = at_site
            UNION ALL
            SELECT {key}false AS in_a, COLUMNS(lambda name: name = of_score)::DOUBLE AS value
            FROM head_scores WHERE run_id = run_b AND site = at_site
        ) WHERE value IS NOT NULL
    ),
    sizes AS (
        SELECT {key}count(*) FILTER (in_a) AS values_a, count(*) FILTER (NOT in_a) AS values_b,
            avg(value) FILTER (in_a) AS mean_a, avg(value) FILTER (NOT in_a) AS mean_b,
            sqrt((var_pop(value) FILTER (in_a) * values_a + var_pop(value) FILTER (NOT in_a) * values_b)
                / nullif(values_a + values_b - 2, 0)) AS pooled_std
        FROM pool {grouped} HAVING values_a > 0 AND values_b > 0
    ),
    steps AS (
        SELECT {key}lead(value) OVER sorted - value AS width,
            sum(CASE WHEN in_a THEN values_b ELSE -values_a END::DOUBLE) OVER (sorted ROWS UNBOUNDED PRECEDING) AS apart
        FROM pool JOIN sizes {joined} WINDOW sorted AS ({f"PARTITION BY {by} " if by else ""}ORDER BY value)
    ),
    areas AS (SELECT {key}sum(width * abs(apart)) AS area FROM steps {grouped})
    SELECT of_score AS score, {key}area / (values_a * values_b) AS distance,
        distance / nullif(pooled_std, 0) AS relative_distance, mean_a, mean_b, pooled_std, values_a, values_b
    FROM areas JOIN sizes {joined}
    """


_DISTANCE_COLUMNS = (
    "distance, in the score's unit; relative_distance: distance divided by pooled_std; mean_a, mean_b; pooled_std:"
    " square root of the mean of both variances, weighted by degrees of freedom; values_a, values_b: number of compared"
    " values"
)

_ONE_SCORE_DISTANCE = _table_macro(
    "one_score_distance(run_a, run_b, of_score, at_site := 'self')",
    _distance(),
    "score_distance of one score, for large runs, in which sorting all scores takes long",
)

_ONE_LAYER_DISTANCE = _table_macro(
    "one_layer_distance(run_a, run_b, of_score, at_site := 'self')",
    f"{_distance('layer')} ORDER BY layer",
    "layer_distance of one score",
)


def _of_every_score(macro: Macro) -> str:
    calls = (f"FROM {macro.name}(run_a, run_b, {literal(score)}, at_site := at_site)" for score in SCORES)
    return " UNION ALL ".join(f"({call})" for call in calls)


_SCORE_DISTANCE = _table_macro(
    "score_distance(run_a, run_b, at_site := 'self')",
    _of_every_score(_ONE_SCORE_DISTANCE),
    "exact Wasserstein-1 distance of each score between the (sequence, layer, head) values of two runs; scores that"
    f" a run did not measure have no rows. Columns: score; {_DISTANCE_COLUMNS}",
)

_LAYER_DISTANCE = _table_macro(
    "layer_distance(run_a, run_b, at_site := 'self')",
    _of_every_score(_ONE_LAYER_DISTANCE),
    f"score_distance of each layer that both runs have. Columns: score, layer; {_DISTANCE_COLUMNS}",
)

#: Macros that read views, in the order of their creation: each after the ones that it calls.
TABLE_MACROS: tuple[Macro, ...] = (
    _SCORE_OVERLAP,
    _MASK_OVERLAP,
    _ONE_SCORE_DISTANCE,
    _ONE_LAYER_DISTANCE,
    _SCORE_DISTANCE,
    _LAYER_DISTANCE,
)


def macro_statements(macros: Iterable[Macro]) -> Iterator[str]:
    """Yield CREATE MACRO and COMMENT ON statements, in order."""
    for macro in macros:
        yield f"CREATE MACRO {macro.signature} AS {'TABLE ' if macro.returns_rows else ''}{macro.sql}"
        kind = "MACRO TABLE" if macro.returns_rows else "MACRO"
        yield f"COMMENT ON {kind} {macro.name} IS {literal(macro.comment)}"
