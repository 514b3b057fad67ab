"""Table macros that compare scores: whether two of them pick the same heads, and how far a score moves between runs.

Each holds its numbers to one pass over a run at a time: a store has tens of millions of scores.
"""

from __future__ import annotations

from typing import NamedTuple

from headscan.analysis.schema.tables import literal
from headscan.catalog import SCORES, Score


class TableMacro(NamedTuple):
    """A function that gives rows: its name with parameters, its query, what it says."""

    signature: str
    query: str
    comment: str

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


def _limit(score: Score) -> str:
    # The quantile of doubles, as `selection.threshold` takes it: of REALs it would be rounded.
    level = "quantile" if score.inactive == "low" else "1 - quantile"
    return f"quantile_cont({score.name}::DOUBLE, {level}) AS {score.name}"


def _picked_bit(bit: int, score: Score) -> str:
    beyond = "<" if score.inactive == "low" else ">"
    return f"CASE WHEN measured.{score.name} {beyond} limits.{score.name} THEN {1 << bit} ELSE 0 END"


#: Which scores pick a head is a number of 15 bits, so that one count of the numbers holds the overlap of every pair.
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
    "score_a, score_b, picked_a, picked_b: how many each picks, both: how many both pick, overlap: both / (picked_a +"
    " picked_b - both), 0 to 1; scores that pick nothing, or were not measured, are left out"
)

_SCORE_OVERLAP = TableMacro(
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
    "per pair of scores, what their rules would ablate together: a score picks the heads of a sequence that lie beyond"
    f" the quantile (0 to 1) of the run's pool on its inactive side. Columns {_OVERLAP_COLUMNS}",
)


def _inactivity(score: Score) -> str:
    """The mean over sequences, turned so that the lowest is the most inactive."""
    return f"{'-' if score.inactive == 'high' else ''}avg({score.name})"


_MASK_OVERLAP = TableMacro(
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
    "per pair of scores, the heads that are in both of their masks: a score's mask holds a share (0 to 1) of all heads,"
    f" the most inactive by their mean. Columns {_OVERLAP_COLUMNS}",
)


def _distance(by: str = "") -> str:
    """Wasserstein-1 of one score, the area between the two cumulative distributions; ``by``: ``layer`` or nothing.

    Between two neighbouring values both distributions are flat, so the area is a sum over the sorted values of both.
    It runs over whole numbers, each value of A counting B's size and the other way round: doubles hold them exactly.
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
    "distance, in the score's unit; relative_distance: divided by pooled_std; mean_a, mean_b; pooled_std: square root"
    " of the two variances' mean, weighted by their degrees of freedom; values_a, values_b: how many were compared"
)

_ONE_SCORE_DISTANCE = TableMacro(
    "one_score_distance(run_a, run_b, of_score, at_site := 'self')",
    _distance(),
    "score_distance of one score: what large runs ask for, score after score, since every one has to be sorted",
)

_ONE_LAYER_DISTANCE = TableMacro(
    "one_layer_distance(run_a, run_b, of_score, at_site := 'self')",
    f"{_distance('layer')} ORDER BY layer",
    "layer_distance of one score",
)


def _of_every_score(macro: TableMacro) -> str:
    calls = (f"FROM {macro.name}(run_a, run_b, {literal(score)}, at_site := at_site)" for score in SCORES)
    return " UNION ALL ".join(f"({call})" for call in calls)


_SCORE_DISTANCE = TableMacro(
    "score_distance(run_a, run_b, at_site := 'self')",
    _of_every_score(_ONE_SCORE_DISTANCE),
    "per score, the Wasserstein-1 distance between two runs' pools of (sequence, layer, head), exact; scores that a run"
    f" did not measure are left out. Columns score, {_DISTANCE_COLUMNS}",
)

_LAYER_DISTANCE = TableMacro(
    "layer_distance(run_a, run_b, at_site := 'self')",
    _of_every_score(_ONE_LAYER_DISTANCE),
    "score_distance of each layer on its own, layer by layer as far as both runs have them. Columns score, layer,"
    f" {_DISTANCE_COLUMNS}",
)

#: Those that call another one after it.
TABLE_MACROS: dict[str, TableMacro] = {
    macro.name: macro
    for macro in (
        _SCORE_OVERLAP,
        _MASK_OVERLAP,
        _ONE_SCORE_DISTANCE,
        _ONE_LAYER_DISTANCE,
        _SCORE_DISTANCE,
        _LAYER_DISTANCE,
    )
}


def comparison_statements() -> list[str]:
    """Every statement that makes the macros; the views must exist."""
    return [
        statement
        for macro in TABLE_MACROS.values()
        for statement in (
            f"CREATE MACRO {macro.signature} AS TABLE {macro.query}",
            f"COMMENT ON MACRO TABLE {macro.name} IS {literal(macro.comment)}",
        )
    ]
