"""Slow oracle of gate derivatives: explicit softmax over all keys, in one graph of the whole model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.calls import ScoredCall
from headscan.attention.hooks import attention_hook
from headscan.models.loaded_model import LoadedModel


def explicit_attention(call: ScoredCall, seen_NS: Tensor) -> Tensor:
    """Return the output (B, H, N, Dv) over the keys that are visible and in ``seen_NS``."""
    H, N = call.query_BHND.shape[1:3]
    S = call.key_BKSD.shape[2]
    key, value = (x.repeat_interleave(H // x.shape[1], 1) for x in (call.key_BKSD, call.value_BKSD))
    scores = call.scale * call.query_BHND @ key.mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias
    at = torch.arange(S)
    visible = (at <= at[:, None])[S - N :]
    if call.window is not None:
        visible = visible & (at > at[:, None] - call.window)[S - N :]
    if call.mask is not None and call.mask.dtype == torch.bool:
        visible = visible & call.mask
    elif call.mask is not None:
        scores = scores + call.mask
    scores = scores.masked_fill(~(visible & seen_NS), float("-inf"))
    if call.sinks_BHN is not None:
        sinks = call.sinks_BHN[..., None].expand(len(scores), H, N, 1).to(scores.dtype)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def sequence_losses(
    lm: LoadedModel, ids: Tensor, lengths: list[int], gates: dict[int, Tensor], sink: int, recent: int
) -> Tensor:
    """Return the mean loss of each sequence (B,), with gates (B, K) by layer."""
    at = torch.arange(ids.shape[1])
    seen = (at > at[:, None] - recent) | (at < sink)

    def on_attention(site, call):
        full = explicit_attention(call, torch.ones_like(seen))
        if site.layer not in gates:
            return full
        gate = gates[site.layer][:, list(site.kv_head_of), None, None]
        return gate * full + (1 - gate) * explicit_attention(call, seen)

    with attention_hook(lm, on_attention):
        logits = lm.model(input_ids=ids, use_cache=False).logits
    losses = [F.cross_entropy(logits[row, : length - 1], ids[row, 1:length]) for row, length in enumerate(lengths)]
    return torch.stack(losses)


def oracle_damages(
    lm: LoadedModel, ids: Tensor, lengths: list[int], heads: list[tuple[int, int]], sink: int, recent: int, gate: float
) -> Tensor:
    """Return the negated derivatives (B, heads) of each sequence's mean loss by the gates."""
    widths = {site.layer: site.num_key_value_heads for site in lm.grid.sites}
    gates = {
        layer: torch.full((len(ids), widths[layer]), gate, dtype=lm.model.dtype, requires_grad=True)
        for layer in sorted({layer for layer, _ in heads})
    }
    with torch.enable_grad():
        loss = sequence_losses(lm, ids, lengths, gates, sink, recent).sum()
    found = dict(zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True))
    return -torch.stack([found[layer][:, kv_head] for layer, kv_head in heads], 1)
