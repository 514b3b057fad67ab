"""Keys or values that a KV cache holds in groups of heads, passed through a model as one tensor.

A model gets keys and values from its cache and hands them to its attention function. Where heads keep different numbers
of tokens, no dense tensor holds them. This stand-in has the dense shape and no numbers; attention that it reaches is
computed by the cache, and every other operation on it fails.

Shapes: B sequences, N queries, S tokens, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.errors import UnsupportedModelError

#: How transformers repeats KV heads for their query heads; only the shape changes.
_RESHAPES = {Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.view}


class GroupedAttention(Protocol):
    """The attention of one layer over cached heads, for the pass that added the newest tokens."""

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Return the output, shaped like ``query`` with the width of a value.

        Args:
            query: (B, H, N, D), or (B, K, H / K, D) if there is one query.
            mask: (B, 1, N, S), bool (True means attend) or additive; None means causal.
            scale: Factor of the scores; None means ``D ** -0.5``.
        """
        ...


class CachedHeads(Tensor):
    """Keys or values of all tokens, by shape only.

    Raises:
        UnsupportedModelError: In any operation but attention: the model computes with cached keys itself.
    """

    source: GroupedAttention
    _meta: Tensor

    @staticmethod
    def of(source: GroupedAttention, meta: Tensor, device: torch.device) -> CachedHeads:
        """Return the stand-in for a tensor on the meta device."""
        plain = Tensor._make_wrapper_subclass(CachedHeads, meta.shape, dtype=meta.dtype, device=device)  # type: ignore[attr-defined]
        heads = cast(CachedHeads, plain)
        heads.source, heads._meta = source, meta
        return heads

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func in _RESHAPES and isinstance(args[0], CachedHeads):
            with torch._C.DisableTorchFunctionSubclass():
                device = args[0].device
            meta = func(args[0]._meta, *args[1:], **kwargs)
            return CachedHeads.of(args[0].source, meta, device)
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "is_contiguous", "stride", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise UnsupportedModelError(
            f"this model applies {name} to cached keys, but a cache with windows holds its heads apart. Load the model"
            " with attn_implementation='sdpa'"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedModelError(f"cached heads have no numbers, so {func} cannot run on them. Use attention only")


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
    if not isinstance(key, CachedHeads) or not isinstance(value, CachedHeads) or key.source is not value.source:
        raise UnsupportedModelError("keys and values come from different caches. Pass one cache to the model")
    return key.source.attend(query, attn_mask, scale)
