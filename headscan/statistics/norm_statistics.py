"""Statistics that are norms of value vectors and of heads' outputs.

Shapes: B sequences, N tokens, S keys, H query heads, K KV heads, D width of a head's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headscan.models.forward_inputs import TokenMeans, at_last_token
from headscan.statistics.weight_statistics import Joins


@dataclass(frozen=True)
class ValueVectors:
    """The value vectors of one attention call, in any floating dtype, and means over the real keys."""

    value_BKSD: Tensor
    over_keys: TokenMeans

    @cached_property
    def norm_BKS(self) -> Tensor:
        return self.value_BKSD.to(torch.promote_types(self.value_BKSD.dtype, torch.float32)).norm(dim=-1)


class ValueStatistic(ABC):
    """A statistic of the value vectors, equal within a group; its name is that of the catalogue."""

    name: ClassVar[str]
    joins: ClassVar[Joins | None] = None

    @abstractmethod
    def reduce(self, values: ValueVectors) -> Tensor:
        """Return the statistic of the real keys: (B, K)."""


class FirstValueNorm(ValueStatistic):
    name = "first_value_norm"
    joins = "first"

    def reduce(self, values: ValueVectors) -> Tensor:
        return values.norm_BKS[..., 0]


class ValueNorm(ValueStatistic):
    name = "value_norm"
    joins = "mean"

    def reduce(self, values: ValueVectors) -> Tensor:
        return values.over_keys.mean(values.norm_BKS)


@dataclass(frozen=True)
class HeadOutputs:
    """The heads' outputs at the input of the output projection, float32 or wider. ``factor_HDD`` is that of
    `projection_factors.projection_factor`, with norm(O W) = norm(O L); None if no statistic needs it.
    """

    heads_BNHD: Tensor
    over_tokens: TokenMeans
    factor_HDD: Tensor | None

    @cached_property
    def norm_BHN(self) -> Tensor:
        return self.heads_BNHD.norm(dim=-1).transpose(1, 2)


class OutputStatistic(ABC):
    """A statistic of the heads' outputs; its name is that of the catalogue."""

    name: ClassVar[str]
    joins: ClassVar[Joins | None] = None
    needs_projection: ClassVar[bool] = False

    @abstractmethod
    def reduce(self, outputs: HeadOutputs) -> Tensor:
        """Return the statistic of the real tokens: (B, H)."""


class OutputNorm(OutputStatistic):
    name = "output_norm"
    joins = "mean"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        return outputs.over_tokens.mean(outputs.norm_BHN)


class LastOutputNorm(OutputStatistic):
    name = "last_output_norm"
    joins = "last"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        return at_last_token(outputs.norm_BHN, outputs.over_tokens.lengths)


class ProjectedOutputNorm(OutputStatistic):
    name = "projected_output_norm"
    joins = "mean"
    needs_projection = True

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        assert outputs.factor_HDD is not None, "projected_output_norm needs the projection's factor"
        factor = outputs.factor_HDD.to(outputs.heads_BNHD)
        norm_BHN = torch.einsum("bnhd,hde->bhne", outputs.heads_BNHD, factor).norm(dim=-1)
        return outputs.over_tokens.mean(norm_BHN)


class OutputMeanNorm(OutputStatistic):
    name = "output_mean_norm"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        real = outputs.over_tokens.real(outputs.heads_BNHD.shape[1])[..., None, None]
        total_BHD = torch.where(real, outputs.heads_BNHD, 0.0).sum(1)
        mean_BHD = total_BHD / outputs.over_tokens.lengths[:, None, None]
        return mean_BHD.norm(dim=-1)


VALUE_NORMS: tuple[ValueStatistic, ...] = (FirstValueNorm(), ValueNorm())
OUTPUT_NORMS: tuple[OutputStatistic, ...] = (OutputNorm(), LastOutputNorm(), ProjectedOutputNorm(), OutputMeanNorm())
