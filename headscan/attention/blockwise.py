"""Attention from explicit weights, one block of queries at a time.

It is exact for any mask, and its memory is linear in the length.

It supports soft caps, position biases, arbitrary masks and statistics of explicit weights, which fused calls do not.
Tests compare the fused path with it.

Shapes: B sequences, N queries, S keys, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Largest number of queries, and of weights, in one block.
BLOCK, MAX_WEIGHTS = 128, 1 << 23


@dataclass(frozen=True)
class Scores:
    """The inputs of a call's scores, float32 or wider.

    Attributes:
        query_BHND, key_BKSD: With positions encoded.
        scale: Factor of the scores.
        causal: No query sees a later key.
        window: Number of keys that a query sees, its own included; None means no window.
        mask: (B or 1, H or 1, N, S), bool (True means attend) or additive; None masks nothing.
        bias: (B or 1, H or 1, N or 1, S), added to the scores; None adds nothing.
        softcap: Cap c of ``c * tanh(s / c)``, applied before the mask; None disables it.
        sinks_BHN: Learned sink logit in a query's softmax, (B or 1, H, N or 1); None without a learned sink.
        past: Number of keys before the first query's own.
    """

    query_BHND: Tensor
    key_BKSD: Tensor
    scale: float
    causal: bool
    window: int | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks_BHN: Tensor | None = None
    past: int = 0

    def log_weights(self, query_BHRD: Tensor, position_BR: Tensor, keys: slice) -> Tensor:
        """Return log-weights (B, H, R, C) of some queries on some keys.

        The queries are those at ``position_BR`` (B or 1, R); the keys are a slice.

        The slice must contain every key that these queries see.
        """
        key = self.key_BKSD[:, :, keys]
        B, H, R, D = query_BHRD.shape
        K, C = key.shape[1:3]
        grouped = query_BHRD.reshape(B, K, (H // K) * R, D)
        scores = (self.scale * (grouped @ key.mT)).reshape(B, H, R, C)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + _rows(self.bias, position_BR, keys)
        query_at = position_BR[:, :, None] + self.past
        key_at = torch.arange(self.key_BKSD.shape[2], device=key.device)[keys]
        if self.causal:
            scores = scores.masked_fill((key_at > query_at)[:, None], float("-inf"))
        if self.window is not None:
            far = (query_at - key_at).abs() >= self.window
            scores = scores.masked_fill(far[:, None], float("-inf"))
        if self.mask is not None:
            mask = _rows(self.mask, position_BR, keys)
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        lse = scores.logsumexp(-1, keepdim=True)
        # A padding query may see no key. Its weights are set to 0, because NaN would spread through later layers.
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        if self.sinks_BHN is not None:
            lse = torch.logaddexp(lse, _rows(self.sinks_BHN[..., None], position_BR, slice(None)).to(lse.dtype))
        return scores - lse if torch.is_grad_enabled() else scores.sub_(lse)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks of queries with their keys and log-weights (B, H, R, C)."""
        B, H, N, _ = self.query_BHND.shape
        S = self.key_BKSD.shape[2]
        rows = max(16, min(BLOCK, MAX_WEIGHTS // (B * H * S)))
        for start in range(0, N, rows):
            stop = min(start + rows, N)
            first = 0 if self.window is None else max(0, self.past + start - self.window + 1)
            keys = slice(first, self.past + stop if self.causal else S)
            position = torch.arange(start, stop, device=self.query_BHND.device)[None]
            yield slice(start, stop), keys, self.log_weights(self.query_BHND[:, :, start:stop], position, keys)


def _rows(mask: Tensor, position_BR: Tensor, keys: slice) -> Tensor:
    """Return the rows of a mask, bias or sink (B or 1, H or 1, N or 1, S or 1) at ``position_BR`` (B or 1, R)."""
    mask = mask[..., keys]
    if mask.shape[2] == 1:
        return mask
    if len(position_BR) == 1:
        return mask[:, :, position_BR[0]]
    mask = mask.expand(len(position_BR), -1, -1, -1)
    return torch.stack([rows[:, at] for rows, at in zip(mask, position_BR, strict=True)])


def attend(scores: Scores, value_BKSD: Tensor, take: Callable[[Tensor, Tensor, int, int], None]) -> Tensor:
    """Return the output (B, H, N, Dv), computed block by block.

    ``take`` receives the weights, log-weights, first query and first key of each block.
    """
    K, Dv = value_BKSD.shape[1], value_BKSD.shape[-1]
    outs: list[Tensor] = []
    for rows, keys, log_weights in scores.blocks():
        weights = log_weights.exp()
        B, H, R, C = weights.shape
        value = value_BKSD[:, :, keys]
        outs.append((weights.reshape(B, K, (H // K) * R, C) @ value).reshape(B, H, R, Dv))
        take(weights, log_weights, scores.past + rows.start, keys.start)
    return torch.cat(outs, 2)
