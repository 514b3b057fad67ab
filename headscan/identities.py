"""Attention statistics from fused calls, without an N x N matrix.

With ``s_ij = scale q_i . k_j`` and the call's log-sum-exp ``lse_i``, the weight on any one key is ``exp(s_ij -
lse_i)``, the entropy is ``lse_i - scale q_i . (sum_j A_ij k_j)`` (the bracket is a second fused call with the keys as
values), and the mass on a set of keys is ``exp(lse over the set - lse_i)``.

All of it is unchanged when one vector is subtracted from all keys. The first key is subtracted here: on a head with an
attention sink both terms of the entropy then are near zero where they would be large and cancel.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D width of a head, W width of the recent band.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.weights import MassWidths


def fused_call(
    query_BHND: Tensor, key_BKND: Tensor, value_BKND: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by the CPU's fused kernel: output (B, H, N, D) and log-sum-exp (B, H, N).

    Causal without a ``mask``; with one (additive, (N, S)), exactly that mask. A KV head serves its group of query heads
    by a stride of zero: nothing is repeated in memory. A row whose keys are all masked gives a meaningless number.
    """
    B, H, N, D = query_BHND.shape
    K, S = key_BKND.shape[1:3]
    grouped = (B * K, H // K)
    query = query_BHND.reshape(*grouped, N, D)
    key, value = (x.reshape(B * K, 1, S, D).expand(*grouped, S, D) for x in (key_BKND, value_BKND))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out.reshape(B, H, N, D), lse.reshape(B, H, N)


def attend(
    query_BHND: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    scale: float,
    needs: frozenset[str],
    widths: MassWidths,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Causal attention with numbers per query, in float32 (float64 for float64 inputs).

    Returns:
        The output (B, H, N, D) and ``needs`` as (B, H, N) each.
    """
    groups = query_BHND.shape[1] // key_BKND.shape[1]
    key = key_BKND - key_BKND[:, :, :1]
    out, lse = fused_call(query_BHND, key, value_BKND, scale)
    numbers: dict[str, Tensor] = {}
    if "first_token_weight" in needs:
        numbers["first_token_weight"] = (-lse).exp()  # the first key is the zero vector now
    if "entropy" in needs:
        mean_key, _ = fused_call(query_BHND, key, key, scale)
        numbers["entropy"] = (lse - scale * _dot(query_BHND, mean_key)).clamp_min(0.0)
    if "self_weight" in needs:
        own = _dot(query_BHND, key.repeat_interleave(groups, dim=1))
        numbers["self_weight"] = (scale * own - lse).exp()
    if "previous_token_weight" in needs:
        previous = F.pad(key, (0, 0, 1, 0))[:, :, :-1].repeat_interleave(groups, dim=1)
        weight = (scale * _dot(query_BHND, previous) - lse).exp()
        weight[..., 0] = 0.0
        numbers["previous_token_weight"] = weight
    if needs & {"sink_mass", "recent_mass"}:
        sink = _sink_mass(query_BHND, key, lse, scale, widths.sink)
        if "sink_mass" in needs:
            numbers["sink_mass"] = sink
        if "recent_mass" in needs:
            numbers["recent_mass"] = _recent_mass(query_BHND, key, lse, sink, scale, widths)
    return out, numbers


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise dot product: (..., D) x (..., D) to (...)."""
    return torch.einsum("...d,...d->...", left, right)


def _sink_mass(query_BHND: Tensor, key_BKND: Tensor, lse_BHN: Tensor, scale: float, sink: int) -> Tensor:
    """Mass on the first ``sink`` keys, causally: (B, H, N)."""
    B, H, N, D = query_BHND.shape
    K = key_BKND.shape[1]
    first = key_BKND[:, :, :sink]
    scores = query_BHND.reshape(B, K, (H // K) * N, D) @ first.mT
    weights = (scale * scores.reshape(B, H, N, -1) - lse_BHN[..., None]).exp()
    seen = torch.ones(N, first.shape[2], dtype=torch.bool, device=weights.device).tril()
    return torch.where(seen, weights, 0.0).sum(-1)


def _recent_mass(
    query_BHND: Tensor, key_BKND: Tensor, lse_BHN: Tensor, sink_BHN: Tensor, scale: float, widths: MassWidths
) -> Tensor:
    """Mass on the last ``widths.recent`` keys that are not of the sink: (B, H, N).

    Queries run in blocks of W against the 2 W keys that can be recent for them.
    """
    B, H, N, D = query_BHND.shape
    K = key_BKND.shape[1]
    W = widths.recent
    if W + widths.sink >= N:
        return (1.0 - sink_BHN).clamp_min(0.0)  # whatever is not sink is recent
    blocks = -(-N // W)
    query = F.pad(query_BHND, (0, 0, 0, blocks * W - N))
    key = F.pad(key_BKND, (0, 0, W, blocks * W - N))  # W absent keys in front: block b sees keys [b W, b W + 2 W)
    lse = torch.empty(B, H, blocks * W, dtype=lse_BHN.dtype, device=lse_BHN.device)

    # The sink and the absent keys are out of sight of all blocks but the first few, which take a mask of their own.
    special = min(blocks, 2 + widths.sink // W)
    for block in range(special):
        rows = slice(block * W, (block + 1) * W)
        mask = _band(W, query, first_key=(block - 1) * W, sink=widths.sink)
        keys = key[:, :, block * W : (block + 2) * W]
        lse[:, :, rows] = fused_call(query[:, :, rows], keys, keys, scale, mask)[1]
    if blocks > special:
        rest = blocks - special
        queries = query[:, :, special * W :].reshape(B, H, rest, W, D).transpose(1, 2).reshape(B * rest, H, W, D)
        windows = key[:, :, special * W :].unfold(2, 2 * W, W)  # (B, K, rest, D, 2 W), a view
        keys = windows.permute(0, 2, 1, 4, 3).reshape(B * rest, K, 2 * W, D)
        mask = _band(W, query, first_key=W + widths.sink, sink=widths.sink)
        band = fused_call(queries, keys, keys, scale, mask)[1]
        lse[:, :, special * W :] = band.reshape(B, rest, H, W).transpose(1, 2).reshape(B, H, rest * W)
    mass = (lse[:, :, :N] - lse_BHN).exp()
    mass[..., : widths.sink] = 0.0  # these queries see nothing but the sink
    return mass


def _band(width: int, like: Tensor, *, first_key: int, sink: int) -> Tensor:
    """Additive mask (W, 2 W): query r sees columns r + 1 to r + W unless key ``first_key + column`` is of the sink."""
    column = torch.arange(2 * width, device=like.device)
    row = torch.arange(width, device=like.device)[:, None]
    seen = (column > row) & (column <= row + width) & (first_key + column >= sink)
    return torch.zeros(width, 2 * width, dtype=like.dtype, device=like.device).masked_fill(~seen, float("-inf"))
