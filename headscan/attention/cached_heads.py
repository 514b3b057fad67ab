"""Keys or values that a KV cache holds in groups of heads, passed through a model as one tensor.

A model gets keys and values from its cache and hands them to its attention function. Where heads keep different numbers
of tokens, no dense tensor holds them. This stand-in has the dense shape and no numbers; attention that it reaches is
computed by the cache, and every other operation on it fails.

Shapes: B sequences, N queries, S tokens, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.errors import UnsupportedModelError

#: How transformers repeats KV heads for their query heads; only the shape changes.
_RESHAPES = {Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.view}
#: Functions that read no numbers.
_FACTS = {"__get__", "size", "dim", "is_contiguous", "stride", "__repr__"}


@dataclass(frozen=True)
class ScoreTerms:
    """Changes that a model makes to its scores before the softmax.

    Attributes:
        bias: Numbers to add (B or 1, H or 1, N or 1, S), such as ALiBi's; None adds nothing.
        softcap: Cap c of ``c * tanh(s / c)``; None disables it.
        sinks_BHN: Learned sink logits (B or 1, H, N or 1); None without a learned sink.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    sinks_BHN: Tensor | None = None

    @property
    def any(self) -> bool:
        """True if the scores change at all."""
        return self.bias is not None or self.softcap is not None or self.sinks_BHN is not None


#: Scores without changes.
PLAIN = ScoreTerms()


class GroupedAttention(Protocol):
    """The attention of one layer over cached heads, for the pass that added the newest tokens."""

    @property
    def queries(self) -> int:
        """Number of newest tokens (N)."""
        ...

    @property
    def tokens(self) -> int:
        """Number of tokens that the layer has seen (S)."""
        ...

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None, terms: ScoreTerms = PLAIN) -> Tensor:
        """Return the output, shaped like ``query`` with the width of a value.

        Args:
            query: (B, H, N, D), or (B, K, H / K, D) if there is one query.
            mask: (B or 1, 1 or H, N, S), bool (True means attend) or additive; None means causal.
            scale: Factor of the scores; None means ``D ** -0.5``.
            terms: Changes of the scores.
        """
        ...


class CachedHeads(Tensor):
    """Keys or values of all tokens, by shape only.

    Raises:
        UnsupportedModelError: In any operation but attention: the model computes with cached keys itself.
    """

    source: GroupedAttention
    sizes: tuple[int, ...]
    cached: tuple[int, ...]
    kv_index: Tensor | None

    @staticmethod
    def of(
        source: GroupedAttention,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        cached: tuple[int, ...] | None = None,
        kv_index: Tensor | None = None,
    ) -> CachedHeads:
        """Return the stand-in for a tensor of these sizes.

        Args:
            cached: Sizes (B, K, S, D) in the cache, if the model has changed the shape; None means ``sizes``.
            kv_index: KV head that each query head reads (H,), if the model has chosen them by an index; None means
                groups of equal size.
        """
        heads: CachedHeads = Tensor._make_wrapper_subclass(CachedHeads, sizes, dtype=dtype, device=device)
        heads.source, heads.sizes, heads.cached, heads.kv_index = source, sizes, cached or sizes, kv_index
        return heads

    @property
    def repeated_only(self) -> bool:
        """True if the shape is that of the cache, or has every KV head several times."""
        (B, K, _, D), sizes = self.cached, self.sizes
        if self.kv_index is not None:
            return sizes == (B, len(self.kv_index), self.cached[2], D)
        return len(sizes) == 4 and (sizes[0], sizes[3]) == (B, D) and sizes[1] >= K and sizes[1] % K == 0

    def read_by(self, kv_index: Tensor) -> CachedHeads:
        """Return the stand-in for the KV heads that query heads read, one each."""
        with torch._C.DisableTorchFunctionSubclass():
            dtype, device = self.dtype, self.device
        sizes = (self.sizes[0], len(kv_index), *self.sizes[2:])
        return CachedHeads.of(self.source, sizes, dtype, device, self.cached, kv_index)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if func in _RESHAPES and isinstance(args[0], CachedHeads) and (name != "__getitem__" or _adds_axes(args[1])):
            with torch._C.DisableTorchFunctionSubclass():
                dtype, device = args[0].dtype, args[0].device
            changed = func(torch.empty(args[0].sizes, device="meta"), *args[1:], **kwargs)
            return CachedHeads.of(args[0].source, tuple(changed.shape), dtype, device, args[0].cached)
        if func is Tensor.index_select and kwargs == {} and args[1] == 1 and args[0].sizes == args[0].cached:
            return args[0].read_by(args[2])
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise UnsupportedModelError(
            f"this model's attention applies {name} to cached keys, which a cache with windows holds apart. Call"
            " model.set_attn_implementation('headscan-cache'); if the model does not support that, use a plan without"
            " windows"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedModelError(f"cached heads have no numbers, so {func} cannot run on them. Use attention only")


def _adds_axes(index: Any) -> bool:
    """Return True if an index leaves out no number: it has full slices and None only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or (isinstance(part, slice) and part == slice(None)) for part in parts)


def grouped_source(key: Tensor, value: Tensor, *, causal: bool, dropout: float) -> GroupedAttention:
    """Return the cache that computes attention with these stand-ins.

    Raises:
        UnsupportedModelError: They are of different caches, do not show all tokens or have changed in batch size, heads
            or width, attention is not causal, or dropout is on.
    """
    if not isinstance(key, CachedHeads) or not isinstance(value, CachedHeads) or key.source is not value.source:
        raise UnsupportedModelError("keys and values come from different caches. Pass one cache to the model")
    for heads in (key, value):
        if not heads.repeated_only:
            raise UnsupportedModelError(
                f"cached keys or values {heads.cached} arrive at the attention as {heads.sizes} (limit: KV heads"
                " repeated). Use a plan without windows"
            )
    if key.sizes[2] != key.source.tokens:
        raise UnsupportedModelError(
            f"attention to {key.sizes[2]} cached keys (limit {key.source.tokens}, all of them). Pass a cache with full"
            " heads to this model"
        )
    if not causal and key.source.queries > 1:
        raise UnsupportedModelError("attention to later tokens has no windows. Use a decoder")
    if dropout:
        raise UnsupportedModelError(f"attention dropout {dropout:g} (limit 0). Call model.eval()")
    return key.source if key.kv_index is None else _IndexedAttention(key.source, key.kv_index)


class _IndexedAttention:
    """The attention of query heads in groups of different sizes, as that of equal groups with queries of zeros."""

    def __init__(self, source: GroupedAttention, kv_index_H: Tensor) -> None:
        self._source = source
        self.queries, self.tokens = source.queries, source.tokens
        H = torch.arange(len(kv_index_H), device=kv_index_H.device)
        rank_H = ((kv_index_H == kv_index_H[:, None]) & (H[:, None] > H)).sum(1)
        sizes = kv_index_H.bincount()
        width = int(sizes.max())
        self._slots_H, self._slots = kv_index_H * width + rank_H, len(sizes) * width

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None, terms: ScoreTerms = PLAIN) -> Tensor:
        """As `GroupedAttention.attend`, for a query (B, H, N, D)."""
        bias, sinks_BHN = self._spread(terms.bias), self._spread(terms.sinks_BHN)
        terms = replace(terms, bias=bias, sinks_BHN=sinks_BHN)
        spread = self._spread(query)
        assert spread is not None
        return self._source.attend(spread, self._spread(mask), scale, terms).index_select(1, self._slots_H)

    def _spread(self, x: Tensor | None) -> Tensor | None:
        """Return a tensor with one entry in dimension 1 for each query head of equal groups."""
        if x is None or x.shape[1] == 1:
            return x
        spread = x.new_zeros(len(x), self._slots, *x.shape[2:])
        return spread.index_copy(1, self._slots_H, x)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    causal = is_causal or attn_mask is not None
    return grouped_source(key, value, causal=causal, dropout=dropout_p).attend(query, attn_mask, scale)
