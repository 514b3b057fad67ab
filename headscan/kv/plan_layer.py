"""The cache of one layer whose KV heads keep different tokens, and the attention of one pass over it.

Shapes: B sequences, N new tokens, S tokens so far, H query heads, K KV heads, G = H / K, D and Dv widths of a key and
of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from headscan.attention.cache_attention import PLAIN, CachedHeads, ScoreTerms
from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.decode_attention import OneQueryKeys, one_query_attention
from headscan.kv.padded_masks import MaskReader
from headscan.kv.window_keys import FullKeys, WindowKeys, grouped_attention
from headscan.windows import DROPPED, HeadGroup, Window


class PlanStep:
    """The attention of the pass that added the last ``queries`` (N) of the ``tokens`` (S) to a layer."""

    def __init__(self, layer: PlanLayer, queries: int, value_dim: int) -> None:
        self.queries, self.tokens = queries, layer.tokens
        self._layer, self._value_dim = layer, value_dim
        self._attended = False

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None, terms: ScoreTerms = PLAIN) -> Tensor:
        """As `GroupedAttention.attend`."""
        layer, N = self._layer, self.queries
        if self._attended or layer.tokens != self.tokens:
            raise UnsupportedModelError(
                f"the keys of {layer.name} are read twice, but windows have moved on. Keep the full cache of layers"
                " whose keys other layers read"
            )
        self._attended = True
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if N == 1 and mask is None and not terms.any and layer.aligned:
            return self._attend_once(query, scale)
        K = layer.kv_heads
        packed = N == 1 and query.shape[1] == K
        query_BKGND = query[:, :, :, None] if packed else query.unflatten(1, (K, -1))
        if packed and mask is not None and mask.shape[1] > 1:
            mask = mask.flatten(1, 2)[:, :, None]
        seen_BNS, bias = self._read_mask(mask, len(query))
        if bias is not None:
            terms = replace(terms, bias=bias if terms.bias is None else terms.bias + bias)
        query_BKGND, terms = layer.in_groups(query_BKGND), self._in_groups(terms)
        outs = [self._attend(heads, held, query_BKGND, scale, seen_BNS, terms) for heads, held in layer.parts]
        out = layer.joined(outs)
        return out[:, :, :, 0] if packed else out.flatten(1, 2)

    def _attend_once(self, query: Tensor, scale: float) -> Tensor:
        """Return the output of one query that sees all keys held, with as few operators as possible."""
        layer = self._layer
        query_BKGD = layer.in_groups(query.reshape(len(query), layer.kv_heads, -1, query.shape[-1]))
        outs = []
        for heads, held in layer.parts:
            part = query_BKGD[:, heads]
            if held is None:
                outs.append(part.new_zeros(*part.shape[:3], self._value_dim))
            else:
                outs.append(one_query_attention(part, held.keys, held.values, scale))
        return layer.joined(outs).reshape(*query.shape[:3], self._value_dim)

    def _read_mask(self, mask: Tensor | None, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Return which keys are seen (B or 1, N, S) and the mask's bias, and place the rows of the windows."""
        layer, N = self._layer, self.queries
        if mask is None:
            layer.place(None, N)
            return None, None
        if mask.shape[-2:] != (N, self.tokens):
            raise UnsupportedModelError(
                f"attention mask {tuple(mask.shape)} for {N} queries and {self.tokens} keys. Pass a mask of the whole"
                " text"
            )
        if N > 1 or any(window.pending for window in layer.windows):
            known = layer.masks.read(mask, place=True)
            real = known.real_BS
            layer.place(real if real is None else real.expand(rows, -1), N, known.gaps)
            return None if real is None else known.seen_BNS, known.bias
        # The windows look up which keys a single token sees; a GPU does not wait for that.
        known = layer.masks.read(mask, place=False)
        if layer.real_BS is not None or not layer.masks.shows_newest(mask):
            layer.place_one(known.seen_BNS[:, 0, -1:].expand(rows, -1))
        return known.seen_BNS, known.bias

    def _in_groups(self, terms: ScoreTerms) -> ScoreTerms:
        def ordered(x: Tensor | None) -> Tensor | None:
            if x is None or x.shape[1] == 1:
                return x
            return self._layer.in_groups(x.unflatten(1, (self._layer.kv_heads, -1))).flatten(1, 2)

        return replace(terms, bias=ordered(terms.bias), sinks_BHN=ordered(terms.sinks_BHN)) if terms.any else terms

    def _attend(
        self,
        heads: slice,
        held: FullKeys | WindowKeys | None,
        query_BKGND: Tensor,
        scale: float,
        seen_BNS: Tensor | None,
        terms: ScoreTerms,
    ) -> Tensor:
        """Return the output (B, K, G, N, Dv) of one group."""
        query_BKGND, G = query_BKGND[:, heads], query_BKGND.shape[2]
        if held is None:  # query heads of a dropped KV head output zero
            return query_BKGND.new_zeros(*query_BKGND.shape[:-1], self._value_dim)
        if terms.any:

            def of_heads(x: Tensor | None) -> Tensor | None:
                return x if x is None or x.shape[1] == 1 else x[:, heads.start * G : heads.stop * G]

            terms = replace(terms, bias=of_heads(terms.bias), sinks_BHN=of_heads(terms.sinks_BHN))
        if isinstance(held, FullKeys):
            causal = seen_BNS is None
            return grouped_attention(query_BKGND, held.keys, held.values, scale, seen_BNS, causal=causal, terms=terms)
        if self.tokens == self.queries and self._layer.prefill == "full" and held.pending:
            out = held.attend_all(query_BKGND, scale, seen_BNS, terms)
        else:
            out = held.attend(query_BKGND, scale, terms, seen_BNS)
        if not self._layer.record_past:
            held.commit()
        return out


#: What queries of the first pass see: their window, as in later passes, or all keys, which leave the cache after it.
Prefill = Literal["window", "full"]


class PlanLayer(CacheLayerMixin):
    """Keys and values of one layer, in groups of KV heads that keep the same tokens; the mask reader is that of the
    cache. Full heads get memory for ``max_tokens`` at once; None lets it grow. Bytes count whole blocks of ``block``
    tokens.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        name: str,
        groups: tuple[HeadGroup, ...],
        prefill: Prefill,
        max_tokens: int | None,
        masks: MaskReader,
        block: int = 1,
    ) -> None:
        super().__init__()
        self.name, self.groups, self.prefill, self.masks = name, groups, prefill, masks
        self.tokens = 0
        #: Which tokens are text, bool (B, S); None if all are.
        self.real_BS: Tensor | None = None
        self.record_past = False
        self._max_tokens, self._block = max_tokens, block
        # Heads that keep the same tokens become neighbours, so that slices select them; None if they are already.
        order = [kv_head for kv_heads, _ in groups for kv_head in kv_heads]
        self.kv_heads = len(order)
        self._order = None if order == sorted(order) else order
        self._indices: tuple[Tensor, Tensor] | None = None
        self._heads: list[Tensor] = []  # by group: indices of its KV heads, if the order changes
        self._empty()

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the layer occupies."""
        return sum(held.allocated_bytes for held in self.held)

    @property
    def held(self) -> list[FullKeys | WindowKeys]:
        """Keys and values of every group that is not dropped."""
        return [held for _, held in self.parts if held is not None]

    @property
    def windows(self) -> list[WindowKeys]:
        """Keys and values of the groups with a window."""
        return [held for held in self.held if isinstance(held, WindowKeys)]

    @property
    def aligned(self) -> bool:
        """True if all tokens are text and none is pending."""
        return self.real_BS is None and all(window.aligned for window in self.windows)

    def place(self, real_BS: Tensor | None, new: int, gaps: int = 0) -> None:
        """Set which tokens are text, the ``new`` last ones of this pass included; None if all are. Raise
        UnsupportedModelError if earlier ones were placed otherwise.
        """
        before = self.tokens - new
        if self.real_BS is not None or (real_BS is not None and before):
            ones = torch.ones((), dtype=torch.bool)
            known, now = (ones if x is None else x[:, :before] for x in (self.real_BS, real_BS))
            if bool((known != now.to(known.device)).any()):
                raise UnsupportedModelError(
                    f"the attention mask hides other tokens before token {before} than earlier passes did. Pass a mask"
                    " that hides the padding, and nothing else, in every pass"
                )
        self.real_BS = real_BS
        for window in self.windows:
            window.place(None if real_BS is None else real_BS[:, before:], gaps)

    def place_one(self, real_B1: Tensor) -> None:
        """As `place`, for a single token that is padding in some rows, without a check."""
        known = real_B1.new_ones(len(real_B1), self.tokens - 1) if self.real_BS is None else self.real_BS
        self.real_BS = torch.cat([known, real_B1], 1)
        for window in self.windows:
            window.place(real_B1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the number of KV heads; memory is allocated when tokens come."""
        if key_states.shape[1] != self.kv_heads:
            raise PlanMismatchError(
                f"{self.name} caches {key_states.shape[1]} heads (limit {self.kv_heads}, as in the plan). Make a plan"
                " for this model; models that cache other tensors than their KV heads' keys support none"
            )
        if self._order is not None:
            with torch.inference_mode(False):  # a later pass may take derivatives
                order = torch.tensor(self._order, device=key_states.device)
                self._indices = (order, order.argsort())
                self._heads = [order[heads] for heads, _ in self.parts]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the keys (B, K, N, D) and values of new tokens; return all keys and values for attention."""
        (B, K, N, D), Dv = key_states.shape, value_states.shape[-1]
        first = not self.tokens and N > 1
        if first and self.record_past and self.prefill == "full" and self.windows:
            # In assisted decoding the first pass holds the prompt and candidates, which see their windows.
            raise UnsupportedModelError(
                f"assisted decoding with `prefill={self.prefill!r}`: its first pass cannot tell the prompt from"
                " candidate tokens (limit 'window'). Pass `prefill='window'` to PlanCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        dtype, device = key_states.dtype, key_states.device
        for at, (heads, held) in enumerate(self.parts):
            if held is None:
                continue
            key, value, index = key_states, value_states, None
            if self._indices is not None:
                index = self._heads[at]
            elif len(self.parts) > 1:
                key, value = key[:, heads], value[:, heads]
            if isinstance(held, WindowKeys):
                held.add(key, value, index, wait=self.record_past)
            else:
                held.add(key, value, index)
        self.tokens += N
        if len(self.parts) == 1 and isinstance(held := self.parts[0][1], FullKeys):
            return OneQueryKeys.of(held.keys, held.values) if N == 1 else (held.keys, held.values)
        step = PlanStep(self, N, Dv)
        keys, values = (CachedHeads.of(step, (B, K, self.tokens, width), dtype, device) for width in (D, Dv))
        return keys, values

    def in_groups(self, x: Tensor) -> Tensor:
        """Return a tensor with KV heads in dimension 1 in the order of the groups."""
        return x if self._indices is None or x.shape[1] == 1 else x.index_select(1, self._indices[0])

    def joined(self, of_groups: list[Tensor]) -> Tensor:
        """Return tensors of the groups as one, with KV heads in dimension 1 in the order of the model."""
        x = of_groups[0] if len(of_groups) == 1 else torch.cat(of_groups, 1)
        return x if self._indices is None else x.index_select(1, self._indices[1])

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Keep the tokens of the next passes until `crop` is called, so that it can remove them again."""
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` cannot remove the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop of {tokens_to_remove} tokens: pass a negative number, the tokens to remove")
        tokens = min(-tokens_to_remove, self.tokens)
        if not all(window.can_crop(tokens) for window in self.windows):
            raise PlanMismatchError(
                f"cannot remove {tokens} tokens: the tokens that would enter the windows again have been freed. Call"
                " activate_past_recording() before the pass that adds them"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; raise as `check_crop`."""
        self.check_crop(tokens_to_remove)
        tokens = min(-tokens_to_remove, self.tokens)
        for held in self.held:
            held.crop(tokens)
        self.tokens -= tokens
        if self.real_BS is not None:
            self.real_BS = self.real_BS[:, : self.tokens]
            if bool(self.real_BS.all()):
                self.real_BS = None

    def reset(self) -> None:
        self._empty()
        self.tokens, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_rows(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        raise UnsupportedModelError("a cache with windows is not offloaded. Use `offloading=False`")

    prefetch = offload

    def _empty(self) -> None:
        def held(window: Window | None) -> FullKeys | WindowKeys | None:
            if window is None:
                return FullKeys(self._max_tokens, self._block)
            return None if window == DROPPED else WindowKeys(window)

        #: By group: its KV heads in the order of the groups, and what it keeps.
        self.parts: list[tuple[slice, FullKeys | WindowKeys | None]] = []
        first = 0
        for kv_heads, window in self.groups:
            self.parts.append((slice(first, first + len(kv_heads)), held(window)))
            first += len(kv_heads)
        self.real_BS = None

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for held in self.held:
            held.change_rows(change)
        if self.real_BS is not None:
            self.real_BS = change(self.real_BS)


class PlanMixedLayer(PlanLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A `PlanLayer` with the states of linear attention that runs in the same layer."""

    is_croppable = False

    def __init__(self, number_of_states: int, *args: Any) -> None:
        # The constructor of `PlanLayer` calls that of linear attention, for one state.
        PlanLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Keys and values come by position, states of linear attention by name.
        kind: Any = PlanLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PlanLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        PlanLayer.reset(self)

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        PlanLayer._change_rows(self, change)
        for states in (self.conv_states, self.recurrent_states):
            for at, state in states.items():
                states[at] = None if state is None else change(state)
