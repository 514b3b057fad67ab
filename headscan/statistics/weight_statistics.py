"""Statistics of attention weights: the request to a call, the base classes, and their implementations.

An attention call yields numbers per query (`QueryNumber`) and sums over queries (`QuerySum`). A `WeightStatistic`
names the numbers and sums that it needs, and reduces them to one value per sequence and head. The formulas are in
`headscan.catalog`.

Shapes: B sequences, N queries, S keys, R queries and C keys of a block, H query heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.catalog import DISTANCE_BINS, MAX_OFFSET, MassWidths
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.models.forward_inputs import TokenMeans, real_tokens

if TYPE_CHECKING:
    from headscan.attention.fused import FusedCall


#: How attention is computed while it is measured: ``auto`` takes fused kernels if they support the call.
AttentionPath = Literal["auto", "fused", "blockwise"]

#: How the statistic of a sequence follows from that of its first and that of its last tokens: it is one of the two, or
#: their mean, weighted by the numbers of tokens.
Joins = Literal["mean", "first", "last"]


@dataclass(frozen=True)
class Geometry:
    """Numbers of queries N and keys S of a call. Causal: no query sees a later key; cross: keys of another sequence,
    alone or behind the query's own.
    """

    queries: int
    keys: int
    causal: bool
    cross: bool


@dataclass(frozen=True)
class AttentionRequest:
    """The statistics to measure in one attention call.

    Attributes:
        lengths: Real queries of each sequence (B,).
        key_lengths: Real keys (B,); equal to ``lengths`` except in cross and merged attention.
        real_keys: Which keys are real, bool (B, S); None means the first ones.
        key_masks: The masks of `registry.KEY_MASKS` that the statistics read, bool (B, S) by name.
        past: Number of keys before the first query's own, from a KV cache. With a past only the statistics in
            `registry.CONTINUABLE` can be measured, over the queries of the call.
        shortest: The smallest of ``lengths``, which spares a mask on a GPU. None reads it from ``lengths`` if they are
            on the CPU.
    """

    statistics: frozenset[str]
    lengths: Tensor
    key_lengths: Tensor
    widths: MassWidths
    path: AttentionPath = "auto"
    key_masks: Mapping[str, Tensor] = field(default_factory=dict)
    past: int = 0
    shortest: int | None = None
    real_keys: Tensor | None = None

    def __post_init__(self) -> None:
        if self.path not in get_args(AttentionPath):
            paths = ", ".join(get_args(AttentionPath))
            raise InterventionError(f"unknown attention path {self.path!r}. Choose one of {paths}")

    @cached_property
    def over_queries(self) -> TokenMeans:
        return TokenMeans(self.lengths)

    @cached_property
    def over_keys(self) -> TokenMeans:
        return self.over_queries if self.key_lengths is self.lengths else TokenMeans(self.key_lengths, self.real_keys)

    @property
    def unpadded_queries(self) -> int:
        """Number of first queries that are real in every sequence, or 0 if a GPU would have to be waited for."""
        if self.shortest is None:
            return int(self.lengths.min()) if self.lengths.device.type == "cpu" else 0
        return self.shortest

    def on(self, device: torch.device) -> AttentionRequest:
        if self.lengths.device == device:
            return self
        return replace(
            self,
            lengths=self.lengths.to(device),
            key_lengths=self.key_lengths.to(device),
            key_masks={name: mask_BS.to(device) for name, mask_BS in self.key_masks.items()},
            shortest=self.unpadded_queries,
            real_keys=None if self.real_keys is None else self.real_keys.to(device),
        )


@dataclass(frozen=True)
class WeightBlock:
    """Explicit weights of a block of queries, float32 or wider; ``unpadded`` if all queries are known to be real.

    On a GPU a number costs as many reads and writes of the weights as its operations make, so numbers read slices where
    their keys are contiguous.
    """

    weights_BHRC: Tensor
    first_query: int
    first_key: int
    request: AttentionRequest
    normalised: bool
    unpadded: bool

    @cached_property
    def query_R1(self) -> Tensor:
        """Positions of the queries, as a column."""
        rows = self.weights_BHRC.shape[-2]
        return torch.arange(self.first_query, self.first_query + rows, device=self.weights_BHRC.device)[:, None]

    @cached_property
    def key_C(self) -> Tensor:
        columns = self.weights_BHRC.shape[-1]
        return torch.arange(self.first_key, self.first_key + columns, device=self.weights_BHRC.device)

    @cached_property
    def real_weights_BHRC(self) -> Tensor:
        """The weights, with zero for queries that are padding."""
        if self.unpadded:
            return self.weights_BHRC
        real = (self.query_R1[:, 0] < self.request.lengths[:, None])[:, None, :, None]
        return torch.where(real, self.weights_BHRC, 0.0)

    def key_mask(self, name: str) -> Tensor:
        """Return a mask of the request at the keys of the block: bool (B, 1, 1, C)."""
        last = self.first_key + self.weights_BHRC.shape[-1]
        return self.request.key_masks[name][:, None, None, self.first_key : last]

    def weight_below(self, key: int) -> Tensor:
        """Return the weight of every query on the first keys, up to ``key``: (B, H, R)."""
        return self.weights_BHRC[..., : max(0, key - self.first_key)].sum(-1)

    def weight_at(self, offset: int) -> Tensor:
        """Return the weight of every query on the key at this offset from its own position, or 0: (B, H, R)."""
        rows = self.weights_BHRC.shape[-2]
        column = self.first_query + offset - self.first_key
        weight = self.weights_BHRC.diagonal(column, -2, -1)
        before = min(max(0, -column), rows)
        return F.pad(weight, (before, rows - before - weight.shape[-1]))


@dataclass(frozen=True)
class CallNumbers:
    """The numbers of one attention call: (B, H, N) by name of a `QueryNumber`, and sums by name of a `QuerySum`."""

    per_query: dict[str, Tensor]
    sums: dict[str, Tensor]
    request: AttentionRequest
    geometry: Geometry

    @cached_property
    def received_BHS(self) -> Tensor:
        """Mean weight that each key receives from the real queries."""
        return self.sums["received"] / self.request.lengths[:, None, None]


class QueryNumber(ABC):
    """One number per query and head.

    Attributes:
        fused: Fused calls give the number; without them it needs explicit weights.
        with_output: Some fused kernels give the number in the same pass as the output, if it is asked for beforehand.
    """

    name: ClassVar[str]
    fused: ClassVar[bool] = True
    with_output: ClassVar[bool] = False

    @abstractmethod
    def of_block(self, block: WeightBlock) -> Tensor:
        """Return the number from explicit weights: (B, H, R)."""

    def of_fused(self, fused: FusedCall) -> Tensor:
        """Return the number from fused calls, without explicit weights: (B, H, N)."""
        raise UnsupportedModelError(f"fused attention does not measure {self.name}. Use `path='blockwise'`")

    def with_learned_sink(self, values_BHN: Tensor, share_BHN: Tensor, log_share_BHN: Tensor) -> Tensor:
        """Correct the fused number of a call whose learned sink leaves the keys only ``share_BHN`` of the weight."""
        return values_BHN * share_BHN


class QuerySum(ABC):
    """A sum over the real queries, from explicit weights."""

    name: ClassVar[str]

    @abstractmethod
    def zeros(self, block: WeightBlock, geometry: Geometry) -> Tensor:
        """Return the sum over no queries."""

    @abstractmethod
    def add(self, total: Tensor, block: WeightBlock) -> None:
        """Add a block of queries to ``total`` in place."""


class WeightStatistic(ABC):
    """A statistic (B, H) or profile (B, H, bins) of the attention weights, from numbers per query and sums over
    queries.

    Attributes:
        positional: The statistic compares positions of queries and keys, so it is undefined in cross attention.
        undefined_for_one: A sequence of one token gives NaN.
        reads_keys: The mask of `registry.KEY_MASKS` that the statistic reads, which follows from token ids; None: it
            reads none.
        joins: How the numbers of a prefix and of an ending, measured with the prefix in a KV cache, join; None: the
            whole sequence must be measured.
    """

    name: ClassVar[str]
    joins: ClassVar[Joins | None] = None
    positional: ClassVar[bool] = False
    undefined_for_one: ClassVar[bool] = False
    reads_keys: ClassVar[str | None] = None
    query_sums: ClassVar[tuple[QuerySum, ...]] = ()

    @property
    def query_numbers(self) -> tuple[QueryNumber, ...]:
        return ()

    @property
    def explicit(self) -> bool:
        """True if fused calls cannot compute the statistic."""
        return bool(self.query_sums) or not all(number.fused for number in self.query_numbers)


class QueryMean(WeightStatistic):
    """A statistic that is a mean over real queries, without the first if ``skip_first``."""

    skip_first: ClassVar[bool] = False

    @abstractmethod
    def of_queries(self, numbers: CallNumbers) -> Tensor:
        """Return what is averaged: (B, H, N)."""

    def skips_first(self, geometry: Geometry) -> bool:
        return self.skip_first


class WholeCallStatistic(WeightStatistic):
    """A statistic that is computed from the numbers as a whole."""

    @abstractmethod
    def reduce(self, numbers: CallNumbers) -> Tensor:
        """Return the statistic of the real tokens."""


class MeanOverQueries(QueryMean, QueryNumber):
    """A statistic that is the mean of its own number per query."""

    @property
    def query_numbers(self) -> tuple[QueryNumber, ...]:
        return (self,)

    def of_queries(self, numbers: CallNumbers) -> Tensor:
        return numbers.per_query[self.name]


class FirstTokenWeight(MeanOverQueries):
    name = "first_token_weight"
    joins = "mean"

    def of_block(self, block: WeightBlock) -> Tensor:
        return block.weight_below(1)

    def of_fused(self, fused: FusedCall) -> Tensor:
        weight = (-fused.centred_lse_BHN).exp()
        if fused.window is not None:
            weight[..., max(0, fused.window - fused.past) :] = 0.0  # the first key has left the window
        return weight


class SelfWeight(MeanOverQueries):
    name = "self_weight"
    positional = True

    def of_block(self, block: WeightBlock) -> Tensor:
        return block.weight_at(0)

    def of_fused(self, fused: FusedCall) -> Tensor:
        return (fused.scores_before(0) - fused.lse_BHN).exp()


class PreviousTokenWeight(MeanOverQueries):
    name = "previous_token_weight"
    positional = True
    undefined_for_one = True
    skip_first = True

    def of_block(self, block: WeightBlock) -> Tensor:
        return block.weight_at(-1)

    def of_fused(self, fused: FusedCall) -> Tensor:
        weight = (fused.scores_before(1) - fused.lse_BHN).exp()
        weight[..., 0] = 0.0
        return weight if fused.window != 1 else torch.zeros_like(weight)


class SinkMass(MeanOverQueries):
    name = "sink_mass"

    def of_block(self, block: WeightBlock) -> Tensor:
        return block.weight_below(block.request.widths.sink)

    def of_fused(self, fused: FusedCall) -> Tensor:
        return fused.sink_mass_BHN


class RecentMass(MeanOverQueries):
    name = "recent_mass"
    positional = True

    def of_block(self, block: WeightBlock) -> Tensor:
        widths, rows = block.request.widths, block.weights_BHRC.shape[-2]
        first = max(block.first_key, widths.sink, block.first_query - widths.recent + 1)
        last = max(first, block.first_query + rows + widths.recent - 1)
        keys = slice(first - block.first_key, last - block.first_key)
        is_recent_RC = (block.query_R1 - block.key_C[keys]).abs() < widths.recent
        return torch.where(is_recent_RC, block.weights_BHRC[..., keys], 0.0).sum(-1)

    def of_fused(self, fused: FusedCall) -> Tensor:
        return fused.recent_mass_BHN


class WeightSum(QueryNumber):
    """The weight of a query on all keys: 1, or less with a learned sink; NaN where the scores are not finite."""

    name = "weight_sum"

    def of_block(self, block: WeightBlock) -> Tensor:
        total = block.weights_BHRC.sum(-1)
        return torch.where(total.isfinite(), 1.0, total) if block.normalised else total

    def of_fused(self, fused: FusedCall) -> Tensor:
        return 1.0 + 0.0 * fused.lse_BHN


class DistantMass(QueryMean):
    name = "distant_mass"
    positional = True

    query_numbers = (WeightSum(), SinkMass(), RecentMass())

    def of_queries(self, numbers: CallNumbers) -> Tensor:
        near_mass = numbers.per_query["sink_mass"] + numbers.per_query["recent_mass"]
        return (numbers.per_query["weight_sum"] - near_mass).clamp_min(0.0)


class LearnedSinkMass(QueryMean):
    name = "learned_sink_mass"

    query_numbers = (WeightSum(),)

    def of_queries(self, numbers: CallNumbers) -> Tensor:
        return (1.0 - numbers.per_query["weight_sum"]).clamp_min(0.0)


class Confidence(MeanOverQueries):
    name = "confidence"
    fused = False
    reads_keys = "sinks"

    def of_block(self, block: WeightBlock) -> Tensor:
        return (block.weights_BHRC * ~block.key_mask("sinks")).amax(-1)


class Entropy(MeanOverQueries):
    name = "entropy"
    joins = "mean"
    with_output = True

    def of_block(self, block: WeightBlock) -> Tensor:
        # `torch.special.entr` would be compiled on a GPU at its first use.
        return -torch.special.xlogy(block.weights_BHRC, block.weights_BHRC).sum(-1)

    def of_fused(self, fused: FusedCall) -> Tensor:
        return fused.entropy()

    def with_learned_sink(self, values_BHN: Tensor, share_BHN: Tensor, log_share_BHN: Tensor) -> Tensor:
        # With r the share of the keys: -sum rA ln rA = r (-sum A ln A) - r ln r.
        return values_BHN * share_BHN - share_BHN * log_share_BHN


class RelativeEntropy(QueryMean):
    """Entropy divided by its maximum: ln(q + 1) for query q, from 0, or the ln of all keys in bidirectional attention.
    A window does not change it. Queries that see one key are left out.
    """

    name = "relative_entropy"
    undefined_for_one = True

    query_numbers = (Entropy(),)

    def skips_first(self, geometry: Geometry) -> bool:
        return geometry.causal

    def of_queries(self, numbers: CallNumbers) -> Tensor:
        entropy_BHN = numbers.per_query["entropy"]
        if numbers.geometry.causal:
            keys_N = torch.arange(1, numbers.geometry.queries + 1, device=entropy_BHN.device, dtype=entropy_BHN.dtype)
            return entropy_BHN / keys_N.log()
        return entropy_BHN / numbers.request.key_lengths.to(entropy_BHN.dtype).log()[:, None, None]


class Received(QuerySum):
    """The weight that each key receives from the real queries: (B, H, S)."""

    name = "received"

    def zeros(self, block: WeightBlock, geometry: Geometry) -> Tensor:
        return block.weights_BHRC.new_zeros(*block.weights_BHRC.shape[:2], geometry.keys)

    def add(self, total: Tensor, block: WeightBlock) -> None:
        columns = block.weights_BHRC.shape[-1]
        total[..., block.first_key : block.first_key + columns] += block.real_weights_BHRC.sum(-2)


class WeightByOffset(QuerySum):
    """The weight by offset k - q, from -(S - 1) to S - 1, float64: (B, H, 2S - 1). Only real queries count."""

    name = "weight_by_offset"

    def zeros(self, block: WeightBlock, geometry: Geometry) -> Tensor:
        shape = (*block.weights_BHRC.shape[:2], 2 * geometry.keys - 1)
        return block.weights_BHRC.new_zeros(shape, dtype=torch.float64)

    def add(self, total: Tensor, block: WeightBlock) -> None:
        by_offset = _sums_by_offset(block.real_weights_BHRC)
        last_query = block.first_query + block.weights_BHRC.shape[-2] - 1
        first = total.shape[-1] // 2 + block.first_key - last_query
        total[..., first : first + by_offset.shape[-1]] += by_offset


class ReceivedMax(WholeCallStatistic):
    name = "received_max"
    query_sums = (Received(),)

    def reduce(self, numbers: CallNumbers) -> Tensor:
        return numbers.received_BHS.amax(-1)


class ReceivedConcentration(WholeCallStatistic):
    name = "received_concentration"
    undefined_for_one = True
    query_sums = (Received(),)

    def reduce(self, numbers: CallNumbers) -> Tensor:
        share = numbers.received_BHS / numbers.received_BHS.sum(-1, keepdim=True)
        entropy = -torch.special.xlogy(share, share).sum(-1)
        concentration = 1.0 - entropy / numbers.request.key_lengths.log()[:, None]
        concentration[numbers.request.key_lengths < 2] = float("nan")  # 0 / 0: a single key receives everything
        return concentration


class ReceivedByPosition(WholeCallStatistic):
    name = "received_by_position"
    query_sums = (Received(),)

    def reduce(self, numbers: CallNumbers) -> Tensor:
        return doubling_sums(numbers.received_BHS.double())


class MassByDistance(WholeCallStatistic):
    name = "mass_by_distance"
    positional = True
    query_sums = (WeightByOffset(),)

    def reduce(self, numbers: CallNumbers) -> Tensor:
        by_offset = numbers.sums["weight_by_offset"]
        keys = by_offset.shape[-1] // 2 + 1
        earlier_and_own, later = by_offset[..., :keys].flip(-1), by_offset[..., keys:]
        return doubling_sums(earlier_and_own + F.pad(later, (1, 0))) / numbers.request.lengths[:, None, None]


class ArgmaxOffset(QueryNumber):
    """Position of the key with the largest weight, minus the query's; NaN where the weights are not finite."""

    name = "argmax_offset"
    fused = False

    def of_block(self, block: WeightBlock) -> Tensor:
        largest, column = block.weights_BHRC.max(-1)
        offset = column + block.first_key - block.query_R1[:, 0]
        return torch.where(largest.isfinite(), offset.to(largest.dtype), float("nan"))


class ArgmaxOffsets(WholeCallStatistic):
    name = "argmax_offsets"
    positional = True

    query_numbers = (ArgmaxOffset(),)

    def reduce(self, numbers: CallNumbers) -> Tensor:
        offsets_BHN, lengths = numbers.per_query["argmax_offset"], numbers.request.lengths
        real = real_tokens(lengths, offsets_BHN.shape[-1])[:, None].expand_as(offsets_BHN)
        bins = offsets_BHN.nan_to_num().clamp(-MAX_OFFSET - 1, MAX_OFFSET + 1).long() + MAX_OFFSET + 1
        counts = torch.zeros(*bins.shape[:2], 2 * MAX_OFFSET + 3, device=bins.device)
        shares = counts.scatter_add_(-1, bins, real.float()) / lengths[:, None, None]
        has_nan = (offsets_BHN.isnan() & real).any(-1, keepdim=True)
        return shares.masked_fill(has_nan, float("nan"))


def doubling_sums(values: Tensor) -> Tensor:
    """Sum values by index (..., S) into bins of indices 0, 1, 2-3, 4-7, ... (..., bins). The last bin is open."""
    starts = [0, *(2**power for power in range(DISTANCE_BINS - 1))]
    ends = [*starts[1:], None]
    # Slices have a fixed order of addition, and a GPU adds them without atomic operations.
    sums = [values[..., start:end].sum(-1) for start, end in zip(starts, ends, strict=True) if start < values.shape[-1]]
    return F.pad(torch.stack(sums, -1), (0, DISTANCE_BINS - len(sums)))


def _sums_by_offset(weights_BHRC: Tensor) -> Tensor:
    """Sum each diagonal, (B, H, R + C - 1), from the last row's first column to the first row's last.

    Reading a matrix as if its rows were longer by one turns diagonals into columns. Diagonals that cross all rows are
    summed without a copy. The triangles at both ends are copied first, with zeros around them.
    """
    R, C = weights_BHRC.shape[-2:]
    if C < R:
        return _sums_by_offset(F.pad(weights_BHRC, (0, R - C)))[..., : R + C - 1]
    below = weights_BHRC[..., :R].tril(-1).contiguous()
    above = weights_BHRC[..., C - R :].triu(1).contiguous()
    sums = (
        _diagonals(below, R - 1, R - 1, 2),
        _diagonals(weights_BHRC, R, C - R + 1, 0),
        _diagonals(above, R - 1, R - 1, 1),
    )
    return torch.cat([diagonals.sum(-2) for diagonals in sums], -1)


def _diagonals(weights_BHRC: Tensor, rows: int, columns: int, first: int) -> Tensor:
    """View diagonals as columns, from the ``first`` element on: (B, H, rows, columns)."""
    *batch, down, right = weights_BHRC.stride()
    size = (*weights_BHRC.shape[:2], rows, columns)
    return weights_BHRC.as_strided(size, (*batch, down + right, right), weights_BHRC.storage_offset() + first)


OF_WEIGHTS: tuple[WeightStatistic, ...] = (
    FirstTokenWeight(),
    SelfWeight(),
    PreviousTokenWeight(),
    SinkMass(),
    RecentMass(),
    DistantMass(),
    LearnedSinkMass(),
    Confidence(),
    Entropy(),
    RelativeEntropy(),
    ReceivedMax(),
    ReceivedConcentration(),
    ArgmaxOffsets(),
    MassByDistance(),
    ReceivedByPosition(),
)
