"""An attention function of transformers for caches with windows, `IMPLEMENTATION`.

    model.set_attn_implementation("headscan-cache")

It computes what transformers' ``sdpa`` computes, and in addition soft caps, learned sinks and position biases, which
``sdpa`` does not support. Masks encode sliding windows.

Shapes: B sequences, N queries, S keys, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.cached_heads import CachedHeads, ScoreTerms, grouped_source
from headscan.attention.calls import ScoredCall
from headscan.attention.interface import attention_implementation
from headscan.errors import UnsupportedModelError

IMPLEMENTATION = "headscan-cache"


def register() -> None:
    """Register the function with transformers, once."""
    if IMPLEMENTATION not in AttentionInterface():
        AttentionInterface.register(IMPLEMENTATION, _forward)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def cache_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model read caches whose KV heads are held apart.

    A model that computes attention with ``sdpa`` stays as it is. Soft caps and learned sinks need `IMPLEMENTATION`.
    """
    if model.config._attn_implementation == "sdpa":
        yield
        return
    register()
    with attention_implementation(model, IMPLEMENTATION):
        yield


def scored_output(
    query_BHND: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float, mask: Tensor | None, terms: ScoreTerms
) -> Tensor:
    """Return attention (B, H, N, Dv) with changed scores; the queries are the last tokens.

    Args:
        mask: (B or 1, 1 or H, N, S), bool (True means attend) or additive; None means causal.
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
    past = call.geometry.keys - call.geometry.queries
    ones = torch.ones(call.sequences, dtype=torch.long, device=call.device)
    return call.measure(AttentionRequest(frozenset(), ones, ones, MassWidths(), past=past))[0]


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
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Learned sinks are one logit per head (gpt-oss and similar models) or one per query (B, H, N, 1).
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1)
    terms = ScoreTerms(position_bias, softcap, None if sinks is None else sinks.squeeze(-1))
    if isinstance(key, CachedHeads):
        causal = is_causal or attention_mask is not None
        source = grouped_source(key, value, causal=causal, dropout=dropout)
        out = source.attend(query, attention_mask, scaling, terms)
    elif terms.any and (is_causal or attention_mask is not None) and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = scored_output(query, key, value, scale, attention_mask, terms)
    else:
        # Its own checks refuse soft caps; it ignores other terms, so those fail here.
        if sinks is not None:
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
