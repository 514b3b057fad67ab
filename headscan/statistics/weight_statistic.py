"""Base classes of the statistics of attention weights.

An attention call yields numbers per query (`QueryNumber`) and sums over queries (`QuerySum`). A `WeightStatistic`
names those it needs and reduces them to one value per sequence and head.

Shapes: B sequences, N queries, S keys, R queries and C keys of a block, H query heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from headscan.errors import UnsupportedModelError
from headscan.models.forward_inputs import mean_over_tokens

if TYPE_CHECKING:
    from headscan.attention.attention_request import AttentionRequest, Geometry
    from headscan.attention.fused import FusedPass


@dataclass(frozen=True)
class WeightBlock:
    """Explicit weights of a block of queries.

    Attributes:
        weights_BHRC: Attention weights, float32 or wider.
        log_weights_BHRC: Their logarithms; -inf for a masked key.
        first_query: Position of the first query.
        first_key: Position of the first key.
        request: The request that is being measured.
        normalised: The weights of a query sum to 1, because the call has no learned sink.
    """

    weights_BHRC: Tensor
    log_weights_BHRC: Tensor
    first_query: int
    first_key: int
    request: AttentionRequest
    normalised: bool

    @cached_property
    def query_R1(self) -> Tensor:
        """Positions of the queries, as a column."""
        rows = self.weights_BHRC.shape[-2]
        return torch.arange(self.first_query, self.first_query + rows, device=self.weights_BHRC.device)[:, None]

    @cached_property
    def key_C(self) -> Tensor:
        """Positions of the keys."""
        columns = self.weights_BHRC.shape[-1]
        return torch.arange(self.first_key, self.first_key + columns, device=self.weights_BHRC.device)

    @cached_property
    def real_weights_BHRC(self) -> Tensor:
        """The weights, with zero for queries that are padding."""
        real = (self.query_R1[:, 0] < self.request.lengths[:, None])[:, None, :, None]
        return torch.where(real, self.weights_BHRC, 0.0)

    def weight_on(self, keys_RC: Tensor) -> Tensor:
        """Return the weight of every query on its selected keys: (B, H, R)."""
        return torch.where(keys_RC, self.weights_BHRC, 0.0).sum(-1)


@dataclass(frozen=True)
class Findings:
    """The numbers of one attention call.

    Attributes:
        per_query: (B, H, N) by name of a `QueryNumber`.
        sums: By name of a `QuerySum`.
        request: The request that was measured.
        geometry: Numbers of queries and keys.
    """

    per_query: dict[str, Tensor]
    sums: dict[str, Tensor]
    request: AttentionRequest
    geometry: Geometry

    @cached_property
    def received_BHS(self) -> Tensor:
        """Mean weight that each key receives from the real queries."""
        return self.sums["received"] / self.request.lengths[:, None, None]

    def mean(self, values_BHN: Tensor, *, skip_first: bool = False) -> Tensor:
        """Return the mean over real queries: (B, H)."""
        return mean_over_tokens(values_BHN, self.request.lengths, skip_first=skip_first)


class QueryNumber(ABC):
    """One number per query and head.

    Attributes:
        name: Its key in `Findings.per_query`.
        fused: `of_fused` exists. If not, the number needs explicit weights.
    """

    name: ClassVar[str]
    fused: ClassVar[bool] = True

    @abstractmethod
    def of_block(self, block: WeightBlock) -> Tensor:
        """Return the number from explicit weights: (B, H, R)."""

    def of_fused(self, fused: FusedPass) -> Tensor:
        """Return the number from fused calls, without explicit weights: (B, H, N)."""
        raise UnsupportedModelError(f"fused attention does not measure {self.name}. Use path='blockwise'")

    def with_learned_sink(self, values_BHN: Tensor, share_BHN: Tensor, log_share_BHN: Tensor) -> Tensor:
        """Correct the fused number of a call with a learned sink. The sink leaves the keys only ``share_BHN`` of the
        weight.
        """
        return values_BHN * share_BHN


class QuerySum(ABC):
    """A sum over the real queries, from explicit weights.

    Attributes:
        name: Its key in `Findings.sums`.
    """

    name: ClassVar[str]

    @abstractmethod
    def zeros(self, block: WeightBlock, geometry: Geometry) -> Tensor:
        """Return the sum over no queries."""

    @abstractmethod
    def add(self, total: Tensor, block: WeightBlock) -> None:
        """Add a block of queries to ``total`` in place."""


class WeightStatistic(ABC):
    """A statistic (B, H) or profile (B, H, bins) of the attention weights.

    Attributes:
        name: Its name in the catalogue.
        positional: It compares positions of queries and keys, so it is undefined in cross attention.
        undefined_for_one: It is NaN for a sequence of one token.
        continuable: It can be computed for the last tokens of a sequence alone, with the earlier ones in a KV cache.
        ignores_sinks: It reads `AttentionRequest.ignored_keys`.
        query_numbers: The numbers per query that `reduce` reads.
        query_sums: The sums over queries that `reduce` reads.
    """

    name: ClassVar[str]
    positional: ClassVar[bool] = False
    undefined_for_one: ClassVar[bool] = False
    continuable: ClassVar[bool] = False
    ignores_sinks: ClassVar[bool] = False
    query_sums: ClassVar[tuple[QuerySum, ...]] = ()

    @property
    def query_numbers(self) -> tuple[QueryNumber, ...]:
        return ()

    @property
    def explicit(self) -> bool:
        """True if fused calls cannot compute it."""
        return bool(self.query_sums) or not all(number.fused for number in self.query_numbers)

    @abstractmethod
    def reduce(self, found: Findings) -> Tensor:
        """Return the statistic of the real tokens."""


class MeanOverQueries(WeightStatistic, QueryNumber):
    """A statistic that is a mean over real queries.

    Attributes:
        skip_first: The mean leaves out the first query.
    """

    skip_first: ClassVar[bool] = False

    @property
    def query_numbers(self) -> tuple[QueryNumber, ...]:
        return (self,)

    def reduce(self, found: Findings) -> Tensor:
        return found.mean(found.per_query[self.name], skip_first=self.skip_first)
