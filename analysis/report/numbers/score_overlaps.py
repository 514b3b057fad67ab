"""Overlap of the (sequence, head) that scores pick as most inactive."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headscan.analysis.report.numbers.head_spread import Spread
from headscan.analysis.schema.views import INACTIVE_QUANTILE
from headscan.catalog import SCORES

#: Number of set bits of each byte.
_SET_BITS = np.array([byte.bit_count() for byte in range(256)])


class Picks:
    """The picks of scores, one bit per (sequence, head): a fraction of the memory of the scores."""

    def __init__(self) -> None:
        self._bits: dict[str, np.ndarray] = {}

    def add(self, name: str, values: np.ndarray, spread: Spread) -> None:
        """Add a score with its values (H, S); a statistic without a direction is skipped."""
        score = SCORES.get(name)
        if score is None:
            return
        limit = spread.thresholds[INACTIVE_QUANTILE]
        picked = values < limit if score.inactive == "low" else values > limit
        if picked.any():
            self._bits[name] = np.packbits(picked)

    def overlaps(self) -> pa.Table:
        """Return all pairs of scores that pick anything, as the SQL macro ``score_overlap`` does."""
        names = [name for name in SCORES if name in self._bits]
        sizes = {name: _count(self._bits[name]) for name in names}
        rows = []
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                both = _count(self._bits[a] & self._bits[b])
                overlap = both / (sizes[a] + sizes[b] - both)
                rows.append(
                    {"score_a": a, "score_b": b, "picked_a": sizes[a], "picked_b": sizes[b]}
                    | {"both": both, "overlap": overlap}
                )
        return pa.Table.from_pylist(rows)


def _count(bits: np.ndarray) -> int:
    return int(_SET_BITS[bits].sum())
