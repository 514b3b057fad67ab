"""The cache of one layer whose KV heads keep different tokens.

Shapes: B sequences, N new tokens, K KV heads, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from headscan.attention.cached_heads import CachedHeads
from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.full_keys import FullKeys
from headscan.kv.kept_keys import DROPPED, HeadGroup
from headscan.kv.padded_mask import MaskReader
from headscan.kv.plan_step import PlanStep
from headscan.kv.window_keys import WindowKeys

#: What queries of the first pass see: their window, as in later passes, or all keys, which leave the cache after it.
Prefill = Literal["window", "full"]


class PlanLayer(CacheLayerMixin):
    """Keys and values of one layer, in groups of KV heads that keep the same tokens.

    Args:
        name: Name of the layer for messages.
        groups: All KV heads of the layer.
        prefill: See `Prefill`.
        max_tokens: Tokens for which full heads get memory at once; None lets it grow.
        masks: The reader of all layers of the cache.
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
    ) -> None:
        super().__init__()
        self.name, self.groups, self.prefill, self.masks = name, groups, prefill, masks
        self.tokens = 0
        self.record_past = False
        self._max_tokens = max_tokens
        # Heads that keep the same tokens become neighbours, so that slices select them; None if they are already.
        order = [kv_head for group in groups for kv_head in group.kv_heads]
        self.kv_heads = len(order)
        self._order = None if order == sorted(order) else order
        self._indices: tuple[Tensor, Tensor] | None = None
        self._empty()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the number of KV heads; memory is allocated when tokens come."""
        if key_states.shape[1] != self.kv_heads:
            raise PlanMismatchError(
                f"{self.name} caches {key_states.shape[1]} heads (limit {self.kv_heads}, as in the plan). Make a plan"
                " for this model; models that cache other tensors than their KV heads' keys support none"
            )
        if self._order is not None:
            order = torch.tensor(self._order, device=key_states.device)
            self._indices = (order, order.argsort())
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the keys (B, K, N, D) and values of new tokens; return all keys and values for attention.

        Raises:
            PlanMismatchError: The plan has another number of KV heads.
            UnsupportedModelError: With ``prefill="full"``, a first pass of several tokens is recorded.
        """
        (B, K, N, D), Dv = key_states.shape, value_states.shape[-1]
        first = not self.tokens and N > 1
        if first and self.record_past and self.prefill == "full" and self.windows:
            # In assisted decoding the first pass holds the prompt and candidates, which see their windows.
            raise UnsupportedModelError(
                f"assisted decoding with prefill={self.prefill!r}: its first pass cannot tell the prompt from candidate"
                " tokens (limit 'window'). Pass prefill='window' to PlanCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        dtype, device = key_states.dtype, key_states.device
        if self._indices is not None:
            key_states, value_states = (x.index_select(1, self._indices[0]) for x in (key_states, value_states))
        for heads, held in self.parts:
            if isinstance(held, WindowKeys):
                held.add(key_states[:, heads], value_states[:, heads], wait=self.record_past)
            elif held is not None:
                held.add(key_states[:, heads], value_states[:, heads])
        self.tokens += N
        if len(self.parts) == 1 and isinstance(held := self.parts[0][1], FullKeys):
            return held.keys, held.values
        step = PlanStep(self, N, Dv)
        key, value = (CachedHeads.of(step, (B, K, self.tokens, width), dtype, device) for width in (D, Dv))
        return key, value

    def in_groups(self, x: Tensor) -> Tensor:
        """Return a tensor with KV heads in dimension 1 in the order of the groups."""
        return x if self._indices is None or x.shape[1] == 1 else x.index_select(1, self._indices[0])

    def in_order(self, x: Tensor) -> Tensor:
        """Return a tensor with KV heads in dimension 1 in the order of the model."""
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
        """Raise if `crop` cannot remove the last ``-tokens_to_remove`` tokens.

        Raises:
            PlanMismatchError: Tokens that would be in the window again have been freed.
            ValueError: The number is positive.
        """
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
        if not self.tokens:
            self.last_start = 0

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
        self._change_rows(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        raise UnsupportedModelError("a cache with windows is not offloaded. Use offloading=False")

    def prefetch(self) -> None:
        raise UnsupportedModelError("a cache with windows is not offloaded. Use offloading=False")

    def _empty(self) -> None:
        def held(group: HeadGroup) -> FullKeys | WindowKeys | None:
            if group.window is None:
                return FullKeys(self._max_tokens)
            return None if group.window == DROPPED else WindowKeys(group.window)

        #: By group: its KV heads in the order of the groups, and what it keeps.
        self.parts: list[tuple[slice, FullKeys | WindowKeys | None]] = []
        first = 0
        for group in self.groups:
            self.parts.append((slice(first, first + len(group.kv_heads)), held(group)))
            first += len(group.kv_heads)
        #: The largest position of a row's first real token.
        self.last_start = 0

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for held in self.held:
            held.change_rows(change)


class PlanMixedLayer(PlanLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A `PlanLayer` with the states of linear attention that runs in the same layer.

    Args:
        number_of_states: Number of states of linear attention; the others are those of `PlanLayer`.
    """

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
