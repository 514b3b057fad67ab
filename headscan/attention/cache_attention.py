"""An attention function of transformers for caches with windows, `IMPLEMENTATION`.

    model.set_attn_implementation("headscan-cache")

It computes what transformers' ``sdpa`` computes, and in addition soft caps, learned sinks and position biases, which
``sdpa`` does not support. Masks encode sliding windows.

Shapes: B sequences, N queries, S keys, H query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.cached_heads import CachedHeads, ScoreTerms, grouped_source
from headscan.attention.calls import ScoredCall
from headscan.errors import UnsupportedModelError

IMPLEMENTATION = "headscan-cache"


def register() -> None:
    """Register the function with transformers, once."""
    if IMPLEMENTATION not in AttentionInterface():
        AttentionInterface.register(IMPLEMENTATION, _forward)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def scored_output(
    query_BHND: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float, mask: Tensor | None, terms: ScoreTerms
) -> Tensor:
    """Return attention (B, H, N, Dv) with changed scores; the queries are the last tokens.

    Args:
        mask: (B or 1, 1 or H, N, S), bool (True means attend) or additive; None means causal.
    """
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
            raise UnsupportedModelError(f"learned sinks with dropout {dropout:g} (limit 0). Call model.eval()")
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
