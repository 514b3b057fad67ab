"""SQL functions of a store: scopes of tasks, and measures of curves.

A curve is two lists of one length: shares of ablated heads in any order, and the accuracy at each. It is linear between
its points. If several points have one share, the worst counts. Points with NULL are ignored; without points the result
is NULL.

``list_transform([x], lambda name: ...)[1]`` names ``x``: a macro has no other way to use a value twice.
"""

from __future__ import annotations

from typing import NamedTuple

from headscan.analysis.schema.arm_tables import ALL_TASKS
from headscan.analysis.schema.ddl import literal


class Macro(NamedTuple):
    """An SQL function.

    Attributes:
        signature: Name with parameters.
    """

    signature: str
    expression: str
    comment: str

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


def macro_statements() -> list[str]:
    """Return CREATE MACRO and COMMENT ON statements, in order."""
    return [
        statement
        for macro in MACROS
        for statement in (
            f"CREATE MACRO {macro.signature} AS {macro.expression}",
            f"COMMENT ON MACRO {macro.name} IS {literal(macro.comment)}",
        )
    ]
