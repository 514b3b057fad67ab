"""The cache of one layer whose KV heads keep different tokens.

Shapes: B sequences, N new tokens, S tokens so far, H query heads, K KV heads, G = H / K, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from headscan.attention.cached_heads import CachedHeads
from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.full_keys import FullKeys
from headscan.kv.kept_keys import DROPPED, HeadGroup
from headscan.kv.padded_mask import left_padding
from headscan.kv.window_attention import grouped_attention
from headscan.kv.window_keys import WindowKeys

#: What the queries of the first pass see: their window, as in later passes, or all keys, which leave the cache after it.
Prefill = Literal["window", "full"]


class PlanLayer(CacheLayerMixin):
    """Keys and values of one layer, in groups of KV heads that keep the same tokens.

    Args:
        name: Name of the layer for messages.
        groups: All KV heads of the layer.
        prefill: See `Prefill`.
        max_tokens: Tokens for which full heads get memory at once; None lets it grow.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, name: str, groups: tuple[HeadGroup, ...], prefill: Prefill, max_tokens: int | None) -> None:
        super().__init__()
        self.name, self.groups, self.prefill = name, groups, prefill
        self.tokens = 0
        self.record_past = False
        self._max_tokens = max_tokens
        self._kv_heads = sum(len(group.kv_heads) for group in groups)
        self._empty()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(held.nbytes for held in self._held())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the layer occupies."""
        return sum(held.allocated_bytes for held in self._held())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the number of KV heads; memory is allocated when tokens come."""
        if key_states.shape[1] != self._kv_heads:
            raise PlanMismatchError(
                f"{self.name} caches {key_states.shape[1]} heads (limit {self._kv_heads}, as in the plan). Make a plan"
                " for this model"
            )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the keys (B, K, N, D) and values of new tokens; return all keys and values for attention.

        Raises:
            PlanMismatchError: The plan has another number of KV heads.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.tokens == 0
        self.tokens += key_states.shape[2]
        for group, held in self._of_group:
            if held is None:
                continue
            whole = len(group.kv_heads) == self._kv_heads
            heads = list(group.kv_heads)
            key, value = (x if whole else x[:, heads] for x in (key_states, value_states))
            if isinstance(held, WindowKeys):
                held.add(key, value, wait=self.record_past)
            else:
                held.add(key, value)
        if len(self._of_group) == 1 and isinstance(held := self._of_group[0][1], FullKeys):
            return held.keys, held.values
        step = PlanStep(self, key_states.shape[2], value_states.shape[3], first=first)
        shape = (len(key_states), self._kv_heads, self.tokens)
        key, value = (
            CachedHeads.of(step, torch.empty(*shape, x.shape[-1], dtype=x.dtype, device="meta"), x.device)
            for x in (key_states, value_states)
        )
        return key, value

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Keep the tokens of the next passes until `crop` is called, so that it can remove them again."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        Raises:
            PlanMismatchError: Tokens that would be in the window again have been freed.
            ValueError: The number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop of {tokens_to_remove} tokens: pass a negative number, the tokens to remove")
        tokens = min(-tokens_to_remove, self.tokens)
        windows = [held for held in self._held() if isinstance(held, WindowKeys)]
        if not all(window.can_crop(tokens) for window in windows):
            raise PlanMismatchError(
                f"cannot remove {tokens} tokens: the tokens that would enter the windows again have been freed. Call"
                " activate_past_recording() before the pass that adds them"
            )
        for held in self._held():
            held.crop(tokens)
        self.tokens -= tokens

    def reset(self) -> None:
        self._empty()
        self.tokens, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._change_rows(lambda x: x[indices])

    def offload(self) -> None:
        raise UnsupportedModelError("a cache with windows is not offloaded. Use offloading=False")

    def prefetch(self) -> None:
        raise UnsupportedModelError("a cache with windows is not offloaded. Use offloading=False")

    def _empty(self) -> None:
        def held(group: HeadGroup) -> FullKeys | WindowKeys | None:
            if group.window is None:
                return FullKeys(self._max_tokens)
            return None if group.window == DROPPED else WindowKeys(group.window)

        self._of_group = [(group, held(group)) for group in self.groups]

    def _held(self) -> list[FullKeys | WindowKeys]:
        return [held for _, held in self._of_group if held is not None]

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for held in self._held():
            held.change_rows(change)


class PlanStep:
    """The attention of the pass that added the last ``queries`` tokens to a layer."""

    def __init__(self, layer: PlanLayer, queries: int, value_dim: int, *, first: bool) -> None:
        self._layer, self._queries, self._value_dim, self._first = layer, queries, value_dim, first

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """As `GroupedAttention.attend`.

        Raises:
            UnsupportedModelError: The mask is not causal with padding on the left.
        """
        layer, K, N = self._layer, self._layer._kv_heads, self._queries
        packed = N == 1 and query.shape[1] == K
        query_BKGND = query[:, :, :, None] if packed else query.unflatten(1, (K, -1))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        seen_BNS, starts_B = (None, None) if mask is None else left_padding(mask, N, layer.tokens)
        # Query heads of a dropped KV head output zero.
        out = query.new_zeros(*query_BKGND.shape[:-1], self._value_dim)
        for group, held in layer._of_group:
            if held is None:
                continue
            heads = list(group.kv_heads)
            part = query_BKGND if len(heads) == K else query_BKGND[:, heads]
            if isinstance(held, FullKeys):
                found = self._attend_full(part, held, scale, seen_BNS)
            else:
                if N > 1:
                    held.starts_B = starts_B
                if self._first and layer.prefill == "full" and held.pending:
                    found = held.attend_all(part, scale, seen_BNS)
                else:
                    found = held.attend(part, scale)
                if not layer.record_past:
                    held.commit()
            out[:, heads] = found
        return out[:, :, :, 0] if packed else out.flatten(1, 2)

    def _attend_full(self, query_BKGND: Tensor, held: FullKeys, scale: float, seen_BNS: Tensor | None) -> Tensor:
        N, S = self._queries, held.tokens
        causal = seen_BNS is None and N == S
        if seen_BNS is None and 1 < N < S:
            at = torch.arange(S, device=query_BKGND.device)
            seen_BNS = (at <= at[S - N :, None])[None]
        return grouped_attention(query_BKGND, held.keys, held.values, scale, seen_BNS, causal=causal)
