"""What is measured at the attention door: per query while it runs, per sequence afterwards.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.errors import InterventionError
from headscan.reductions import mean_over_tokens

#: Statistics that follow from attention weights, each a mean over queries of a number per query.
WEIGHT_STATISTICS = frozenset(
    {
        "first_token_weight",
        "entropy",
        "sink_mass",
        "recent_mass",
        "distant_mass",
        "previous_token_weight",
        "self_weight",
        "relative_entropy",
    }
)
VALUE_STATISTICS = frozenset({"first_value_norm", "value_norm"})

#: What has to be known per query for a statistic that is not itself a mean of such a number.
_PER_QUERY = {"relative_entropy": ("entropy",), "distant_mass": ("sink_mass", "recent_mass")}


@dataclass(frozen=True)
class MassWidths:
    """How many first keys are the sink, and how many last ones are recent.

    Raises:
        InterventionError: A width below 1.
    """

    sink: int = DEFAULT_SINK
    recent: int = DEFAULT_RECENT

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            if getattr(self, name) < 1:
                raise InterventionError(f"width {name}={getattr(self, name)} is too small: give at least 1")


def per_query_needs(statistics: frozenset[str]) -> frozenset[str]:
    """Names of the numbers per query from which ``statistics`` follow."""
    needs: set[str] = set()
    for name in statistics & WEIGHT_STATISTICS:
        needs.update(_PER_QUERY.get(name, (name,)))
    return frozenset(needs)


@dataclass(frozen=True)
class AttentionSummary:
    """What one attention call said of its heads.

    Attributes:
        per_query: float32 (B, H, N) for each of `per_query_needs`.
        value_norm_BKN: Norm of every value vector, float32.
        group_size: Query heads per KV head.
        device: Where the layer runs.
    """

    per_query: dict[str, Tensor]
    value_norm_BKN: Tensor | None
    group_size: int
    device: torch.device

    def reduce(self, statistics: frozenset[str], lengths: Tensor) -> dict[str, Tensor]:
        """The asked statistics of the real tokens, float32 (B, H) each."""
        reduced: dict[str, Tensor] = {}
        for name in statistics & WEIGHT_STATISTICS:
            if name == "relative_entropy":
                entropy = self.per_query["entropy"]
                # The largest entropy that a query with q + 1 keys in sight can have; query 0 is left out of the mean.
                bound = torch.arange(1, entropy.shape[-1] + 1, device=entropy.device, dtype=entropy.dtype).log()
                bound[:1] = 1.0
                reduced[name] = mean_over_tokens(entropy / bound, lengths, skip_first=True)
            elif name == "distant_mass":
                near = self.per_query["sink_mass"] + self.per_query["recent_mass"]
                reduced[name] = mean_over_tokens((1.0 - near).clamp_min(0.0), lengths)
            else:
                skip = name == "previous_token_weight"
                reduced[name] = mean_over_tokens(self.per_query[name], lengths, skip_first=skip)
        if self.value_norm_BKN is not None:
            if "value_norm" in statistics:
                reduced["value_norm"] = self._per_query_head(mean_over_tokens(self.value_norm_BKN, lengths))
            if "first_value_norm" in statistics:
                reduced["first_value_norm"] = self._per_query_head(self.value_norm_BKN[..., 0])
        return reduced

    def _per_query_head(self, values_BK: Tensor) -> Tensor:
        return values_BK.repeat_interleave(self.group_size, dim=1)
