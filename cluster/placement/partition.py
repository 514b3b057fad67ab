"""Split a list of layers into contiguous, even ranges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from headscan.cluster.placement.placement_base import LayerRange


def fewest_ranges(weights: Sequence[int], limit: int) -> int | None:
    """Return the smallest number of ranges of at most ``limit`` each. None means that one weight exceeds it."""
    if max(weights) > limit:
        return None
    ranges, filled = 1, 0
    for weight in weights:
        if filled + weight > limit:
            ranges, filled = ranges + 1, 0
        filled += weight
    return ranges


def smallest_largest(weights: Sequence[int], parts: int) -> int:
    """Return the smallest possible size of the largest of ``parts`` ranges."""
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
    """Split weights into ranges with the smallest possible maximum. Otherwise the ranges are as even as possible.

    Args:
        weights: Bytes of each layer.
        parts: Number of ranges, at most one per layer.
    """
    limit, sums = smallest_largest(weights, parts), [0, *accumulate(weights)]
    # Keyed by the end layer: the smallest sum of squared range sizes so far, and the ends of its ranges.
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
