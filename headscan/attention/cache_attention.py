"""An attention function of transformers for caches with windows, `IMPLEMENTATION`, and the stand-in for their keys.

    model.set_attn_implementation("headscan-cache")

It computes what transformers' ``sdpa`` computes, and in addition soft caps, learned sinks and position biases, which
``sdpa`` does not support. Masks encode sliding windows.

A model gets keys and values from its cache and hands them to its attention function. Where heads keep different numbers
of tokens, no dense tensor holds them. `CachedHeads` has the dense shape and no numbers; attention that it reaches is
computed by the cache, and every other operation on it fails.

Shapes: B sequences, N queries, S tokens, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headscan.attention.calls import ScoredCall
from headscan.attention.hooks import attention_implementation, learned_sinks, refuse_unread, unread_tensors
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
        """
        ...


class CachedHeads(Tensor):
    """Keys or values of all tokens, by shape only."""

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
            cached: Sizes (B, K, S, D) in the cache; None means ``sizes``, which the model has not changed.
            kv_index: KV head of each query head (H,), if an index chose them; None means groups of equal size.
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

    def changed(self, sizes: tuple[int, ...], kv_index: Tensor | None = None) -> CachedHeads:
        """Return the stand-in after the model changed the shape, or chose the KV heads that query heads read."""
        with torch._C.DisableTorchFunctionSubclass():
            dtype, device = self.dtype, self.device
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
            return args[0].changed(tuple(func(torch.empty(args[0].sizes, device="meta"), *args[1:], **kwargs).shape))
        if func is Tensor.index_select and kwargs == {} and args[1] == 1 and args[0].sizes == args[0].cached:
            return args[0].changed((args[0].sizes[0], len(args[2]), *args[0].sizes[2:]), args[2])
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
    """Return the cache that computes attention with these stand-ins."""
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


IMPLEMENTATION = "headscan-cache"


def register() -> None:
    """Register the function with transformers, once."""
    if IMPLEMENTATION not in AttentionInterface():
        AttentionInterface.register(IMPLEMENTATION, _forward)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def cache_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model read caches whose KV heads are held apart; one with ``sdpa`` attention stays as it is."""
    if model.config._attn_implementation == "sdpa":
        yield
        return
    register()
    with attention_implementation(model, IMPLEMENTATION):
        yield


def scored_output(
    query_BHND: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float, mask: Tensor | None, terms: ScoreTerms
) -> Tensor:
    """Return attention (B, H, N, Dv) with changed scores; the queries are the last tokens. The mask (B or 1, 1 or H, N,
    S) is bool (True means attend) or additive; None means causal.
    """
    if query_BHND.shape[2] == 1 and query_BHND.dtype in (torch.bfloat16, torch.float16):
        return _one_query(query_BHND, key_BKSD, value_BKSD, scale, mask, terms)
    call = ScoredCall(
        query_BHND,
        key_BKSD,
        value_BKSD,
        scale,
        causal=True,
        mask=mask,
        bias=terms.bias,
        softcap=terms.softcap,
        sinks_BHN=terms.sinks_BHN,
    )
    return output_after(call)


def _one_query(
    query_BH1D: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float, mask: Tensor | None, terms: ScoreTerms
) -> Tensor:
    """Return attention (B, H, 1, Dv) of one query, without a float32 copy of the cache."""
    B, H, _, D = query_BH1D.shape
    K, S = key_BKSD.shape[1:3]
    scores = ((scale * query_BH1D).reshape(B, K, H // K, D) @ key_BKSD.mT).float().reshape(B, H, 1, S)
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.bias is not None:
        scores = scores + terms.bias
    if mask is not None:
        # A finite number, so that a row of padding alone gets finite outputs.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if terms.sinks_BHN is not None:
        sinks = terms.sinks_BHN[..., None].expand(B, -1, -1, -1).to(scores.dtype)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :S].to(value_BKSD.dtype).reshape(B, K, H // K, S)
    return (weights @ value_BKSD).reshape(B, H, 1, -1)


def output_after(call: ScoredCall) -> Tensor:
    """Return the output (B, H, N, Dv) of a call whose queries may continue a KV cache."""
    return call.output(past=call.geometry.keys - call.geometry.queries)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    refuse_unread(unread_tensors(kwargs))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    terms = ScoreTerms(position_bias, softcap, learned_sinks(s_aux, sinks))
    if isinstance(key, CachedHeads):
        causal = is_causal or attention_mask is not None
        source = grouped_source(key, value, causal=causal, dropout=dropout)
        out = source.attend(query, attention_mask, scaling, terms)
    elif terms.any and (is_causal or attention_mask is not None) and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = scored_output(query, key, value, scale, attention_mask, terms)
    else:
        # Its own checks refuse soft caps; it ignores other terms, so those fail here.
        if terms.sinks_BHN is not None:
            if dropout:
                raise UnsupportedModelError(f"learned sinks with dropout {dropout:g} (limit 0). Call model.eval()")
            raise UnsupportedModelError("learned sinks with attention to later tokens (limit causal). Use a decoder")
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            softcap=softcap,
        )
    return out.transpose(1, 2).contiguous(), None
