"""Curves of criteria: points of the same criterion over the share of removed heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence, Set
from typing import Protocol, TypeVar


class Choice(Protocol):
    """The heads that a criterion removes at one share, 0 to 1; the points of a curve have the same ``curve``."""

    @property
    def curve(self) -> tuple[str, str]: ...

    @property
    def share(self) -> float: ...

    @property
    def heads(self) -> Set[Hashable]: ...


C = TypeVar("C", bound=Choice)


def by_curve(points: Sequence[C]) -> dict[tuple[str, str], list[C]]:
    """Return the points by criterion and selection, each by growing share."""
    found: dict[tuple[str, str], list[C]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.share):
        found[point.curve].append(point)
    return dict(found)
