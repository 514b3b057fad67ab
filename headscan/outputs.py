"""Statistics of the heads' outputs, seen at the input of the output projection.

Shapes: B sequences, N tokens, H query heads, Dv width of a head's output.
"""

from __future__ import annotations

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.reductions import at_last_token, mean_over_tokens, real_tokens

OUTPUT_STATISTICS = frozenset({"last_output_norm", "output_norm", "projected_output_norm", "output_mean_norm"})


def projection_gram(projection: nn.Module, site: AttentionSite) -> Tensor:
    """``W W^T`` of each head's rows of the output projection, float32 (H, Dv, Dv).

    Weights that accelerate keeps elsewhere are brought in for the moment.

    Raises:
        UnsupportedModelError: The weight is quantised, or of a module whose layout is not known.
    """
    with align_module_device(projection):
        weight = projection.get_parameter("weight").detach()
        plain = weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        if not plain or not isinstance(projection, (nn.Linear, Conv1D)):
            raise UnsupportedModelError(
                f"projected_output_norm needs a plain output projection, and that of layer {site.layer} is a "
                f"{type(projection).__name__} of {weight.dtype}: measure the other statistics"
            )
        # A Linear keeps (out, in); GPT-2's Conv1D keeps (in, out).
        rows = (weight.T if isinstance(projection, nn.Linear) else weight).float()
        rows_HDM = rows.unflatten(0, (site.num_attention_heads, site.value_dim))
        return rows_HDM @ rows_HDM.mT


def output_statistics(
    heads_BNHD: Tensor, lengths: Tensor, statistics: frozenset[str], gram_HDD: Tensor | None
) -> dict[str, Tensor]:
    """The asked statistics of the real tokens, float32 (B, H) each.

    Args:
        heads_BNHD: What the heads hand to the output projection.
        lengths: Real tokens of each sequence (B,).
        statistics: Some of `OUTPUT_STATISTICS`.
        gram_HDD: `projection_gram`, wanted for ``projected_output_norm``: norm(O W)^2 = O (W W^T) O.
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
        assert gram_HDD is not None, "projected_output_norm needs the Gram matrix"
        square = torch.einsum("bnhd,hde,bnhe->bhn", heads_BNHD, gram_HDD.to(heads_BNHD), heads_BNHD)
        reduced["projected_output_norm"] = mean_over_tokens(square.clamp_min(0.0).sqrt(), lengths)
    if "output_mean_norm" in statistics:
        real = real_tokens(lengths, heads_BNHD.shape[1])[..., None, None]
        mean_BHD = torch.where(real, heads_BNHD, 0.0).sum(1) / lengths[:, None, None]
        reduced["output_mean_norm"] = mean_BHD.norm(dim=-1)
    return reduced
