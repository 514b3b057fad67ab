"""Profiles of the attention weights, and statistics of received weight.

Shapes: B sequences, N queries, S keys, R queries and C keys of a block, H query heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.catalog import DISTANCE_BINS, MAX_OFFSET
from headscan.models.forward_inputs import real_tokens
from headscan.statistics.weight_statistic import (
    Findings,
    QueryNumber,
    QuerySum,
    WeightBlock,
    WeightStatistic,
)

if TYPE_CHECKING:
    from headscan.attention.attention_request import Geometry


class Received(QuerySum):
    """The weight that each key receives from the real queries: (B, H, S)."""

    name = "received"

    def zeros(self, block: WeightBlock, geometry: Geometry) -> Tensor:
        return block.weights_BHRC.new_zeros(*block.weights_BHRC.shape[:2], geometry.keys)

    def add(self, total: Tensor, block: WeightBlock) -> None:
        columns = block.weights_BHRC.shape[-1]
        total[..., block.first_key : block.first_key + columns] += block.real_weights_BHRC.sum(-2)


class WeightByDistance(QuerySum):
    """The weight by distance bin: (B, H, bins), float64.

    The bins double in width; only real queries count.
    """

    name = "weight_by_distance"

    def zeros(self, block: WeightBlock, geometry: Geometry) -> Tensor:
        return block.weights_BHRC.new_zeros(*block.weights_BHRC.shape[:2], DISTANCE_BINS, dtype=torch.float64)

    def add(self, total: Tensor, block: WeightBlock) -> None:
        by_offset = _sums_by_offset(block.real_weights_BHRC).double()
        last_key = block.first_key + block.weights_BHRC.shape[-1] - 1
        offset = torch.arange(by_offset.shape[-1], device=total.device) + (block.first_query - last_key)
        total.index_add_(-1, doubling_bin(offset.abs()), by_offset)


class ReceivedMax(WeightStatistic):
    name = "received_max"
    query_sums = (Received(),)

    def reduce(self, found: Findings) -> Tensor:
        return found.received_BHS.amax(-1)


class ReceivedConcentration(WeightStatistic):
    name = "received_concentration"
    undefined_for_one = True
    query_sums = (Received(),)

    def reduce(self, found: Findings) -> Tensor:
        share = found.received_BHS / found.received_BHS.sum(-1, keepdim=True)
        entropy = -torch.special.xlogy(share, share).sum(-1)
        concentration = 1.0 - entropy / found.request.key_lengths.log()[:, None]
        concentration[found.request.key_lengths < 2] = float("nan")  # 0 / 0: a single key receives everything
        return concentration


class ReceivedByPosition(WeightStatistic):
    name = "received_by_position"
    query_sums = (Received(),)

    def reduce(self, found: Findings) -> Tensor:
        bins = doubling_bin(torch.arange(found.received_BHS.shape[-1], device=found.received_BHS.device))
        # A GPU adds in no fixed order; float64 keeps the last float32 digits equal between runs.
        wide = found.received_BHS.double()
        return wide.new_zeros(*wide.shape[:2], DISTANCE_BINS).index_add_(-1, bins, wide)


class MassByDistance(WeightStatistic):
    name = "mass_by_distance"
    positional = True
    query_sums = (WeightByDistance(),)

    def reduce(self, found: Findings) -> Tensor:
        return found.sums["weight_by_distance"] / found.request.lengths[:, None, None]


class ArgmaxOffset(QueryNumber):
    """Position of the key with the largest weight, minus the query's.

    It is NaN where the weights are not finite.
    """

    name = "argmax_offset"
    fused = False

    def of_block(self, block: WeightBlock) -> Tensor:
        weights = block.weights_BHRC
        offset = (block.key_C[weights.argmax(-1)] - block.query_R1[:, 0]).to(weights.dtype)
        return torch.where(weights.sum(-1).isfinite(), offset, float("nan"))


class ArgmaxOffsets(WeightStatistic):
    name = "argmax_offsets"
    positional = True

    @property
    def query_numbers(self) -> tuple[QueryNumber, ...]:
        return (ArgmaxOffset(),)

    def reduce(self, found: Findings) -> Tensor:
        offsets_BHN, lengths = found.per_query["argmax_offset"], found.request.lengths
        real = real_tokens(lengths, offsets_BHN.shape[-1])[:, None].expand_as(offsets_BHN)
        bins = offsets_BHN.nan_to_num().clamp(-MAX_OFFSET - 1, MAX_OFFSET + 1).long() + MAX_OFFSET + 1
        counts = torch.zeros(*bins.shape[:2], 2 * MAX_OFFSET + 3, device=bins.device)
        shares = counts.scatter_add_(-1, bins, real.float()) / lengths[:, None, None]
        broken = (offsets_BHN.isnan() & real).any(-1, keepdim=True)
        return shares.masked_fill(broken, float("nan"))


def doubling_bin(distance: Tensor) -> Tensor:
    """Return the bin of each distance: 0, 1, 2-3, 4-7, ...

    The last bin is open.
    """
    # Comparing with powers of two is exact; on a GPU the base-2 logarithm of 8 is a little less than 3.
    lower_ends = 2 ** torch.arange(DISTANCE_BINS - 1, device=distance.device)
    return torch.bucketize(distance, lower_ends, right=True)


def _sums_by_offset(weights_BHRC: Tensor) -> Tensor:
    """Sum each diagonal: (B, H, R + C - 1).

    The order is from the first row's last column to the last row's first.

    Reading rows that are padded to length R + C as if their length were R + C - 1 shifts each by one place, so that
    diagonals become columns.
    """
    R, C = weights_BHRC.shape[-2:]
    longer = F.pad(weights_BHRC.flip(-1), (0, R)).flatten(-2)
    return longer[..., : R * (R + C - 1)].unflatten(-1, (R, R + C - 1)).sum(-2)


PROFILES_AND_RECEIVED: tuple[WeightStatistic, ...] = (
    ReceivedMax(),
    ReceivedConcentration(),
    ArgmaxOffsets(),
    MassByDistance(),
    ReceivedByPosition(),
)
