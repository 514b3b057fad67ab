"""Everything that attention weights tell, from the weights themselves: exact for any mask, bias or sink.

Shapes: B sequences, R queries of a block, C keys that the block may see, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.attention_request import AttentionRequest
from headscan.attention.reduce import Findings, Geometry, doubling_bin
from headscan.catalog import DISTANCE_BINS
from headscan.models.token_means import real_tokens


class WeightTally:
    """Takes weights a block of queries at a time; `findings` holds what they told."""

    def __init__(
        self, request: AttentionRequest, geometry: Geometry, sequences: int, heads: int, *, whole: bool = False
    ) -> None:
        """With ``whole`` the weights of a query are known to sum to 1."""
        self.request, self.geometry, self._whole = request, geometry, whole
        self._needs = request.per_query
        self._blocks: dict[str, list[Tensor]] = {name: [] for name in self._needs}
        self._shape = (sequences, heads)
        self._distance: Tensor | None = None
        self._received: Tensor | None = None

    def add(self, weights_BHRC: Tensor, log_weights_BHRC: Tensor, first_query: int, first_key: int) -> None:
        """Take the weights of queries ``first_query``, ... on keys ``first_key``, ...; blocks come in order."""
        rows, columns = weights_BHRC.shape[-2:]
        query = torch.arange(first_query, first_query + rows, device=weights_BHRC.device)[:, None]
        key = torch.arange(first_key, first_key + columns, device=weights_BHRC.device)
        for name in self._needs:
            self._blocks[name].append(self._number(name, weights_BHRC, log_weights_BHRC, query, key, first_key))
        wanted = self.request.statistics
        if not wanted & {"mass_by_distance", "received_max", "received_concentration", "received_by_position"}:
            return
        real = (query[:, 0] < self.request.lengths[:, None])[:, None, :, None]
        real_weights = torch.where(real, weights_BHRC, 0.0)
        if wanted & {"received_max", "received_concentration", "received_by_position"}:
            if self._received is None:
                self._received = weights_BHRC.new_zeros(*self._shape, self.geometry.keys)
            self._received[..., first_key : first_key + columns] += real_weights.sum(-2)
        if "mass_by_distance" in wanted and not self.geometry.cross:
            if self._distance is None:
                self._distance = weights_BHRC.new_zeros(*self._shape, DISTANCE_BINS, dtype=torch.float64)
            by_offset = _sums_by_offset(real_weights).double()
            last_key = first_key + columns - 1
            offset = torch.arange(by_offset.shape[-1], device=query.device) + (first_query - last_key)
            self._distance.index_add_(-1, doubling_bin(offset.abs()), by_offset)

    def findings(self) -> Findings:
        """All that was found."""
        per_query = {name: torch.cat(blocks, -1) for name, blocks in self._blocks.items()}
        return Findings(per_query, self._distance, self._received)

    def _number(
        self, name: str, weights: Tensor, log_weights: Tensor, query: Tensor, key: Tensor, first_key: int
    ) -> Tensor:
        """One number per query: (B, H, R)."""
        widths = self.request.widths
        if name == "entropy":
            # A masked key has weight 0 and log-weight -inf, and adds nothing.
            return -(weights * log_weights.masked_fill(weights == 0, 0.0)).sum(-1)
        if name == "weight_sum":
            total = weights.sum(-1)
            return torch.where(total.isfinite(), 1.0, total) if self._whole else total
        if name == "confidence":
            if self.request.ignored_keys is not None:
                ignored = self.request.ignored_keys[:, None, None, first_key : first_key + weights.shape[-1]]
                weights = weights.masked_fill(ignored, 0.0)
            return weights.amax(-1)
        if name == "argmax_offsets":
            offset = (key[weights.argmax(-1)] - query[:, 0]).to(weights.dtype)
            return torch.where(weights.sum(-1).isfinite(), offset, float("nan"))
        if name == "first_token_weight":
            seen = key == 0
        elif name == "sink_mass":
            seen = key < widths.sink
        elif name == "recent_mass":
            seen = ((query - key).abs() < widths.recent) & (key >= widths.sink)
        elif name == "self_weight":
            seen = key == query
        elif name == "previous_token_weight":
            seen = key == query - 1
        else:
            raise KeyError(name)
        return torch.where(seen, weights, 0.0).sum(-1)


def _sums_by_offset(weights_BHRC: Tensor) -> Tensor:
    """Sums over the diagonals: (B, H, R + C - 1), from the first row's last column to the last row's first.

    Rows written one column longer than they are read slide by one place each, so that diagonals become columns.
    """
    R, C = weights_BHRC.shape[-2:]
    longer = F.pad(weights_BHRC.flip(-1), (0, R)).flatten(-2)
    return longer[..., : R * (R + C - 1)].unflatten(-1, (R, R + C - 1)).sum(-2)


def value_norms(value_BKSD: Tensor, request: AttentionRequest, heads: int) -> dict[str, Tensor]:
    """Norms of the real value vectors, each for all query heads of its group: (B, H)."""
    wanted = request.statistics & {"first_value_norm", "value_norm"}
    if not wanted:
        return {}
    norm_BKS = value_BKSD.to(torch.promote_types(value_BKSD.dtype, torch.float32)).norm(dim=-1)
    norms: dict[str, Tensor] = {}
    if "first_value_norm" in wanted:
        norms["first_value_norm"] = norm_BKS[..., 0]
    if "value_norm" in wanted:
        real = real_tokens(request.key_lengths, norm_BKS.shape[-1])[:, None]
        norms["value_norm"] = torch.where(real, norm_BKS, 0.0).sum(-1) / request.key_lengths[:, None]
    return {name: values.float().repeat_interleave(heads // values.shape[1], 1) for name, values in norms.items()}
