"""Cutting a row of layers into contiguous ranges, the largest of them as small as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from headscan.cluster.placement.kinds import LayerRange


def fewest_ranges(weights: Sequence[int], limit: int) -> int | None:
    """Into how few ranges weights can be cut, none above a limit; None: one weight alone is above it."""
    if max(weights) > limit:
        return None
    ranges, filled = 1, 0
    for weight in weights:
        if filled + weight > limit:
            ranges, filled = ranges + 1, 0
        filled += weight
    return ranges


def smallest_largest(weights: Sequence[int], parts: int) -> int:
    """The least that the largest of ``parts`` ranges can weigh."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        ranges = fewest_ranges(weights, middle)
        if ranges is not None and ranges <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def balanced_ranges(weights: Sequence[int], parts: int) -> tuple[LayerRange, ...]:
    """Cut weights into ranges whose largest is as small as can be, and which differ as little as that allows.

    Args:
        weights: Bytes of each layer.
        parts: How many ranges, at most one a layer.
    """
    limit, sums = smallest_largest(weights, parts), [0, *accumulate(weights)]
    # For the first `end` layers in so many ranges: the sum of the ranges' squares, and where the ranges end.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for _ in range(parts):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, ends) in best.items():
            for end in range(start + 1, len(weights) + 1):
                size = sums[end] - sums[start]
                if size > limit:
                    break
                found = (squares + size**2, (*ends, end))
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return tuple(pairwise(best[len(weights)][1]))
