"""Window masks: attention as if KV heads kept only a window, in passes over whole texts; and eviction.

Eviction shrinks the KV cache to a plan after the context has been read.

Shapes: B sequences, N queries, S keys, H query heads, K KV heads, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from headscan.ablation.intervention import Intervention, InterventionRecord
from headscan.attention.cache_attention import cache_attention, output_after
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import attention_hook
from headscan.errors import PlanMismatchError, UnsupportedModelError, check_type
from headscan.grid import AttentionSite
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_cache import PlanCache
from headscan.kv.window_keys import seen_by_window, windowed_output
from headscan.models.loaded_model import LoadedModel
from headscan.windows import DROPPED, HeadGroup, KeptKeys, Window


@dataclass(frozen=True)
class KvWindows(Intervention):
    """Restricts the query heads of some KV heads to the keys that a plan keeps.

    The output equals that of a cache that never holds more than the plan, so a likelihood computed in one pass shows
    the plan's loss. The query heads of a dropped KV head output zero.

    Attributes:
        kept: The windows.
        name: Name for messages.
    """

    kept: KeptKeys
    name: str = field(default="plan", compare=False)
    fixed = True
    uses_headscan_kernels = True

    @property
    def label(self) -> str:
        return self.name

    def __post_init__(self) -> None:
        to_pass = "a KeptKeys, such as `plan.kept`"
        check_type("kept", self.kept, KeptKeys, to_pass, PlanMismatchError)

    @property
    def first_layer(self) -> int | None:
        return min(self.kept.layers, default=None)

    def first_difference(self, other: Intervention | None) -> int | None:
        return self.kept.differs(other.kept) if isinstance(other, KvWindows) else super().first_difference(other)

    def within(self, first: int, last: int) -> KvWindows:
        return replace(self, kept=self.kept.within(first, last))

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        self.kept.check(lm.grid)
        groups = {site.layer: self.kept.groups(site.layer, site.num_key_value_heads) for site in lm.grid.sites}
        masks = MaskReader()

        def on_attention(site: AttentionSite, call: AttentionCall) -> Tensor:
            record.note(site, _dropped(site, groups[site.layer]).expand(call.sequences, -1))
            return windowed(call, _of_call(groups[site.layer], site, call.num_key_value_heads), masks)

        with attention_hook(lm, on_attention):
            yield


def _of_call(groups: tuple[HeadGroup, ...], site: AttentionSite, shown: int) -> tuple[HeadGroup, ...]:
    """Return the groups for a call that shows ``shown`` KV heads, as models do that repeat their keys."""
    if shown == site.num_key_value_heads:
        return groups
    copies = shown // site.num_key_value_heads
    kv_head_of = site.kv_index or tuple(at // copies for at in range(shown))
    return tuple(
        (tuple(at for at, kv_head in enumerate(kv_head_of) if kv_head in kv_heads), window)
        for kv_heads, window in groups
    )


def windowed(call: AttentionCall, groups: tuple[HeadGroup, ...], masks: MaskReader) -> Tensor:
    """Return the output (B, H, N, Dv) of a call whose KV heads keep the keys in ``groups``; ``masks`` reads the mask,
    which the layers of a pass share.
    """
    if not isinstance(call, ScoredCall):
        raise UnsupportedModelError(
            "windows need a model whose attention shows its keys; this one computes its own weights. Load it with "
            "`attn_implementation='sdpa'`"
        )
    if len(groups) == 1 and groups[0][1] is None:
        return output_after(call)
    B, H, N, _ = call.query_BHND.shape
    K = call.num_key_value_heads
    real_BS = None if call.mask is None else masks.read(call.mask, place=True).real_BS
    out = call.query_BHND.new_zeros(B, K, H // K, N, call.value_dim)
    for kv_heads, window in groups:
        if window == DROPPED:
            continue
        heads = _selection(kv_heads, 1, call.device)
        part = _of_kv_heads(call, kv_heads)
        output = output_after(part) if window is None else _windowed(part, window, real_BS)
        out[:, heads] = output.unflatten(1, (len(kv_heads), -1))
    return out.flatten(1, 2)


def _of_kv_heads(call: ScoredCall, kv_heads: tuple[int, ...]) -> ScoredCall:
    """Return the part of a call that reads these KV heads."""
    G = call.num_attention_heads // call.num_key_value_heads
    keys, queries = (_selection(kv_heads, width, call.device) for width in (1, G))

    def rows(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[1] == 1 else _select(x, queries)

    return replace(
        call,
        query_BHND=_select(call.query_BHND, queries),
        key_BKSD=_select(call.key_BKSD, keys),
        value_BKSD=_select(call.value_BKSD, keys),
        mask=rows(call.mask),
        bias=rows(call.bias),
        sinks_BHN=rows(call.sinks_BHN),
    )


@lru_cache(maxsize=1024)
def _selection(kv_heads: tuple[int, ...], width: int, device: torch.device) -> slice | Tensor:
    """Return the index of the heads of these groups of ``width`` heads: a slice for neighbours, else a tensor, made
    once, because copying a list to a GPU makes the host wait.
    """
    first, last = kv_heads[0], kv_heads[-1]
    if kv_heads == tuple(range(first, last + 1)):
        return slice(first * width, (last + 1) * width)
    with torch.inference_mode(False):  # a later call may take derivatives
        return torch.tensor([kv_head * width + i for kv_head in kv_heads for i in range(width)], device=device)


def _select(x: Tensor, heads: slice | Tensor) -> Tensor:
    return x[:, heads] if isinstance(heads, slice) else x.index_select(1, heads)


def _windowed(call: ScoredCall, window: Window, real_BS: Tensor | None) -> Tensor:
    plain = call.mask is None and call.bias is None and call.softcap is None and call.sinks_BHN is None
    if plain:
        tensors = (call.query_BHND, call.key_BKSD, call.value_BKSD)
        return windowed_output(*tensors, window, call.scale)
    queries, keys = call.geometry.queries, call.geometry.keys
    seen = seen_by_window(queries, keys, window, call.device, real_BS)[:, None]
    mask, bias = call.mask, call.bias
    if mask is not None and mask.dtype != torch.bool:
        # An additive mask may hold more than visibility, such as ALiBi.
        bias = mask if bias is None else bias + mask
        mask = mask > torch.finfo(mask.dtype).min / 2
    return output_after(replace(call, mask=seen if mask is None else mask & seen, bias=bias))


def _dropped(site: AttentionSite, groups: tuple[HeadGroup, ...]) -> Tensor:
    """Return which query heads of a layer output zero: bool (1, H)."""
    dropped_K = torch.zeros(site.num_key_value_heads, dtype=torch.bool)
    for kv_heads, window in groups:
        if window == DROPPED:
            dropped_K[list(kv_heads)] = True
    return dropped_K[list(site.kv_head_of)][None]


@dataclass(frozen=True)
class KvEviction(Intervention):
    """Continuations are read from a cache that keeps the plan's tokens of the context.

    The context is read with full attention, apart from dropped heads, which output zero. `PlanCache` then frees the
    other keys, so only tokens read after that see the loss of windows.
    """

    kept: KeptKeys
    name: str = field(default="plan", compare=False)
    fixed = True
    # The cache calls the model's own kernel, for each group of heads; the kernels of rules would be no nearer.
    uses_headscan_kernels = False
    may_share_prefix = False
    evicts = True

    @property
    def label(self) -> str:
        return self.name

    def new_cache(self, lm: LoadedModel, *, context: bool = True) -> PlanCache:
        return PlanCache(self.kept, lm.model.config, prefill="full" if context else "window")

    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> AbstractContextManager[object]:
        return cache_attention(lm.model)
