"""Means over the real tokens of each sequence.

Shapes: B sequences, N tokens (padded on the right), H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def real_tokens(lengths: Tensor, tokens: int) -> Tensor:
    """Return the real tokens, bool (B, N), from ``lengths`` (B,)."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def mean_over_tokens(values_BHN: Tensor, lengths: Tensor, *, skip_first: bool = False) -> Tensor:
    """Return the mean over real tokens (B, H), in float32.

    ``skip_first`` excludes token 0; a sequence of one token then gives NaN.
    """
    real = real_tokens(lengths, values_BHN.shape[-1])[:, None]
    if skip_first:
        real = real & (torch.arange(values_BHN.shape[-1], device=lengths.device) > 0)
    # `where` instead of a product, since numbers at padding may be NaN.
    total = torch.where(real, values_BHN.float(), 0.0).sum(-1)
    return total / (lengths - int(skip_first))[:, None]


def wide_norm(values: Tensor) -> Tensor:
    """Return the norm of a tensor in float32 or wider.

    In float16 a norm above 65,504 would be infinite.
    """
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))


def at_last_token(values_BHN: Tensor, lengths: Tensor) -> Tensor:
    """Return the values at the last real token (B, H)."""
    index = (lengths - 1)[:, None, None].expand(-1, values_BHN.shape[1], 1)
    return values_BHN.gather(-1, index).squeeze(-1)
