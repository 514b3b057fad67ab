"""Keys and values of KV heads that keep every token or a window of first and last ones, and attention to them.

A query at position ``p`` sees the ``sink`` first keys of its text, and the keys at positions ``p - recent + 1`` to
``p`` (streaming heads of arXiv 2309.17453 and 2410.10819). Time and memory are linear in the length, and the result is
differentiable.

A token's index in its own text, without padding on the left, decides its slot: slot ``r`` for the first ``sink``
tokens, then ``sink + (r - sink) % recent``. So a new token replaces the one that leaves the window, and nothing
moves. The slots are allocated as the text grows, so a window that is wider than the text costs no more than a full
head.

Shapes: B sequences, N queries or new tokens, S tokens so far or sink keys, T other keys, W slots (sink + recent at
most), K KV heads, G query heads per KV head, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.cache_attention import PLAIN, ScoreTerms, scored_output
from headscan.attention.fused import differentiated
from headscan.kv.decode_attention import flash_output, one_query_attention
from headscan.kv.kept_keys import Window

#: Queries in one block; a GPU runs few large blocks faster, a CPU small ones.
_BLOCK = {"cpu": 128}
_GPU_BLOCK = 1024
#: Largest number of elements of a mask that is copied for every KV head.
_MOST_MASK = 1 << 26


def window_attention(
    query_BKGND: Tensor,
    sink_keys: tuple[Tensor, Tensor],
    tail_keys: tuple[Tensor, Tensor],
    recent: int,
    scale: float,
    *,
    tail_start: int = 0,
    starts_B: Tensor | None = None,
    terms: ScoreTerms = PLAIN,
) -> Tensor:
    """Return the output (B, K, G, N, Dv) of window heads.

    Args:
        sink_keys: Keys (B, K, S, D) and values (B, K, S, Dv) of the first tokens of each text.
        tail_keys: Keys (B, K, T, D) and values of the last T tokens, the queries' own at the end; at least the last
            ``recent - 1 + N`` tokens, or all. Keys of the sink among them are left out.
        recent: Number of last keys that a query sees, its own included.
        tail_start: Position of the first key of ``tail_keys``.
        starts_B: Position of the first real token of each row, for batches padded on the left; None if all are 0.
            Outputs of padding are finite and have no meaning.
        terms: Changes of the scores; its bias covers the keys of all tokens.
    """
    (sink_key, sink_value), (tail_key, tail_value) = sink_keys, tail_keys
    N, S, T = query_BKGND.shape[3], sink_key.shape[2], tail_key.shape[2]
    block = _BLOCK.get(query_BKGND.device.type, _GPU_BLOCK)
    outs = []
    for start in range(0, N, block):
        stop = min(start + block, N)
        # Indices into the tail: the first key that the block's first query sees, and the last query's own.
        first, last = max(0, T - N + start - recent + 1), T - N + stop
        key = torch.cat([sink_key, tail_key[:, :, first:last]], 2)
        value = torch.cat([sink_value, tail_value[:, :, first:last]], 2)
        seen_BNS = _seen(S, tail_start + first, tail_start + last, stop - start, recent, starts_B, key.device)
        query, part = query_BKGND[:, :, :, start:stop], terms
        if terms.any:
            position = _positions(S, tail_start + first, tail_start + last, starts_B, key.device)
            part = terms_at(terms, position, slice(start, stop))
        outs.append(grouped_attention(query, key, value, scale, seen_BNS, terms=part))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 3)


def windowed_output(
    query_BHND: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, sink: int, recent: int, scale: float
) -> Tensor:
    """Return the output (B, H, N, Dv) of heads with one window; the queries are the last of all tokens."""
    K = key_BKSD.shape[1]
    out = window_attention(
        query_BHND.unflatten(1, (K, -1)),
        (key_BKSD[:, :, :sink], value_BKSD[:, :, :sink]),
        (key_BKSD, value_BKSD),
        recent,
        scale,
    )
    return out.flatten(1, 2)


def grouped_attention(
    query_BKGND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    scale: float,
    seen_BNS: Tensor | None,
    *,
    causal: bool = False,
    terms: ScoreTerms = PLAIN,
) -> Tensor:
    """Return attention (B, K, G, N, Dv) over the keys that ``seen_BNS`` (B or 1, N, S) marks; None marks all. A KV head
    serves its group by a stride of zero. ``causal`` needs no ``seen_BNS``: the queries are those of the last keys, and
    see no later ones. The bias of ``terms`` covers these keys.
    """
    B, K, G, N, D = query_BKGND.shape
    S = key_BKSD.shape[2]
    if N == 1 and not terms.any:
        return one_query_attention(query_BKGND[:, :, :, 0], key_BKSD, value_BKSD, scale, seen_BNS).unsqueeze(3)
    if terms.any:
        mask = None if seen_BNS is None else seen_BNS[:, None]
        return scored_output(query_BKGND.flatten(1, 2), key_BKSD, value_BKSD, scale, mask, terms).unflatten(1, (K, G))
    if causal and N < S:
        out = flash_output(query_BKGND.flatten(1, 2).transpose(1, 2), key_BKSD, value_BKSD, scale)
        if out is not None:
            return out.transpose(1, 2).unflatten(1, (K, G))
        at, causal = torch.arange(S, device=query_BKGND.device), False
        seen_BNS = (at <= at[S - N :, None])[None]
    if seen_BNS is not None and len(seen_BNS) > 1 and B * K * N * S > _MOST_MASK:
        rows = zip(*(x.split(1) for x in (query_BKGND, key_BKSD, value_BKSD, seen_BNS)), strict=True)
        return torch.cat([grouped_attention(query, key, value, scale, seen) for query, key, value, seen in rows])
    query = query_BKGND.reshape(B * K, G, N, D)
    key, value = (x.reshape(B * K, 1, S, x.shape[-1]).expand(-1, G, -1, -1) for x in (key_BKSD, value_BKSD))
    mask = None
    if seen_BNS is not None:
        mask = seen_BNS if len(seen_BNS) == 1 else seen_BNS.repeat_interleave(K, 0)
        mask = mask[:, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return out.unflatten(0, (B, K))


def terms_at(terms: ScoreTerms, position_BS: Tensor, queries: slice = slice(None)) -> ScoreTerms:
    """Return the changes of the scores of some queries with the keys at ``position_BS`` (B or 1, S)."""
    bias, sinks = terms.bias, terms.sinks_BHN
    if sinks is not None and sinks.shape[2] > 1:
        sinks = sinks[:, :, queries]
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias[:, :, queries]
        if len(position_BS) == 1:
            bias = bias[..., position_BS[0]]
        else:
            B = len(position_BS)
            index = position_BS[:, None, None].expand(B, *bias.shape[1:3], -1)
            bias = bias.expand(B, -1, -1, -1).gather(3, index)
    return replace(terms, bias=bias, sinks_BHN=sinks)


def seen_by_window(
    queries: int, keys: int, sink: int, recent: int, device: torch.device, starts_B: Tensor | None = None
) -> Tensor:
    """Return which keys each query sees: bool (B or 1, N, S); the queries belong to the last tokens."""
    query_at = torch.arange(keys - queries, keys, device=device)[:, None]
    key_at = torch.arange(keys, device=device)
    starts = torch.zeros(1, 1, 1, dtype=torch.long, device=device) if starts_B is None else starts_B[:, None, None]
    near = query_at - key_at < recent
    return (key_at <= query_at) & (key_at >= starts) & (near | (key_at < starts + sink))


def _seen(
    sinks: int, first: int, last: int, queries: int, recent: int, starts_B: Tensor | None, device: torch.device
) -> Tensor:
    """Return which sink keys, then which keys at ``first`` to ``last - 1``, the last queries see: (B or 1, N, S)."""
    starts = torch.zeros(1, 1, 1, dtype=torch.long, device=device) if starts_B is None else starts_B[:, None, None]
    query_at = torch.arange(last - queries, last, device=device)[:, None]
    key_at = torch.arange(first, last, device=device)
    sink_at = torch.arange(sinks, device=device)
    in_tail = (key_at <= query_at) & (query_at - key_at < recent) & (key_at >= starts + sinks)
    in_sink = starts + sink_at <= query_at
    # A padding query sees one key, because attention to no key would be NaN and spread to later layers.
    in_sink = in_sink | ((query_at < starts) & (sink_at == 0))
    if not sinks:
        in_tail = in_tail | ((query_at < starts) & (key_at == query_at))
    return torch.cat([in_sink.expand(*in_tail.shape[:2], sinks), in_tail], 2)


def _positions(sinks: int, first: int, last: int, starts_B: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions (B or 1, S) of the sink keys, then of the keys at ``first`` to ``last - 1``."""
    starts = torch.zeros(1, 1, dtype=torch.long, device=device) if starts_B is None else starts_B[:, None]
    sink_at = (starts + torch.arange(sinks, device=device)).clamp_max(last - 1)
    return torch.cat([sink_at, torch.arange(first, last, device=device).expand(len(starts), -1)], 1)


#: Tokens by which a buffer grows, so that it is copied once in so many steps.
GROWTH = 256


_Pair = tuple[Tensor, Tensor]


class _Buffers:
    """Buffers of the keys and values of several KV heads, which ``tokens`` tokens fill from the first place on."""

    def __init__(self) -> None:
        self.tokens = 0
        self._buffers: _Pair | None = None

    @property
    def keys(self) -> Tensor:
        """Keys (B, K, S, D) in the places in use."""
        return self._used(0)

    @property
    def values(self) -> Tensor:
        """Values (B, K, S, Dv) in the places in use."""
        return self._used(1)

    def _used(self, which: int) -> Tensor:
        assert self._buffers is not None
        buffer = self._buffers[which]
        return buffer.narrow(2, 0, self.tokens) if self.tokens < buffer.shape[2] else buffer

    @property
    def slots(self) -> int:
        """Places that have memory."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held; the buffers may have room for more."""
        return 0 if self._buffers is None else self.keys.nbytes + self.values.nbytes

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._buffers is None else sum(buffer.nbytes for buffer in self._buffers)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by the result of ``change``, which selects or repeats rows."""
        if self._buffers is not None:
            self._buffers = _both(change, self._buffers)


class FullKeys(_Buffers):
    """Keys and values of all S tokens, with memory allocated ahead: for ``max_tokens``, or in steps if it is None."""

    def __init__(self, max_tokens: int | None) -> None:
        super().__init__()
        self._max_tokens = max_tokens

    def add(self, key_BKND: Tensor, value_BKND: Tensor, heads: Tensor | None = None) -> None:
        """Add new tokens; ``heads`` (K,) selects KV heads of the tensors, and None takes all."""
        end = self.tokens + key_BKND.shape[2]
        if self.slots < end:
            size = -(-end // GROWTH) * GROWTH
            if self._max_tokens is not None and end <= self._max_tokens:
                size = self._max_tokens
            kv_heads = key_BKND.shape[1] if heads is None else len(heads)
            larger = _both(lambda x: x.new_empty(len(x), kv_heads, size, x.shape[3]), (key_BKND, value_BKND))
            if self._buffers is not None:
                for new, old in zip(larger, self._buffers, strict=True):
                    new[:, :, : self.tokens] = old[:, :, : self.tokens]
            self._buffers = larger
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_BKND, value_BKND), strict=True):
            _write(buffer.narrow(2, self.tokens, end - self.tokens), new, heads)
        self.tokens = end

    def crop(self, tokens: int) -> None:
        self.tokens -= tokens


class WindowKeys(_Buffers):
    """The window of several KV heads of one layer; ``tokens`` counts those that are stored or have left the window.

    New tokens are *pending* until `commit` stores them, since the queries of one pass see different windows. A single
    token is stored at once, because the token that it replaces has left its window.
    """

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window
        self._starts_B: Tensor | None = None
        self._last_start = 0
        self._pending: _Pair | None = None

    @property
    def pending(self) -> int:
        """Tokens that are not stored yet."""
        return 0 if self._pending is None else self._pending[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use and of pending tokens."""
        return super().nbytes + self._pending_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots and of pending tokens."""
        return super().allocated_bytes + self._pending_bytes

    @property
    def _pending_bytes(self) -> int:
        return 0 if self._pending is None else sum(x.nbytes for x in self._pending)

    @property
    def aligned(self) -> bool:
        """True if no token is pending, and all rows start at position 0, so that a single query sees all `keys`."""
        return self._pending is None and self._starts_B is None

    def set_starts(self, starts_B: Tensor | None, last_start: int) -> None:
        """Set the position of each row's first real token; ``last_start`` is the largest, None means 0 in all."""
        self._starts_B, self._last_start = starts_B, last_start

    def add(self, key_BKND: Tensor, value_BKND: Tensor, heads: Tensor | None = None, *, wait: bool) -> None:
        """Add new tokens; ``heads`` (K,) selects KV heads of the tensors, and None takes all. With ``wait`` they stay
        pending until `commit`, so that `crop` can remove them again.
        """
        kv_heads = key_BKND.shape[1] if heads is None else len(heads)
        self._allocate(self.tokens + self.pending + key_BKND.shape[2], (key_BKND, value_BKND), kv_heads)
        at_once = key_BKND.shape[2] == 1 and not wait and self._pending is None
        if at_once and self._starts_B is None:
            self._store_one(key_BKND, value_BKND, heads)
            return
        if heads is not None:
            key_BKND, value_BKND = key_BKND.index_select(1, heads), value_BKND.index_select(1, heads)
        if at_once:
            self._store_in_rows(key_BKND, value_BKND)
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
        key, value = self.keys, self.values
        seen, width = None, self.slots
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
        self._buffers = _both(lambda x, old: torch.where(new, _tokens_at(x, source), old), self._pending, self._buffers)
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
        super().change_rows(change)
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

    def _allocate(self, tokens: int, like: _Pair, kv_heads: int) -> None:
        slots = min(self.window.width, -(-tokens // GROWTH) * GROWTH)
        if slots <= self.slots:
            return
        # Zeros, because masked slots take part in products, where old NaN would spread.
        more = _both(lambda x: x.new_zeros(len(x), kv_heads, slots - self.slots, x.shape[-1]), like)
        self._buffers = more if self._buffers is None else _both(lambda *x: torch.cat(x, 2), self._buffers, more)

    def _store_one(self, key_BK1D: Tensor, value_BK1D: Tensor, heads: Tensor | None) -> None:
        assert self._buffers is not None
        r, sink = self.tokens, self.window.sink
        slot = r if r < sink else sink + (r - sink) % self.window.recent
        for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
            _write(buffer.narrow(2, slot, 1), new, heads)
        self.tokens += 1

    def _store_in_rows(self, key_BK1D: Tensor, value_BK1D: Tensor) -> None:
        """Store a token of rows that start at different positions."""
        assert self._buffers is not None and self._starts_B is not None
        sink, recent = self.window.sink, self.window.recent
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
        return _both(
            lambda b, x: torch.where(pending, _tokens_at(x, source), b[:, :, :sink]), self._buffers, self._pending
        )

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
        return C - known, _both(lambda b, x: torch.cat([_tokens_at(b, slots), x], 2), self._buffers, self._pending)


def _write(place_BKND: Tensor, new_BKND: Tensor, heads: Tensor | None) -> None:
    """Copy tokens into a buffer, by one operator; ``heads`` (K,) selects their KV heads, and None takes all."""
    if heads is None:
        place_BKND.copy_(new_BKND)
    elif new_BKND.dtype != place_BKND.dtype or differentiated(new_BKND, place_BKND):
        place_BKND.copy_(new_BKND.index_select(1, heads))
    else:
        torch.index_select(new_BKND, 1, heads, out=place_BKND)


def _both(change: Callable[..., Tensor], *pairs: _Pair) -> _Pair:
    """Return what ``change`` makes of the keys of all pairs, and of their values."""
    keys, values = zip(*pairs, strict=True)
    return change(*keys), change(*values)


def _tokens_at(x_BKSD: Tensor, index_BR: Tensor) -> Tensor:
    """Return tokens (B, K, R, D) by index; an index with one row holds for all."""
    if len(index_BR) == 1:
        return x_BKSD[:, :, index_BR[0]]
    B, K, _, D = x_BKSD.shape
    return x_BKSD.gather(2, index_BR[:, None, :, None].expand(B, K, -1, D))
