"""Agreement of criteria on the heads to remove."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import kendalltau

from headscan.analysis.effects.criterion_points import Choice, by_curve


@dataclass(frozen=True)
class Agreement:
    """Agreement of two curves.

    Attributes:
        site: Kind of attention.
        first, second: Criterion and selection of each.
        tau: Kendall's tau-b of the shares at which heads go, -1 to 1; NaN if a curve removes all or no heads at once.
        overlap: By common share, the part of the heads of the smaller set that both remove, 0 to 1.
    """

    site: str
    first: tuple[str, str]
    second: tuple[str, str]
    tau: float
    overlap: dict[float, float]


def agreements(points: Sequence[Choice], heads: Sequence[Hashable], site: str = "self") -> list[Agreement]:
    """Return the agreement of every pair of curves.

    Args:
        heads: All heads of the site. A head has the rank of the smallest tested share that removes it, so heads of one
            step are ties.
        site: Kind of attention that all points remove.
    """
    curves = by_curve(points)
    found = []
    for (first, ours), (second, theirs) in combinations(curves.items(), 2):
        tau = kendalltau([_rank(ours, head) for head in heads], [_rank(theirs, head) for head in heads]).statistic
        others = {point.share: point.heads for point in theirs}
        overlap = {
            point.share: len(point.heads & others[point.share]) / min(len(point.heads), len(others[point.share]))
            for point in ours
            if point.heads and others.get(point.share)
        }
        found.append(Agreement(site, first, second, float(tau), overlap))
    return found


def _rank(points: Sequence[Choice], head: Hashable) -> float:
    return min((point.share for point in points if head in point.heads), default=math.inf)
