"""Statistics that are norms of value vectors and of the heads' outputs.

Shapes: B sequences, N tokens, S keys, H query heads, K KV heads, D width of a head's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headscan.models.forward_inputs import at_last_token, mean_over_tokens, real_tokens


@dataclass(frozen=True)
class ValueVectors:
    """The value vectors of one attention call.

    Attributes:
        value_BKSD: In any floating dtype.
        lengths: Real keys of each sequence (B,).
    """

    value_BKSD: Tensor
    lengths: Tensor

    @cached_property
    def norm_BKS(self) -> Tensor:
        return self.value_BKSD.to(torch.promote_types(self.value_BKSD.dtype, torch.float32)).norm(dim=-1)


class ValueStatistic(ABC):
    """A statistic of the value vectors, equal within a group.

    Attributes:
        name: Its name in the catalogue.
    """

    name: ClassVar[str]

    @abstractmethod
    def reduce(self, values: ValueVectors) -> Tensor:
        """Return the statistic of the real keys: (B, K)."""


class FirstValueNorm(ValueStatistic):
    name = "first_value_norm"

    def reduce(self, values: ValueVectors) -> Tensor:
        return values.norm_BKS[..., 0]


class ValueNorm(ValueStatistic):
    name = "value_norm"

    def reduce(self, values: ValueVectors) -> Tensor:
        real = real_tokens(values.lengths, values.norm_BKS.shape[-1])[:, None]
        return torch.where(real, values.norm_BKS, 0.0).sum(-1) / values.lengths[:, None]


@dataclass(frozen=True)
class HeadOutputs:
    """The heads' outputs at the input of the output projection.

    Attributes:
        heads_BNHD: float32 or wider.
        lengths: Real tokens of each sequence (B,).
        factor_HDD: `measure.projections.projection_factor` L, with norm(O W) = norm(O L); None if no statistic of the
            call needs it.
    """

    heads_BNHD: Tensor
    lengths: Tensor
    factor_HDD: Tensor | None

    @cached_property
    def norm_BHN(self) -> Tensor:
        return self.heads_BNHD.norm(dim=-1).transpose(1, 2)


class OutputStatistic(ABC):
    """A statistic of the heads' outputs.

    Attributes:
        name: Its name in the catalogue.
        needs_projection: It reads `HeadOutputs.factor_HDD`.
    """

    name: ClassVar[str]
    needs_projection: ClassVar[bool] = False

    @abstractmethod
    def reduce(self, outputs: HeadOutputs) -> Tensor:
        """Return the statistic of the real tokens: (B, H)."""


class OutputNorm(OutputStatistic):
    name = "output_norm"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        return mean_over_tokens(outputs.norm_BHN, outputs.lengths)


class LastOutputNorm(OutputStatistic):
    name = "last_output_norm"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        return at_last_token(outputs.norm_BHN, outputs.lengths)


class ProjectedOutputNorm(OutputStatistic):
    name = "projected_output_norm"
    needs_projection = True

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        assert outputs.factor_HDD is not None, "projected_output_norm needs the projection's factor"
        factor = outputs.factor_HDD.to(outputs.heads_BNHD)
        norm_BHN = torch.einsum("bnhd,hde->bhne", outputs.heads_BNHD, factor).norm(dim=-1)
        return mean_over_tokens(norm_BHN, outputs.lengths)


class OutputMeanNorm(OutputStatistic):
    name = "output_mean_norm"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        real = real_tokens(outputs.lengths, outputs.heads_BNHD.shape[1])[..., None, None]
        mean_BHD = torch.where(real, outputs.heads_BNHD, 0.0).sum(1) / outputs.lengths[:, None, None]
        return mean_BHD.norm(dim=-1)


VALUE_NORMS: tuple[ValueStatistic, ...] = (FirstValueNorm(), ValueNorm())
OUTPUT_NORMS: tuple[OutputStatistic, ...] = (OutputNorm(), LastOutputNorm(), ProjectedOutputNorm(), OutputMeanNorm())
