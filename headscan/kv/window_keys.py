"""Keys and values of KV heads that keep a window: the first tokens, and a ring of the last ones.

A token's index in its own text, without padding on the left, decides its slot: slot ``r`` for the first ``sink``
tokens, then ``sink + (r - sink) % recent``. So a new token replaces the one that leaves the window, and nothing moves.

Shapes: B sequences, N new tokens, W = sink + recent slots, K KV heads, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headscan.kv.kept_keys import Window
from headscan.kv.window_attention import grouped_attention, window_attention

_Pair = tuple[Tensor, Tensor]


class WindowKeys:
    """The window of several KV heads of one layer.

    New tokens are *pending* until `commit` stores them, since the queries of one pass see different windows. A single
    token is stored at once, because the token that it replaces has left its window.

    Attributes:
        tokens: Tokens of the text that are stored or have left the window; those pending come after them.
        starts_B: Position of the first real token of each row; None if all are 0.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.tokens = 0
        self.starts_B: Tensor | None = None
        self._buffers: _Pair | None = None
        self._pending: _Pair | None = None

    @property
    def pending(self) -> int:
        """Tokens that are not stored yet."""
        return 0 if self._pending is None else self._pending[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use and of pending tokens."""
        stored = 0 if self._buffers is None else sum(b[:, :, : self.tokens].nbytes for b in self._buffers)
        return stored + (0 if self._pending is None else sum(x.nbytes for x in self._pending))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots and of pending tokens."""
        return sum(x.nbytes for pair in (self._buffers, self._pending) if pair for x in pair)

    def add(self, key_BKND: Tensor, value_BKND: Tensor, *, wait: bool) -> None:
        """Add new tokens.

        Args:
            wait: Keep the tokens pending until `commit`, so that `crop` can remove them again.
        """
        if self._buffers is None:
            B, K = key_BKND.shape[:2]
            size = self.window.width
            # Zeros, because masked slots take part in products, where old NaN would spread.
            self._buffers = tuple(x.new_zeros(B, K, size, x.shape[-1]) for x in (key_BKND, value_BKND))  # type: ignore[assignment]
        if key_BKND.shape[2] == 1 and not wait and self._pending is None:
            self._store_one(key_BKND, value_BKND)
        elif self._pending is None:
            self._pending = (key_BKND, value_BKND)
        else:
            old_key, old_value = self._pending
            self._pending = (torch.cat([old_key, key_BKND], 2), torch.cat([old_value, value_BKND], 2))

    def attend(self, query_BKGND: Tensor, scale: float) -> Tensor:
        """Return the output (B, K, G, N, Dv) of the queries of the newest tokens."""
        assert self._buffers is not None
        if self._pending is not None:
            tail_start, tail = self._tail()
            return window_attention(
                query_BKGND,
                self._sink(),
                tail,
                self.window.recent,
                scale,
                tail_start=tail_start,
                starts_B=self.starts_B,
            )
        key, value = self._buffers
        seen = None
        if self.tokens < self.window.width:
            key, value = key[:, :, : self.tokens], value[:, :, : self.tokens]
        if self.starts_B is not None:
            seen = (torch.arange(key.shape[2], device=key.device) < (self.tokens - self.starts_B)[:, None])[:, None]
        return grouped_attention(query_BKGND, key, value, scale, seen)

    def attend_all(self, query_BKGND: Tensor, scale: float, seen_BNS: Tensor | None) -> Tensor:
        """Return the output over all pending tokens, before any has left the window."""
        assert self._pending is not None and not self.tokens
        key, value = self._pending
        return grouped_attention(query_BKGND, key, value, scale, seen_BNS, causal=seen_BNS is None)

    def commit(self) -> None:
        """Store the pending tokens that are in the window after the last of them."""
        if self._pending is None:
            return
        assert self._buffers is not None
        C, P, (sink, recent) = self.tokens, self.pending, (self.window.sink, self.window.recent)
        device = self._buffers[0].device
        starts = torch.zeros(1, 1, dtype=torch.long, device=device) if self.starts_B is None else self.starts_B[:, None]
        slot = torch.arange(self.window.width, device=device)[None]
        last = C + P - starts - 1  # index of each row's last token in its own text
        index = torch.where(slot < sink, slot, last - (last - slot).remainder(recent))
        new = (index <= last) & (index >= slot.clamp_max(sink)) & (index + starts >= C)
        source = (index + starts - C).clamp(0, P - 1)
        self._buffers = tuple(  # type: ignore[assignment]
            torch.where(new[:, None, :, None], _rows(x, source), old)
            for x, old in zip(self._pending, self._buffers, strict=True)
        )
        self.tokens, self._pending = C + P, None

    def can_crop(self, tokens: int) -> bool:
        """Return True if the last tokens can be removed: they are pending, or none has left the window."""
        return tokens <= self.pending or self.tokens <= self.window.width

    def crop(self, tokens: int) -> None:
        """Remove the last tokens, and store those still pending."""
        waiting = self.pending
        if self._pending is not None and tokens:
            kept = max(0, waiting - tokens)
            key, value = self._pending
            self._pending = (key[:, :, :kept], value[:, :, :kept]) if kept else None
        self.tokens -= max(0, tokens - waiting)
        self.commit()

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by the result of ``change``, which selects or repeats rows."""
        for name in ("_buffers", "_pending"):
            pair = getattr(self, name)
            if pair is not None:
                setattr(self, name, tuple(change(x) for x in pair))
        if self.starts_B is not None:
            self.starts_B = change(self.starts_B)

    def _store_one(self, key_BK1D: Tensor, value_BK1D: Tensor) -> None:
        assert self._buffers is not None
        sink, recent = self.window.sink, self.window.recent
        if self.starts_B is None:
            r = self.tokens
            slot = r if r < sink else sink + (r - sink) % recent
            for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
                buffer[:, :, slot] = new[:, :, 0]
        else:
            index = self.tokens - self.starts_B
            slots = torch.where(index < sink, index, sink + (index - sink).remainder(recent))[:, None, None, None]
            for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
                buffer.scatter_(2, slots.expand(new.shape), new)
        self.tokens += 1

    def _sink(self) -> _Pair:
        """Return keys and values of the first ``sink`` tokens of each row, stored or pending."""
        assert self._buffers is not None and self._pending is not None
        C, sink = self.tokens, self.window.sink
        if self.starts_B is None:
            if sink <= C:
                return tuple(b[:, :, :sink] for b in self._buffers)  # type: ignore[return-value]
            pairs = zip(self._buffers, self._pending, strict=True)
            return tuple(torch.cat([b[:, :, :C], x[:, :, : sink - C]], 2) for b, x in pairs)  # type: ignore[return-value]
        at = self.starts_B[:, None] + torch.arange(sink, device=self.starts_B.device)
        pending = (at >= C)[:, None, :, None]
        source = (at - C).clamp(0, self.pending - 1)
        pairs = zip(self._buffers, self._pending, strict=True)
        return tuple(torch.where(pending, _rows(x, source), b[:, :, :sink]) for b, x in pairs)  # type: ignore[return-value]

    def _tail(self) -> tuple[int, _Pair]:
        """Return the position of the first key of the tail, and the last stored tokens with those pending."""
        assert self._buffers is not None and self._pending is not None
        C, sink, recent = self.tokens, self.window.sink, self.window.recent
        known = min(C, recent - 1)
        if not known:
            return C, self._pending
        at = torch.arange(C - known, C, device=self._buffers[0].device)[None]
        if self.starts_B is not None:
            at = at - self.starts_B[:, None]
        # Tokens of the sink are masked in the tail, and so is padding, whose index is negative.
        slots = torch.where(at < sink, at.clamp_min(0), sink + (at - sink).remainder(recent))
        pairs = zip(self._buffers, self._pending, strict=True)
        return C - known, tuple(torch.cat([_rows(b, slots), x], 2) for b, x in pairs)  # type: ignore[return-value]


def _rows(x_BKSD: Tensor, index_BR: Tensor) -> Tensor:
    """Return tokens (B, K, R, D) by index; an index with one row holds for all."""
    if len(index_BR) == 1:
        return x_BKSD[:, :, index_BR[0]]
    B, K, _, D = x_BKSD.shape
    return x_BKSD.gather(2, index_BR[:, None, :, None].expand(B, K, -1, D))
