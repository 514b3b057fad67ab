"""The oracle: every statistic in float64 from transformers' own eager attention weights, one unpadded sequence at a
time.

Slow and obviously right; it shares no code with the instrument. Values come from the KV cache, weights from
``output_attentions``, the projection from the module's name.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from tests.headscan.families import FAMILIES


def reference(
    model: PreTrainedModel, family: str, sequences: list[Tensor], *, sink: int, recent: int
) -> dict[str, Tensor]:
    """Statistics (B, L, H) in float64 of unpadded ``sequences``."""
    oracle = copy.deepcopy(model).double()
    oracle.set_attn_implementation("eager")
    rows: list[dict[str, Tensor]] = []
    for ids in sequences:
        cache = DynamicCache()
        with torch.no_grad():
            out = oracle(ids[None], past_key_values=cache, use_cache=True, output_attentions=True)
        layers = []
        for layer, attention in enumerate(out.attentions):
            projection = oracle.get_submodule(FAMILIES[family].projection.format(layer))
            weight = projection.weight.T if isinstance(projection, nn.Linear) else projection.weight
            layers.append(_layer(attention[0], cache.layers[layer].values[0], weight, sink, recent))
        rows.append({name: torch.stack([layer[name] for layer in layers]) for name in layers[0]})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _layer(A: Tensor, V: Tensor, W: Tensor, sink: int, recent: int) -> dict[str, Tensor]:
    H, N, _ = A.shape
    A, V, W = A.double(), V.double().repeat_interleave(H // V.shape[0], 0), W.double()
    out = A @ V
    projected = torch.stack([out[h] @ W[h * V.shape[2] : (h + 1) * V.shape[2]] for h in range(H)])
    entropy = -torch.special.xlogy(A, A).sum(-1)
    q, k = torch.arange(N)[:, None], torch.arange(N)
    is_sink, is_recent = k < sink, (k >= sink) & (k > q - recent)
    undefined = torch.full((H,), math.nan, dtype=torch.float64)
    return {
        "first_token_weight": A[:, :, 0].mean(1),
        "entropy": entropy.mean(1),
        "first_value_norm": V[:, 0].norm(dim=-1),
        "value_norm": V.norm(dim=-1).mean(1),
        "last_output_norm": out[:, -1].norm(dim=-1),
        "output_norm": out.norm(dim=-1).mean(1),
        "projected_output_norm": projected.norm(dim=-1).mean(1),
        "sink_mass": (A * is_sink).sum(-1).mean(1),
        "recent_mass": (A * is_recent).sum(-1).mean(1),
        "distant_mass": (A * ~(is_sink | is_recent)).sum(-1).mean(1),
        "self_weight": A.diagonal(dim1=1, dim2=2).mean(1),
        "previous_token_weight": A.diagonal(-1, 1, 2).mean(1) if N > 1 else undefined,
        "relative_entropy": (entropy[:, 1:] / (torch.arange(1, N) + 1.0).log()).mean(1) if N > 1 else undefined,
        "output_mean_norm": out.mean(1).norm(dim=-1),
    }
