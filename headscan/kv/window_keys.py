"""Keys and values of KV heads that keep every token, or a window: the first tokens, and a ring of the last ones.

A token's index in its own text, without padding on the left, decides its slot: slot ``r`` for the first ``sink``
tokens, then ``sink + (r - sink) % recent``. So a new token replaces the one that leaves the window, and nothing
moves. The slots are allocated as the text grows, so a window that is wider than the text costs no more than a full
head.

Shapes: B sequences, N new tokens, S tokens so far, W slots (sink + recent at most), K KV heads, D and Dv widths of a
key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headscan.attention.cache_attention import PLAIN, ScoreTerms
from headscan.kv.kept_keys import Window
from headscan.kv.window_attention import grouped_attention, terms_at, window_attention

#: Tokens by which a buffer grows, so that it is copied once in so many steps.
GROWTH = 256


class FullKeys:
    """A buffer of keys and one of values of S ``tokens``, allocated ahead, so that adding a token copies nothing else:
    for ``max_tokens`` at once; None grows in steps.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Tensor:
        """Keys (B, K, S, D)."""
        assert self._buffers is not None
        return self._buffers[0][:, :, : self.tokens]

    @property
    def values(self) -> Tensor:
        """Values (B, K, S, Dv)."""
        assert self._buffers is not None
        return self._buffers[1][:, :, : self.tokens]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held; the buffers may have room for more."""
        return 0 if self._buffers is None else self.keys.nbytes + self.values.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self._buffers is None else sum(buffer.nbytes for buffer in self._buffers)

    def add(self, key_BKND: Tensor, value_BKND: Tensor) -> None:
        """Append the keys and values of new tokens."""
        end = self.tokens + key_BKND.shape[2]
        room = 0 if self._buffers is None else self._buffers[0].shape[2]
        if room < end:
            size = -(-end // GROWTH) * GROWTH
            if self._max_tokens is not None and end <= self._max_tokens:
                size = self._max_tokens
            self._buffers = (self._grown(0, key_BKND, size), self._grown(1, value_BKND, size))
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_BKND, value_BKND), strict=True):
            buffer[:, :, self.tokens : end] = new
        self.tokens = end

    def crop(self, tokens: int) -> None:
        """Remove the last tokens."""
        self.tokens -= tokens

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each buffer by the result of ``change``, which selects or repeats rows."""
        if self._buffers is not None:
            key, value = self._buffers
            self._buffers = (change(key), change(value))

    def _grown(self, which: int, like: Tensor, size: int) -> Tensor:
        B, K, _, D = like.shape
        buffer = like.new_empty(B, K, size, D)
        if self._buffers is not None:
            buffer[:, :, : self.tokens] = self._buffers[which][:, :, : self.tokens]
        return buffer


_Pair = tuple[Tensor, Tensor]


class WindowKeys:
    """The window of several KV heads of one layer; ``tokens`` counts those that are stored or have left the window.

    New tokens are *pending* until `commit` stores them, since the queries of one pass see different windows. A single
    token is stored at once, because the token that it replaces has left its window.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.tokens = 0
        self._starts_B: Tensor | None = None
        self._last_start = 0
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
    def slots(self) -> int:
        """Slots that have memory (W)."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots and of pending tokens."""
        return sum(x.nbytes for pair in (self._buffers, self._pending) if pair for x in pair)

    def set_starts(self, starts_B: Tensor | None, last_start: int) -> None:
        """Set the position of each row's first real token; ``last_start`` is the largest, None means 0 in all."""
        self._starts_B, self._last_start = starts_B, last_start

    def add(self, key_BKND: Tensor, value_BKND: Tensor, *, wait: bool) -> None:
        """Add new tokens; with ``wait`` they stay pending until `commit`, so that `crop` can remove them again."""
        self._allocate(self.tokens + self.pending + key_BKND.shape[2], (key_BKND, value_BKND))
        if key_BKND.shape[2] == 1 and not wait and self._pending is None:
            self._store_one(key_BKND, value_BKND)
        elif self._pending is None:
            self._pending = (key_BKND, value_BKND)
        else:
            self._pending = _both(lambda *x: torch.cat(x, 2), self._pending, (key_BKND, value_BKND))

    def moves(self, starts_B: Tensor | None, tokens: int) -> bool:
        """Return True if a row with real tokens among the first ``tokens`` would start elsewhere."""
        known = starts_B if self._starts_B is None else self._starts_B
        if known is None:
            return False
        old, new = (known.new_zeros(1) if starts is None else starts for starts in (self._starts_B, starts_B))
        return bool(((old != new) & ((old < tokens) | (new < tokens))).any())

    def attend(
        self, query_BKGND: Tensor, scale: float, terms: ScoreTerms = PLAIN, seen_BNS: Tensor | None = None
    ) -> Tensor:
        """Return the output (B, K, G, N, Dv) of the queries of the newest tokens; the bias of ``terms`` covers all
        tokens. ``seen_BNS`` (B or 1, 1, S) marks the keys that a single query sees, None all; queries of pending tokens
        see all real tokens before them.
        """
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
                starts_B=self._starts_B,
                terms=terms,
            )
        key, value = self._buffers
        seen, width = None, self.slots
        if self.tokens < width:
            key, value = key[:, :, : self.tokens], value[:, :, : self.tokens]
        if self._starts_B is not None and self.tokens < self._last_start + width:
            seen = (torch.arange(key.shape[2], device=key.device) < (self.tokens - self._starts_B)[:, None])[:, None]
        if terms.bias is not None or seen_BNS is not None:
            index = self._indices(key.shape[2], self.tokens)
            starts = 0 if self._starts_B is None else self._starts_B[:, None]
            position_BW = (index + starts).clamp(0, self.tokens - 1)
            terms = terms_at(terms, position_BW)
            if seen_BNS is not None:
                shown = seen_BNS[:, 0].expand(max(len(seen_BNS), len(position_BW)), -1)
                shown = shown.gather(1, position_BW.expand(len(shown), -1))[:, None]
                seen = shown if seen is None else seen & shown
        return grouped_attention(query_BKGND, key, value, scale, seen, terms=terms)

    def attend_all(
        self, query_BKGND: Tensor, scale: float, seen_BNS: Tensor | None, terms: ScoreTerms = PLAIN
    ) -> Tensor:
        """Return the output over all pending tokens, before any has left the window."""
        assert self._pending is not None and not self.tokens
        key, value = self._pending
        return grouped_attention(query_BKGND, key, value, scale, seen_BNS, causal=seen_BNS is None, terms=terms)

    def commit(self) -> None:
        """Store the pending tokens that are in the window after the last of them."""
        if self._pending is None:
            return
        assert self._buffers is not None
        C, P = self.tokens, self.pending
        starts = 0 if self._starts_B is None else self._starts_B[:, None]
        last = C + P - starts - 1  # index of each row's last token in its own text
        index = self._indices(self.slots, C + P)
        slot = torch.arange(self.slots, device=index.device)
        new = (index <= last) & (index >= slot.clamp_max(self.window.sink)) & (index + starts >= C)
        source = (index + starts - C).clamp(0, P - 1)
        new = new[:, None, :, None]
        self._buffers = _both(lambda x, old: torch.where(new, _rows(x, source), old), self._pending, self._buffers)
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
        if not self.tokens:
            self.set_starts(None, 0)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by the result of ``change``, which selects or repeats rows."""
        if self._buffers is not None:
            self._buffers = _both(change, self._buffers)
        if self._pending is not None:
            self._pending = _both(change, self._pending)
        if self._starts_B is not None:
            self._starts_B = change(self._starts_B)

    def _indices(self, slots: int, tokens: int) -> Tensor:
        """Return which token of its own text each slot holds after ``tokens`` tokens: (B or 1, slots)."""
        assert self._buffers is not None
        slot = torch.arange(slots, device=self._buffers[0].device)[None]
        last = tokens - 1 - (0 if self._starts_B is None else self._starts_B[:, None])
        return torch.where(slot < self.window.sink, slot, last - (last - slot).remainder(self.window.recent))

    def _allocate(self, tokens: int, like: _Pair) -> None:
        """Get memory for the slots of so many tokens."""
        slots = min(self.window.width, -(-tokens // GROWTH) * GROWTH)
        if slots <= self.slots:
            return
        # Zeros, because masked slots take part in products, where old NaN would spread.
        more = _both(lambda x: x.new_zeros(*x.shape[:2], slots - self.slots, x.shape[-1]), like)
        self._buffers = more if self._buffers is None else _both(lambda *x: torch.cat(x, 2), self._buffers, more)

    def _store_one(self, key_BK1D: Tensor, value_BK1D: Tensor) -> None:
        assert self._buffers is not None
        sink, recent = self.window.sink, self.window.recent
        if self._starts_B is None:
            r = self.tokens
            slot = r if r < sink else sink + (r - sink) % recent
            for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
                buffer[:, :, slot] = new[:, :, 0]
        else:
            # After `crop`, the text of a row may start later than this token, which is padding then.
            index = (self.tokens - self._starts_B).clamp_min(0)
            slots = torch.where(index < sink, index, sink + (index - sink).remainder(recent))[:, None, None, None]
            for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
                buffer.scatter_(2, slots.expand(new.shape), new)
        self.tokens += 1

    def _sink(self) -> _Pair:
        """Return keys and values of the first ``sink`` tokens of each row, stored or pending."""
        assert self._buffers is not None and self._pending is not None
        C = self.tokens
        sink = min(self.window.sink, C + self.pending)
        if self._starts_B is None:
            if sink <= C:
                return _both(lambda b: b[:, :, :sink], self._buffers)
            return _both(lambda b, x: torch.cat([b[:, :, :C], x[:, :, : sink - C]], 2), self._buffers, self._pending)
        at = self._starts_B[:, None] + torch.arange(sink, device=self._starts_B.device)
        pending = (at >= C)[:, None, :, None]
        source = (at - C).clamp(0, self.pending - 1)
        return _both(lambda b, x: torch.where(pending, _rows(x, source), b[:, :, :sink]), self._buffers, self._pending)

    def _tail(self) -> tuple[int, _Pair]:
        """Return the position of the first key of the tail, and the last stored tokens with those pending."""
        assert self._buffers is not None and self._pending is not None
        C, sink, recent = self.tokens, self.window.sink, self.window.recent
        known = min(C, recent - 1)
        if not known:
            return C, self._pending
        at = torch.arange(C - known, C, device=self._buffers[0].device)[None]
        if self._starts_B is not None:
            at = at - self._starts_B[:, None]
        # Tokens of the sink are masked in the tail, and so is padding, whose index is negative.
        slots = torch.where(at < sink, at.clamp_min(0), sink + (at - sink).remainder(recent))
        return C - known, _both(lambda b, x: torch.cat([_rows(b, slots), x], 2), self._buffers, self._pending)


def _both(change: Callable[..., Tensor], *pairs: _Pair) -> _Pair:
    """Return what ``change`` makes of the keys of all pairs, and of their values."""
    keys, values = zip(*pairs, strict=True)
    return change(*keys), change(*values)


def _rows(x_BKSD: Tensor, index_BR: Tensor) -> Tensor:
    """Return tokens (B, K, R, D) by index; an index with one row holds for all."""
    if len(index_BR) == 1:
        return x_BKSD[:, :, index_BR[0]]
    B, K, _, D = x_BKSD.shape
    return x_BKSD.gather(2, index_BR[:, None, :, None].expand(B, K, -1, D))
