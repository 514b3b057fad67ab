"""Statistics of the heads' outputs, seen at the input of the output projection.

Shapes: B sequences, N tokens, H query heads, Dv width of a head's output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscan.models.token_means import at_last_token, mean_over_tokens, real_tokens

OUTPUT_STATISTICS = frozenset({"last_output_norm", "output_norm", "projected_output_norm", "output_mean_norm"})


def output_statistics(
    heads_BNHD: Tensor, lengths: Tensor, statistics: frozenset[str], factor_HDD: Tensor | None
) -> dict[str, Tensor]:
    """The asked statistics of the real tokens, float32 (B, H) each.

    Args:
        heads_BNHD: What the heads hand to the output projection.
        lengths: Real tokens of each sequence (B,).
        statistics: Some of `OUTPUT_STATISTICS`.
        factor_HDD: `projections.projection_factor` L, wanted for ``projected_output_norm``: norm(O W) =
            norm(O L).
    """
    heads_BNHD = heads_BNHD.to(torch.promote_types(heads_BNHD.dtype, torch.float32))
    reduced: dict[str, Tensor] = {}
    if statistics & {"output_norm", "last_output_norm"}:
        norm_BHN = heads_BNHD.norm(dim=-1).transpose(1, 2)
        if "output_norm" in statistics:
            reduced["output_norm"] = mean_over_tokens(norm_BHN, lengths)
        if "last_output_norm" in statistics:
            reduced["last_output_norm"] = at_last_token(norm_BHN, lengths)
    if "projected_output_norm" in statistics:
        assert factor_HDD is not None, "projected_output_norm needs the projection's factor"
        norm_BHN = torch.einsum("bnhd,hde->bhne", heads_BNHD, factor_HDD.to(heads_BNHD)).norm(dim=-1)
        reduced["projected_output_norm"] = mean_over_tokens(norm_BHN, lengths)
    if "output_mean_norm" in statistics:
        real = real_tokens(lengths, heads_BNHD.shape[1])[..., None, None]
        mean_BHD = torch.where(real, heads_BNHD, 0.0).sum(1) / lengths[:, None, None]
        reduced["output_mean_norm"] = mean_BHD.norm(dim=-1)
    return reduced
