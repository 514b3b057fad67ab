"""Attention from explicit weights, a block of queries at a time: exact for any mask, memory linear in the length.

It serves what fused calls do not (soft caps, position biases, odd masks, whatever needs the weights themselves), and
tests hold the fused path against it.

Shapes: B sequences, N queries, S keys, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Queries whose weights exist at one time, and how many weights these may be.
BLOCK, MAX_WEIGHTS = 128, 1 << 23


@dataclass(frozen=True)
class Scores:
    """What the scores of a call are made of, float32 or wider.

    Attributes:
        query_BHND, key_BKSD: Positions already encoded.
        scale: Factor of the scores.
        causal: No query sees a later key.
        window: How many keys a query sees, itself included, if bounded.
        mask: (B or 1, H or 1, N, S), bool (True: attend) or additive.
        bias: (B or 1, H or 1, N or 1, S), added to the scores.
        softcap: Scores pass ``softcap * tanh(s / softcap)`` before the mask.
        sinks_BHN: Learned logit that takes its share of a query's softmax, (B or 1, H, N or 1).
        past: At which key the first query stands.
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
        """Log-weights (B, H, R, C) of the queries with index ``position_BR`` (B or 1, R) on the keys of a slice.

        The slice has to hold every key that these queries see.
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
        # A query of padding may see nothing at all: its weights are 0, and not NaN that later layers would spread.
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        if self.sinks_BHN is not None:
            lse = torch.logaddexp(lse, _rows(self.sinks_BHN[..., None], position_BR, slice(None)).to(lse.dtype))
        return scores - lse if torch.is_grad_enabled() else scores.sub_(lse)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of queries, the keys they may see, and their log-weights (B, H, R, C)."""
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
    """The rows of a mask, bias or sink (B or 1, H or 1, N or 1, S or 1) at ``position_BR`` (B or 1, R)."""
    mask = mask[..., keys]
    if mask.shape[2] == 1:
        return mask
    if len(position_BR) == 1:
        return mask[:, :, position_BR[0]]
    mask = mask.expand(len(position_BR), -1, -1, -1)
    return torch.stack([rows[:, at] for rows, at in zip(mask, position_BR, strict=True)])


def attend(scores: Scores, value_BKSD: Tensor, take: Callable[[Tensor, Tensor, int, int], None]) -> Tensor:
    """The output (B, H, N, Dv); ``take`` is given each block's weights, log-weights, and its first query and key."""
    K, Dv = value_BKSD.shape[1], value_BKSD.shape[-1]
    outs: list[Tensor] = []
    for rows, keys, log_weights in scores.blocks():
        weights = log_weights.exp()
        B, H, R, C = weights.shape
        value = value_BKSD[:, :, keys]
        outs.append((weights.reshape(B, K, (H // K) * R, C) @ value).reshape(B, H, R, Dv))
        take(weights, log_weights, scores.past + rows.start, keys.start)
    return torch.cat(outs, 2)
