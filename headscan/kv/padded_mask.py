"""Attention masks of batches that are padded on the left.

Shapes: B sequences, N queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscan.errors import UnsupportedModelError


def left_padding(mask: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor | None]:
    """Return a mask as bool (B or 1, N, S), and the first real token of each row (B or 1,); None if it is 0 in all.

    With one query no position is returned, since it does not change while tokens are added.

    Args:
        mask: (B or 1, 1, N, S), bool (True means attend) or additive.

    Raises:
        UnsupportedModelError: The mask differs between heads, or is not causal with padding on the left.
    """
    if mask.shape[1] != 1 or mask.shape[-2:] != (queries, keys):
        raise UnsupportedModelError(
            f"attention mask {tuple(mask.shape)} for {queries} queries and {keys} keys: a cache with windows needs one"
            " mask for all heads. Use a model without position biases"
        )
    seen = mask[:, 0]
    if seen.dtype != torch.bool:
        seen = seen > torch.finfo(seen.dtype).min / 2
    if queries == 1:
        return seen, None
    last = seen[:, -1]
    # A row that is padding so far sees nothing; its text starts after this pass at the earliest.
    starts = torch.where(last.any(-1), last.long().argmax(-1), keys)
    at = torch.arange(keys, device=mask.device)
    real = at[keys - queries :, None] >= starts[:, None, None]
    expected = (at <= at[keys - queries :, None]) & (at >= starts[:, None, None])
    if bool(((seen != expected) & real).any()):
        raise UnsupportedModelError(
            "the attention mask is not causal with padding on the left, so windows have no place in it. Pad on the"
            " left, and use a decoder"
        )
    return seen, starts if bool(starts.any()) else None
