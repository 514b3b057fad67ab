"""Attention statistics from explicit weights, a block of queries at a time: exact for any mask, memory linear in N.

It serves what the fused path does not (sliding windows, soft caps, other devices, values of another width), and tests
hold the fused path against it.

Shapes: B sequences, N queries, S keys, H query heads, K KV heads, G = H / K, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscan.weights import MassWidths

#: Queries whose weights exist at one time.
BLOCK = 128


def attend(
    query_BHND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    scale: float,
    needs: frozenset[str],
    widths: MassWidths,
    *,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Attention with numbers per query; N = S, query i stands at key i.

    Args:
        mask: (B or 1, H or 1, N, S), bool (True: attend) or additive. None: causal.
        softcap: Scores pass ``softcap * tanh(s / softcap)`` first.

    Returns:
        The output (B, H, N, Dv) and ``needs`` as (B, H, N) each.
    """
    B, H, N, D = query_BHND.shape
    K, S = key_BKSD.shape[1:3]
    grouped = query_BHND.reshape(B, K, H // K, N, D)
    key, value = key_BKSD[:, :, None], value_BKSD[:, :, None]
    outs: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in needs}
    for start in range(0, N, BLOCK):
        rows = slice(start, min(start + BLOCK, N))
        scores = scale * (grouped[:, :, :, rows] @ key.mT).reshape(B, H, -1, S)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is None:
            position = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
            scores = scores.masked_fill(torch.arange(S, device=scores.device) > position, float("-inf"))
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, :, rows, :S], float("-inf"))
        else:
            scores = scores + mask[:, :, rows, :S]
        log_weights = scores.log_softmax(-1)
        weights = log_weights.exp()
        outs.append((weights.reshape(B, K, H // K, -1, S) @ value).reshape(B, H, -1, value.shape[-1]))
        for name in needs:
            parts[name].append(_number(name, weights, log_weights, rows.start, widths))
    return torch.cat(outs, 2), {name: torch.cat(part, 2) for name, part in parts.items()}


def _number(name: str, weights: Tensor, log_weights: Tensor, start: int, widths: MassWidths) -> Tensor:
    """One number per query from the weights (B, H, rows, S) of the queries from ``start`` on: (B, H, rows)."""
    if name == "first_token_weight":
        return weights[..., 0]
    if name == "entropy":
        # A masked key has weight 0 and log-weight -inf, and adds nothing.
        return -(weights * log_weights.masked_fill(weights == 0, 0.0)).sum(-1)
    if name == "sink_mass":
        return weights[..., : widths.sink].sum(-1)
    query = torch.arange(start, start + weights.shape[2], device=weights.device)[:, None]
    key = torch.arange(weights.shape[3], device=weights.device)
    if name == "recent_mass":
        seen = (key > query - widths.recent) & (key <= query) & (key >= widths.sink)
    elif name == "self_weight":
        seen = key == query
    elif name == "previous_token_weight":
        seen = key == query - 1
    else:
        raise KeyError(name)
    return torch.where(seen, weights, 0.0).sum(-1)
