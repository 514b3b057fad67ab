"""Numbers per query and sums over queries from explicit weights.

They are exact for any mask, bias or learned sink.

Shapes: B sequences, R queries of a block, C keys that the block may see, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscan.attention.attention_request import AttentionRequest, Geometry
from headscan.statistics.registry import POSITIONAL, QUERY_NUMBERS, WEIGHT_STATISTICS, needed_numbers
from headscan.statistics.weight_statistic import Findings, QuerySum, WeightBlock


class WeightTally:
    """An accumulator of explicit weights, one block of queries at a time.

    Args:
        request: The statistics to measure.
        geometry: Numbers of queries and keys.
        normalised: The weights of a query sum to 1, because the call has no learned sink.
    """

    def __init__(self, request: AttentionRequest, geometry: Geometry, *, normalised: bool = False) -> None:
        self.request, self.geometry, self._normalised = request, geometry, normalised
        self._numbers: dict[str, list[Tensor]] = {number.name: [] for number in needed_numbers(request.statistics)}
        defined = request.statistics - POSITIONAL if geometry.cross else request.statistics
        self._to_sum: dict[str, QuerySum] = {
            of_queries.name: of_queries
            for name in defined & WEIGHT_STATISTICS.keys()
            for of_queries in WEIGHT_STATISTICS[name].query_sums
        }
        self._sums: dict[str, Tensor] = {}

    def add(self, weights_BHRC: Tensor, log_weights_BHRC: Tensor, first_query: int, first_key: int) -> None:
        """Add the weights of one block; blocks come in order.

        Its queries start at ``first_query`` and its keys at ``first_key``.
        """
        block = WeightBlock(weights_BHRC, log_weights_BHRC, first_query, first_key, self.request, self._normalised)
        for name, blocks in self._numbers.items():
            blocks.append(QUERY_NUMBERS[name].of_block(block))
        for name, of_queries in self._to_sum.items():
            if name not in self._sums:
                self._sums[name] = of_queries.zeros(block, self.geometry)
            of_queries.add(self._sums[name], block)

    def findings(self) -> Findings:
        """Return the numbers of all blocks."""
        per_query = {name: torch.cat(blocks, -1) for name, blocks in self._numbers.items()}
        return Findings(per_query, self._sums, self.request, self.geometry)
