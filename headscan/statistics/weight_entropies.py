"""Entropies of the attention weights.

Shapes: B sequences, N queries, H query heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscan.statistics.weight_statistic import (
    Findings,
    MeanOverQueries,
    QueryNumber,
    WeightBlock,
    WeightStatistic,
)

if TYPE_CHECKING:
    from headscan.attention.fused import FusedPass


class Entropy(MeanOverQueries):
    name = "entropy"
    continuable = True

    def of_block(self, block: WeightBlock) -> Tensor:
        # A masked key has weight 0 and log-weight -inf; their product would be NaN.
        weights = block.weights_BHRC
        return -(weights * block.log_weights_BHRC.masked_fill(weights == 0, 0.0)).sum(-1)

    def of_fused(self, fused: FusedPass) -> Tensor:
        return (fused.centred_lse_BHN - fused.mean_centred_score()).clamp_min(0.0)

    def with_learned_sink(self, values_BHN: Tensor, share_BHN: Tensor, log_share_BHN: Tensor) -> Tensor:
        # With r the share of the keys: -sum rA ln rA = r (-sum A ln A) - r ln r.
        return values_BHN * share_BHN - share_BHN * log_share_BHN


class RelativeEntropy(WeightStatistic):
    """Entropy divided by its maximum, the ln of visible keys.

    Queries that see one key are left out.
    """

    name = "relative_entropy"
    undefined_for_one = True

    @property
    def query_numbers(self) -> tuple[QueryNumber, ...]:
        return (Entropy(),)

    def reduce(self, found: Findings) -> Tensor:
        entropy_BHN = found.per_query["entropy"]
        if found.geometry.causal:
            queries = found.geometry.queries
            bound = torch.arange(1, queries + 1, device=entropy_BHN.device, dtype=entropy_BHN.dtype).log()
            bound[:1] = 1.0
            return found.mean(entropy_BHN / bound, skip_first=True)
        bound = found.request.key_lengths.to(entropy_BHN.dtype).log()[:, None, None]
        return found.mean(entropy_BHN / bound)


ENTROPIES: tuple[WeightStatistic, ...] = (Entropy(), RelativeEntropy())
