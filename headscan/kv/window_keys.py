"""Keys and values of KV heads that keep every token or a window of first and last ones, and attention to them.

A query at position ``p`` sees the ``sink`` first keys of its text, and the keys at positions ``p - recent + 1`` to
``p`` (streaming heads of arXiv 2309.17453 and 2410.10819), in blocks and chunks if the window has them. Time and memory
are linear in the length, and the result is differentiable.

A token's index in its own text, without padding, decides its slot: slot ``r`` for the ``first`` tokens of the window,
then ``first + (r - first) % last``. So a new token replaces one that has left the window, and nothing moves. The slots
are allocated as the text grows, so a window that is wider than the text costs no more than a full head.

Shapes: B sequences, N queries or new tokens, S tokens so far or sink keys, T other keys, W slots (first + last at
most), K KV heads, G query heads per KV head, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.cache_attention import PLAIN, ScoreTerms, scored_output
from headscan.attention.fused import differentiated
from headscan.kv.decode_attention import flash_output, one_query_attention
from headscan.windows import Window, whole_blocks

#: Queries in one block; a GPU runs few large blocks faster, a CPU small ones.
_BLOCK = {"cpu": 128}
_GPU_BLOCK = 1024
#: Largest number of elements of a mask that is copied for every KV head.
_MOST_MASK = 1 << 26


class RowsOfTail(NamedTuple):
    """Places of the tail's keys in rows with padding.

    Attributes:
        key_BT: Index of each key of the tail in its own text; negative for padding.
        query_BN: Index of the last token of the text until each query; negative before the text.
        sink_at_BS: Position of each sink key.
        tail_at_BT: Position of each key of the tail.
        gaps: Largest number of padding tokens within a text.
    """

    key_BT: Tensor
    query_BN: Tensor
    sink_at_BS: Tensor
    tail_at_BT: Tensor
    gaps: int


def window_attention(
    query_BKGND: Tensor,
    sink_keys: tuple[Tensor, Tensor],
    tail_keys: tuple[Tensor, Tensor],
    window: Window,
    scale: float,
    *,
    tail_start: int = 0,
    rows: RowsOfTail | None = None,
    terms: ScoreTerms = PLAIN,
) -> Tensor:
    """Return the output (B, K, G, N, Dv) of window heads.

    Args:
        sink_keys: Keys (B, K, S, D) and values (B, K, S, Dv) of the first tokens of each text.
        tail_keys: Keys (B, K, T, D) and values of the last T tokens, the queries' own at the end; at least the last
            ``window.last - 1 + N`` tokens of each text, or all. Keys of the sink among them are left out.
        window: What a query sees.
        tail_start: Position of the first key of ``tail_keys``.
        rows: Places of the keys in batches with padding; None if every token is text. Outputs of padding are finite
            and have no meaning, but a token that is followed and preceded by no text of its row sees itself.
        terms: Changes of the scores; its bias covers the keys of all tokens.
    """
    (sink_key, sink_value), (tail_key, tail_value) = sink_keys, tail_keys
    N, S, T = query_BKGND.shape[3], sink_key.shape[2], tail_key.shape[2]
    block, at = _BLOCK.get(query_BKGND.device.type, _GPU_BLOCK), torch.arange(T, device=query_BKGND.device)
    outs = []
    for start in range(0, N, block):
        stop = min(start + block, N)
        # Indices into the tail: the first key that the block's first query may see, and the last query's own.
        before = window.last - 1 + (rows.gaps if rows else 0)
        first, last = max(0, T - N + start - before), T - N + stop
        queries, keys = slice(start, stop), slice(first, last)
        key = torch.cat([sink_key, tail_key[:, :, keys]], 2)
        value = torch.cat([sink_value, tail_value[:, :, keys]], 2)
        own, near = at[T - N + start : last], at[keys]
        if rows is None:
            seen_BNS = _seen(S, (tail_start + near)[None], (tail_start + own)[None], window)
        else:
            of_rows = rows.key_BT[:, keys], rows.query_BN[:, queries]
            seen_BNS = _seen(S, *of_rows, window, own[:, None] == near)
        query, part = query_BKGND[:, :, :, queries], terms
        if terms.any:
            if rows is None:
                position = torch.cat([at.new_ones(S).cumsum(0) - 1, tail_start + near])[None]
            else:
                position = torch.cat([rows.sink_at_BS, rows.tail_at_BT[:, keys]], 1)
            part = terms_at(terms, position, queries)
        outs.append(grouped_attention(query, key, value, scale, seen_BNS, terms=part))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 3)


def windowed_output(query_BHND: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, window: Window, scale: float) -> Tensor:
    """Return the output (B, H, N, Dv) of heads with one window; the queries are the last of all tokens."""
    K = key_BKSD.shape[1]
    out = window_attention(
        query_BHND.unflatten(1, (K, -1)),
        (key_BKSD[:, :, : window.first], value_BKSD[:, :, : window.first]),
        (key_BKSD, value_BKSD),
        window,
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
    queries: int, keys: int, window: Window, device: torch.device, real_BS: Tensor | None = None
) -> Tensor:
    """Return which keys each query sees: bool (B or 1, N, S). The queries belong to the last tokens; ``real_BS`` marks
    tokens that are text, None all.
    """
    at = torch.arange(keys, device=device)
    if real_BS is None:
        key_BS = index_BS = at[None]
    else:
        index_BS = real_BS.cumsum(1) - 1
        key_BS = torch.where(real_BS, index_BS, -1)
    query = index_BS[:, keys - queries :, None]
    key = key_BS[:, None]
    seen = (key <= query) & (key >= 0) & ((key >= first_of_last(query, window)) | (key < window.first))
    return seen if real_BS is None else seen | ((query < 0) & (at == at[keys - queries :, None]))


_Index = TypeVar("_Index", int, Tensor)


def first_of_last(query: _Index, window: Window) -> _Index:
    """Return the index of the first of the last keys that queries see, by their indices in their text."""
    return _rounded_down(_rounded_down(query, window.chunk) - window.recent + 1, window.block)


def _rounded_down(index: _Index, size: int) -> _Index:
    return index if size == 1 else index // size * size


def _seen(sinks: int, key_BT: Tensor, query_BN: Tensor, window: Window, own_NT: Tensor | None = None) -> Tensor:
    """Return which sink keys, then which keys of the tail, queries see, by their indices: (B or 1, N, S + T). A query
    before its text sees its own key, which ``own_NT`` marks, because attention to no key would be NaN and spread to
    later layers.
    """
    key, query = key_BT[:, None], query_BN[:, :, None]
    in_tail = (key <= query) & (key >= first_of_last(query, window)) & (key >= sinks)
    if own_NT is not None:
        in_tail = in_tail | ((query < 0) & own_NT)
    in_sink = torch.arange(sinks, device=key.device) <= query
    return torch.cat([in_sink, in_tail], 2)


#: Tokens by which a buffer grows, so that it is copied once in so many steps.
GROWTH = 256


_Pair = tuple[Tensor, Tensor]


class _Buffers(ABC):
    """Buffers of the keys and values of several KV heads, which ``tokens`` tokens fill from the first place on.

    New tokens are written in place, except where that would fail or change a graph of derivatives: after a pass with
    gradients enabled, which may have saved the buffers, and outside inference mode if they were made in it.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._buffers: _Pair | None = None
        self._saved = False

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
    @abstractmethod
    def _kept(self) -> int:
        """Number of tokens held, in whole blocks."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held; the buffers may have room for more."""
        return 0 if self._buffers is None else sum(x.nbytes for x in self._buffers) // self.slots * self._kept

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._buffers is None else sum(buffer.nbytes for buffer in self._buffers)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by the result of ``change``, which selects or repeats rows."""
        if self._buffers is not None:
            self._buffers = _both(change, self._buffers)

    def _may_write(self, new: _Pair) -> bool:
        """Return True if new tokens may be written in place, and note whether this pass may save the buffers."""
        saved, self._saved = self._saved, torch.is_grad_enabled()
        if self._buffers is None:
            return True
        if saved or (self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()):
            return False
        return all(_wider(old, x) == old.dtype for old, x in zip(self._buffers, new, strict=True))


class FullKeys(_Buffers):
    """Keys and values of all S tokens, with memory allocated ahead: for ``max_tokens``, or in steps if it is None. Its
    bytes are those of whole blocks.
    """

    def __init__(self, max_tokens: int | None, block: int = 1) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._block = block

    @property
    def _kept(self) -> int:
        return whole_blocks(self.tokens, self._block)

    def add(self, key_BKND: Tensor, value_BKND: Tensor, heads: Tensor | None = None) -> None:
        """Add new tokens; ``heads`` (K,) selects KV heads of the tensors, and None takes all."""
        end, new = self.tokens + key_BKND.shape[2], (key_BKND, value_BKND)
        if not self._may_write(new) or self.slots < end:
            size = max(self.slots, -(-end // GROWTH) * GROWTH)
            if self._max_tokens is not None and end <= self._max_tokens:
                size = self._max_tokens
            kv_heads = key_BKND.shape[1] if heads is None else len(heads)
            old = self._buffers or new
            larger = _both(
                lambda x, old: x.new_empty(len(x), kv_heads, size, x.shape[3], dtype=_wider(old, x)), new, old
            )
            if self._buffers is not None:
                for place, known in zip(larger, self._buffers, strict=True):
                    place[:, :, : self.tokens] = known[:, :, : self.tokens]
            self._buffers = larger
        assert self._buffers is not None
        for buffer, x in zip(self._buffers, new, strict=True):
            _write(buffer.narrow(2, self.tokens, end - self.tokens), x, heads)
        self.tokens = end

    def crop(self, tokens: int) -> None:
        self.tokens -= tokens


class WindowKeys(_Buffers):
    """The window of several KV heads of one layer; ``tokens`` counts those that are stored or have left the window.

    New tokens are *pending* until `commit` stores them, since the queries of one pass see different windows. A single
    token is stored at once, because the token that it replaces has left its window. If it is padding, the next token
    of its row replaces it.
    """

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window
        self._pending: _Pair | None = None
        # In batches with padding: which pending tokens are text, how many stored ones are, and the slots' positions.
        self._real_BP: Tensor | None = None
        self._counts_B: Tensor | None = None
        self._position_BW: Tensor | None = None
        self._gaps = 0

    @property
    def _kept(self) -> int:
        return self.window.kept(self.tokens)

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
        """True if no token is pending, all tokens are text and the window has no blocks or chunks, so that a single
        query sees all `keys`.
        """
        return self._pending is None and self._counts_B is None and self._all_seen

    @property
    def _all_seen(self) -> bool:
        """True if the newest token sees all slots: each token replaces the one that leaves the window."""
        return self.window.last == self.window.recent

    def add(self, key_BKND: Tensor, value_BKND: Tensor, heads: Tensor | None = None, *, wait: bool) -> None:
        """Add new tokens; ``heads`` (K,) selects KV heads of the tensors, and None takes all. With ``wait`` they stay
        pending until `commit`, so that `crop` can remove them again.
        """
        kv_heads = key_BKND.shape[1] if heads is None else len(heads)
        if not self._may_write((key_BKND, value_BKND)) and self._buffers is not None:
            self._buffers = _both(
                lambda old, x: old.to(_wider(old, x), copy=True), self._buffers, (key_BKND, value_BKND)
            )
        self._allocate(self.tokens + self.pending + key_BKND.shape[2], (key_BKND, value_BKND), kv_heads)
        at_once = key_BKND.shape[2] == 1 and not wait and self._pending is None
        if at_once and self._counts_B is None:
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

    def place(self, real_BN: Tensor | None, gaps: int = 0) -> None:
        """Set which of the tokens just added are text; None if these and all earlier ones are. ``gaps`` is the largest
        number of padding tokens within a text, for several tokens.
        """
        if real_BN is None:
            self._real_BP = self._counts_B = self._position_BW = None
            return
        pending, new = self.pending, real_BN.shape[1]
        stored = self.tokens if pending else self.tokens - new  # before the new tokens
        if self._counts_B is None:
            B = len(real_BN)
            self._position_BW = self._indices(self.slots, self.tokens).clamp_min(0).expand(B, -1)
            self._counts_B = real_BN.new_full((B,), stored, dtype=torch.long)
            self._real_BP = real_BN.new_ones(B, pending - new) if pending > new else None
        if pending:
            self._real_BP = real_BN if self._real_BP is None else torch.cat([self._real_BP, real_BN], 1)
            self._gaps = gaps
        else:
            self._counts_B = self._counts_B + real_BN[:, 0]

    def attend(
        self, query_BKGND: Tensor, scale: float, terms: ScoreTerms = PLAIN, seen_BNS: Tensor | None = None
    ) -> Tensor:
        """Return the output (B, K, G, N, Dv) of the queries of the newest tokens; the bias of ``terms`` covers all
        tokens. ``seen_BNS`` (B or 1, 1, S) marks the keys that a single query sees, None all; queries of pending tokens
        see all text before them.
        """
        assert self._buffers is not None
        if self._pending is not None:
            tail_start, tail, rows = self._tail(query_BKGND.shape[3])
            return window_attention(
                query_BKGND, self._sink(), tail, self.window, scale, tail_start=tail_start, rows=rows, terms=terms
            )
        key, value = self.keys, self.values
        seen, W = None, key.shape[2]
        if self._counts_B is not None:
            seen = (torch.arange(W, device=key.device) < self._counts_B[:, None])[:, None]
        if not self._all_seen:  # new tokens replace a block that has left the window token by token
            index, counts = self._indices(W, self.tokens), self._counts_B
            if counts is None:
                shown = index >= first_of_last(self.tokens - 1, self.window)
            else:
                shown = index >= first_of_last(counts[:, None] - 1, self.window)
            shown = shown | (index < self.window.first)
            seen = shown[:, None] if seen is None else seen & shown[:, None]
        if terms.bias is not None or seen_BNS is not None:
            if self._position_BW is not None:
                position_BW = self._position_BW[:, :W]
            else:
                position_BW = self._indices(W, self.tokens).clamp_min(0)
            position_BW = position_BW.clamp_max(self.tokens - 1)  # unused slots have any position
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
        counts: Tensor | int = C
        if self._counts_B is not None and self._real_BP is not None:
            counts, self._counts_B = self._counts_B[:, None], self._counts_B + self._real_BP.sum(1)
        index = self._indices(self.slots, C + P)
        slot = torch.arange(self.slots, device=index.device)
        new = (index >= slot.clamp_max(self.window.first)) & (index >= counts)
        source = self._pending_at(index - counts)
        if self._position_BW is not None:
            self._position_BW = torch.where(new, C + source, self._position_BW)
        new = new[:, None, :, None]
        self._buffers = _both(lambda x, old: torch.where(new, _tokens_at(x, source), old), self._pending, self._buffers)
        self.tokens, self._pending, self._real_BP = C + P, None, None

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
            self._real_BP = self._real_BP[:, :kept] if kept and self._real_BP is not None else None
        self.tokens -= max(0, tokens - waiting)
        if self._counts_B is not None and self._position_BW is not None and tokens > waiting:
            known = torch.arange(self.slots, device=self._counts_B.device) < self._counts_B[:, None]
            self._counts_B = (known & (self._position_BW < self.tokens)).sum(1)
        self.commit()
        if self._counts_B is not None and bool((self._counts_B == self.tokens).all()):
            self.place(None)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().change_rows(change)
        if self._pending is not None:
            self._pending = _both(change, self._pending)
        changed = (None if x is None else change(x) for x in (self._real_BP, self._counts_B, self._position_BW))
        self._real_BP, self._counts_B, self._position_BW = changed

    def _indices(self, slots: int, tokens: int) -> Tensor:
        """Return which token of its own text each slot holds after ``tokens`` tokens: (B or 1, slots)."""
        assert self._buffers is not None
        slot = torch.arange(slots, device=self._buffers[0].device)[None]
        last = tokens - 1 if self._counts_B is None else self._counts_B[:, None] - 1
        return torch.where(slot < self.window.first, slot, last - (last - slot).remainder(self.window.last))

    def _slots_of(self, index: Tensor) -> Tensor:
        """Return the slots of tokens by their index in their own text; a negative index gets a slot without meaning."""
        sink = self.window.first
        return torch.where(index < sink, index.clamp_min(0), sink + (index - sink).remainder(self.window.last))

    def _allocate(self, tokens: int, like: _Pair, kv_heads: int) -> None:
        slots = min(self.window.width, -(-tokens // GROWTH) * GROWTH)
        if slots <= (known := self.slots):
            return
        old = self._buffers or like
        # Zeros, because masked slots take part in products, where old NaN would spread.
        more = _both(
            lambda x, old: x.new_zeros(len(x), kv_heads, slots - known, x.shape[-1], dtype=_wider(old, x)), like, old
        )
        self._buffers = more if self._buffers is None else _both(lambda *x: torch.cat(x, 2), self._buffers, more)
        if self._position_BW is not None:
            self._position_BW = F.pad(self._position_BW, (0, slots - known))

    def _store_one(self, key_BK1D: Tensor, value_BK1D: Tensor, heads: Tensor | None) -> None:
        assert self._buffers is not None
        r, sink = self.tokens, self.window.first
        slot = r if r < sink else sink + (r - sink) % self.window.last
        for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
            _write(buffer.narrow(2, slot, 1), new, heads)
        self.tokens += 1

    def _store_in_rows(self, key_BK1D: Tensor, value_BK1D: Tensor) -> None:
        """Store a token of rows with different numbers of tokens."""
        assert self._buffers is not None and self._counts_B is not None and self._position_BW is not None
        slots_B1 = self._slots_of(self._counts_B)[:, None]
        for buffer, new in zip(self._buffers, (key_BK1D, value_BK1D), strict=True):
            buffer.scatter_(2, slots_B1[:, None, :, None].expand(new.shape), new.to(buffer.dtype))
        self._position_BW = self._position_BW.scatter(1, slots_B1, self.tokens)
        self.tokens += 1

    def _pending_at(self, index_BR: Tensor) -> Tensor:
        """Return the places (B or 1, R) among the pending tokens of the text's tokens with these indices among them."""
        index_BR = index_BR.clamp(0, self.pending - 1)
        if self._real_BP is None:
            return index_BR
        return self._real_BP.long().argsort(dim=1, descending=True, stable=True).gather(1, index_BR)

    def _sink(self) -> _Pair:
        """Return keys and values of the first ``sink`` tokens of each row, stored or pending."""
        assert self._buffers is not None and self._pending is not None
        C = self.tokens
        sink = min(self.window.first, C + self.pending)
        if self._counts_B is None:
            if sink <= C:
                return _both(lambda b: b[:, :, :sink], self._buffers)
            return _both(lambda b, x: torch.cat([b[:, :, :C], x[:, :, : sink - C]], 2), self._buffers, self._pending)
        rank = torch.arange(sink, device=self._counts_B.device) - self._counts_B[:, None]
        source, pending = self._pending_at(rank), (rank >= 0)[:, None, :, None]
        return _both(
            lambda b, x: torch.where(pending, _tokens_at(x, source), b[:, :, :sink]), self._buffers, self._pending
        )

    def _tail(self, queries: int) -> tuple[int, _Pair, RowsOfTail | None]:
        """Return the position of the first key of the tail, the last stored tokens with those pending, and the places
        of all in rows with padding.
        """
        assert self._buffers is not None and self._pending is not None
        C, P, sink = self.tokens, self.pending, self.window.first
        known = min(C, self.window.last - 1)
        counts: Tensor | int = C if self._counts_B is None else self._counts_B[:, None]
        index = torch.arange(-known, 0, device=self._buffers[0].device)[None] + counts
        # Tokens of the sink are masked in the tail, and so are those before the text, whose index is negative.
        slots = self._slots_of(index)
        tail = self._pending
        if known:
            tail = _both(lambda b, x: torch.cat([_tokens_at(b, slots), x], 2), self._buffers, self._pending)
        if self._counts_B is None or self._real_BP is None or self._position_BW is None:
            return C - known, tail, None
        newest = self._counts_B[:, None] + self._real_BP.cumsum(1) - 1
        rank = torch.arange(min(sink, C + P), device=index.device)
        missing = rank - self._counts_B[:, None]
        stored_at = self._position_BW[:, : len(rank)]
        pending_at = torch.arange(C, C + P, device=index.device).expand(len(newest), -1)
        rows = RowsOfTail(
            key_BT=torch.cat([index, torch.where(self._real_BP, newest, -1)], 1),
            query_BN=newest[:, P - queries :],
            sink_at_BS=torch.where(missing < 0, stored_at, C + self._pending_at(missing)),
            tail_at_BT=torch.cat([self._position_BW.gather(1, slots), pending_at], 1),
            gaps=self._gaps,
        )
        return C - known, tail, rows


def _write(place_BKND: Tensor, new_BKND: Tensor, heads: Tensor | None) -> None:
    """Copy tokens into a buffer, by one operator; ``heads`` (K,) selects their KV heads, and None takes all."""
    if heads is None:
        place_BKND.copy_(new_BKND)
    elif new_BKND.dtype != place_BKND.dtype or differentiated(new_BKND, place_BKND):
        place_BKND.copy_(new_BKND.index_select(1, heads))
    else:
        torch.index_select(new_BKND, 1, heads, out=place_BKND)


def _wider(known: Tensor, new: Tensor) -> torch.dtype:
    """Return the type of a buffer that holds both, as `torch.cat` chooses it; autocast may change between passes."""
    return known.dtype if known.dtype == new.dtype else torch.promote_types(known.dtype, new.dtype)


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
