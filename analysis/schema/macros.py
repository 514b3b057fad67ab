"""SQL functions of a store: the scopes a task counts in, and what is read off a curve of accuracy over ablated heads.

A curve is two lists of one length, shares of ablated heads in any order and the accuracy at each. Between its points
it is straight. Of several points at one share the worst counts; points with a NULL in them are left out; without points
the answer is NULL.

``list_transform([x], lambda name: ...)[1]`` gives ``x`` a name: a macro has no other way to say it once.
"""

from __future__ import annotations

from typing import NamedTuple

from headscan.analysis.schema.arm_tables import ALL_TASKS
from headscan.analysis.schema.ddl import literal


class Macro(NamedTuple):
    """An SQL function: its name with parameters, its expression, what it says."""

    signature: str
    expression: str
    comment: str

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


_TASK_SCOPES = Macro(
    "task_scopes(task, recall)",
    f"CASE WHEN recall THEN list_distinct([task, split_part(task, '@', 1)]) ELSE [task, {literal(ALL_TASKS)}] END",
    f"where a question of the task counts: in the task, and in {ALL_TASKS}, or for recall tasks (needle@512) in their"
    " family (needle)",
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
    "the points of a curve by growing share; of several at one share the worst",
)

# From the last point at or above the level on the line falls to the next one, if there is a next one.
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
    "the largest share at which a curve is at or above the level: where it last falls below, the last share where it"
    " ends above, 0 where it never reaches the level (arXiv 2504.03889: % of heads within one point)",
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
    "mean of a curve from its first share to upto, by trapezoids; NULL where it ends before",
)

MACROS: tuple[Macro, ...] = (_TASK_SCOPES, _CURVE_POINTS, _LAST_CROSSING, _CURVE_AREA)


def macro_statements() -> list[str]:
    """CREATE MACRO and COMMENT ON statements, in order."""
    return [
        statement
        for macro in MACROS
        for statement in (
            f"CREATE MACRO {macro.signature} AS {macro.expression}",
            f"COMMENT ON MACRO {macro.name} IS {literal(macro.comment)}",
        )
    ]
