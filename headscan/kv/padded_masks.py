"""Attention masks that are causal and hide padding: which tokens of each row are text.

Windows count the tokens of a row's text, so a mask must say which tokens these are: the keys that queries see. Padding
may be anywhere: on the left, between a prefix and the rest, on the right. Several documents in a row have no such
reading, because the first ones would be padding that attends.

Shapes: B sequences, H query heads, N queries, S tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor

from headscan.errors import UnsupportedModelError


@dataclass(frozen=True)
class SeenKeys:
    """The content of an attention mask.

    Attributes:
        seen_BNS: Which keys each query sees, bool (B or 1, N, S).
        bias: Finite numbers that the mask adds to the scores (B or 1, 1 or H, N, S); None if it adds none.
        real_BS: Which tokens are text, bool (B or 1, S); None if all are, or was not requested.
        gaps: Largest number of hidden tokens after the first one of a text.
    """

    seen_BNS: Tensor
    bias: Tensor | None
    real_BS: Tensor | None = None
    gaps: int = 0


class MaskReader:
    """Reads each mask once, because every layer receives the same one. Finding the padding makes a GPU wait, so it
    happens on request only. With ``same``, all layers get the same mask, and its padding holds for the copies on
    other devices.
    """

    def __init__(self, *, same: bool = False) -> None:
        self._same = same
        self._mask: ref[Tensor] | None = None
        self._placed: SeenKeys | None = None
        self._newest: tuple[ref[Tensor], bool] | None = None

    def read(self, mask: Tensor, *, place: bool) -> SeenKeys:
        """Return the content of a mask (B or 1, 1 or H, N, S), bool or additive; ``place`` finds the text of each row,
        or raises UnsupportedModelError.
        """
        if not place:
            return _content(mask)
        # The content shares the memory of the mask, which must not outlive the pass. A view would keep the mask alive.
        known, content = None if self._mask is None else self._mask(), _content(mask.detach())
        if known is None or self._placed is None:
            return self._keep(mask, content)
        if known is mask:
            return self._placed
        if self._same and known.device != mask.device and known.shape == mask.shape:
            real = self._placed.real_BS
            real = None if real is None else real.to(mask.device, non_blocking=True)
            return replace(content, real_BS=real, gaps=self._placed.gaps)
        return self._keep(mask, content)

    def shows_newest(self, mask: Tensor) -> bool:
        """Return True if the last query of every row sees its own key."""
        if self._newest is None or self._newest[0]() is not mask:
            self._newest = ref(mask), bool(_content(mask.detach()).seen_BNS[:, -1, -1].all())
        return self._newest[1]

    def _keep(self, mask: Tensor, content: SeenKeys) -> SeenKeys:
        placed = _placed(content)
        self._placed = placed
        self._mask = ref(mask, lambda _: self._forget())
        return placed

    def _forget(self) -> None:
        self._mask = self._placed = None


def _content(mask: Tensor) -> SeenKeys:
    if mask.dtype != torch.bool:
        seen_BNS = (mask > torch.finfo(mask.dtype).min / 2).any(1)
        # A key that only some heads see stays hidden from the others by its bias.
        return SeenKeys(seen_BNS, mask.masked_fill(~seen_BNS[:, None], 0.0))
    if mask.shape[1] == 1:
        return SeenKeys(mask[:, 0], None)
    seen_BNS = mask.any(1)
    hidden, lowest = seen_BNS[:, None] & ~mask, torch.finfo(torch.float32).min / 2
    return SeenKeys(seen_BNS, torch.zeros(mask.shape, device=mask.device).masked_fill_(hidden, lowest))


def _placed(content: SeenKeys) -> SeenKeys:
    seen = content.seen_BNS
    last = seen[:, -1]
    # The last query sees all text, unless it is padding that sees nothing.
    real_BS = torch.where(last.any(-1, keepdim=True), last, seen.any(1))
    at = torch.arange(real_BS.shape[1], device=seen.device)
    inside = (at > real_BS.long().argmax(-1, keepdim=True)) & real_BS.any(-1, keepdim=True)
    gaps = (inside & ~real_BS).sum(-1).max()
    # Row by row, because masks of long texts are large.
    other = torch.stack([_is_other(*row) for row in zip(seen, real_BS, strict=True)]).any()
    is_other, all_real, most_gaps = torch.stack([other.long(), real_BS.all().long(), gaps]).tolist()
    if is_other:
        raise UnsupportedModelError(
            "the attention mask is not causal with the same hidden tokens for all queries, so windows have no place in"
            " it. Give each document a row of its own, and hide padding only; use a decoder; for layers with sliding"
            " windows, pass the model's configuration to PlanCache"
        )
    return SeenKeys(seen, content.bias, None if all_real else real_BS, most_gaps)


def _is_other(seen_NS: Tensor, real_S: Tensor) -> Tensor:
    """Return whether a query sees other keys than the text until its own token.

    A query of padding may also see nothing, or everything, as masks for some kernels have it, or, if no text comes
    before it, itself alone, which is how `WindowKeys` answers it.
    """
    N, S = seen_NS.shape
    at = torch.arange(S, device=seen_NS.device)
    expected = (at <= at[S - N :, None]) & real_S
    count = seen_NS.sum(1)
    itself = (count == 1) & seen_NS.diagonal(S - N) & ~expected.any(1)
    free = ~real_S[S - N :] & ((count == 0) | (count == S) | itself)
    return ((seen_NS != expected).any(1) & ~free).any()
