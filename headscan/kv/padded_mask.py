"""Attention masks of batches that are padded on the left.

Shapes: B sequences, N queries, S keys, H query heads.
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
        bias: Finite numbers that the mask adds to the scores (B or 1, 1 or H, N, S); None if the mask is bool.
        starts_B: Position of the first real token of each row (B or 1,); None if it is 0 in all, or was not requested.
        last_start: The largest of them.
    """

    seen_BNS: Tensor
    bias: Tensor | None
    starts_B: Tensor | None = None
    last_start: int = 0


class MaskReader:
    """Reads each mask once, although every layer of a model gets it.

    Finding the padding makes a GPU wait, so it happens only on request.

    Args:
        same: All layers get the same mask. The padding found on one device then holds for the copies that layers on
            other devices get in the same pass.
    """

    def __init__(self, *, same: bool = False) -> None:
        self._same = same
        self._mask: ref[Tensor] | None = None
        self._placed: SeenKeys | None = None

    def read(self, mask: Tensor, *, place: bool) -> SeenKeys:
        """Return the content of a mask (B or 1, 1 or H, N, S), bool (True means attend) or additive.

        Args:
            place: Find the first real token of each row.

        Raises:
            UnsupportedModelError: The mask is not causal with padding on the left; found only with ``place``.
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
            starts = self._placed.starts_B
            starts = None if starts is None else starts.to(mask.device, non_blocking=True)
            return replace(content, starts_B=starts, last_start=self._placed.last_start)
        return self._keep(mask, content)

    def _keep(self, mask: Tensor, content: SeenKeys) -> SeenKeys:
        placed = _placed(content)
        self._placed = placed
        self._mask = ref(mask, lambda _: self._forget())
        return placed

    def _forget(self) -> None:
        self._mask = self._placed = None


def _content(mask: Tensor) -> SeenKeys:
    if mask.dtype == torch.bool:
        return SeenKeys(mask.any(1) if mask.shape[1] > 1 else mask[:, 0], None)
    seen_BNS = (mask > torch.finfo(mask.dtype).min / 2).any(1)
    # A key that only some heads see stays hidden from the others by its bias.
    return SeenKeys(seen_BNS, mask.masked_fill(~seen_BNS[:, None], 0.0))


def _placed(content: SeenKeys) -> SeenKeys:
    seen = content.seen_BNS
    keys, last = seen.shape[2], seen[:, -1]
    # A row that is padding so far sees nothing; its text starts after this pass at the earliest.
    starts = torch.where(last.any(-1), last.long().argmax(-1), keys)
    # Row by row, because masks of long texts are large.
    if bool(torch.stack([_is_other(row, start) for row, start in zip(seen, starts, strict=True)]).any()):
        raise UnsupportedModelError(
            "the attention mask is not causal with padding on the left, so windows have no place in it. Pad on the"
            " left, and use a decoder; for layers with sliding windows, pass the model's configuration to PlanCache"
        )
    last_start = int(starts.max())
    return SeenKeys(seen, content.bias, starts if last_start else None, last_start)


def _is_other(seen_NS: Tensor, start: Tensor) -> Tensor:
    """Return whether the real queries of a row see other keys than the real ones until their own."""
    queries, keys = seen_NS.shape
    at = torch.arange(keys, device=seen_NS.device)
    query_at = at[keys - queries :, None]
    expected = (at <= query_at) & (at >= start)
    return ((seen_NS != expected) & (query_at >= start)).any()
