"""Attention statistics from fused calls, without an N x N matrix.

With ``s_ij = scale q_i . k_j`` and the call's log-sum-exp ``lse_i``, the weight on any one key is ``exp(s_ij -
lse_i)``, the entropy is ``lse_i - scale q_i . (sum_j A_ij k_j)`` (the bracket is a second fused call with the keys as
values), and the mass on a set of keys is ``exp(lse over the set - lse_i)``.

All of it is unchanged when one vector is subtracted from all keys. The first key is subtracted here: on a head with an
attention sink both terms of the entropy then are near zero where they would be large and cancel. A learned sink takes
the share ``1 - r``, ``r = sigmoid(lse_i - sink)``, of what the keys would have had.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.attention_request import MassWidths
from headscan.attention.kernels import FusedKernels


def attend(
    kernels: FusedKernels,
    query_BHND: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    scale: float,
    needs: frozenset[str],
    widths: MassWidths,
    *,
    window: int | None = None,
    sinks_BHN: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Causal attention with numbers per query.

    Args:
        kernels: The fused calls of the device.
        query_BHND, key_BKND, value_BKND: In the dtype that the kernels want; with fewer queries than keys these are the
            last tokens', and only ``first_token_weight`` and ``entropy`` may be needed.
        scale: Factor of the scores.
        needs: Names of `AttentionRequest.per_query`.
        widths: Widths of sink and recent mass.
        window: How many keys a query sees; None: all up to its own.
        sinks_BHN: Learned sink logits (B or 1, H, N or 1), or None.

    Returns:
        The output (B, H, N, Dv) and ``needs`` as (B, H, N) each, float32 or wider.
    """
    keys = key_BKND.shape[2]
    past = keys - query_BHND.shape[2]
    if window is not None and window >= keys:
        window = None
    first_key = key_BKND[:, :, :1]
    centred = key_BKND - first_key
    # Where keys are float32 the scores are centred, too. In half precision that would round the model's own scores, so
    # there the first key's score is subtracted afterwards.
    exact = kernels.dtype is None
    key = centred if exact else key_BKND
    grouped_out, lse = _call(kernels, query_BHND, key, value_BKND, scale, window)
    out = _ungrouped(grouped_out)
    centred_lse = lse if exact else lse - _dot_keys(query_BHND, first_key, scale)
    numbers: dict[str, Tensor] = {}
    if "first_token_weight" in needs:
        numbers["first_token_weight"] = _in_window((-centred_lse).exp(), window, past)
    if "entropy" in needs:
        mean_key, _ = _call(kernels, query_BHND, key, centred, scale, window)
        mean_score = scale * _dot(query_BHND.unflatten(1, mean_key.shape[1:3]), mean_key).flatten(1, 2)
        numbers["entropy"] = (centred_lse - mean_score).clamp_min(0.0)
    if "weight_sum" in needs:
        numbers["weight_sum"] = torch.where(lse.isfinite(), 1.0, float("nan"))
    if "self_weight" in needs:
        numbers["self_weight"] = (_dot_keys(query_BHND, key, scale) - lse).exp()
    if "previous_token_weight" in needs:
        weight = (_dot_keys(query_BHND, F.pad(key, (0, 0, 1, 0))[:, :, :-1], scale) - lse).exp()
        weight[..., 0] = 0.0
        numbers["previous_token_weight"] = weight if window != 1 else torch.zeros_like(weight)
    if needs & {"sink_mass", "recent_mass"}:
        sink = _sink_mass(query_BHND, key, lse, scale, widths.sink, window)
        if "sink_mass" in needs:
            numbers["sink_mass"] = sink
        if "recent_mass" in needs:
            numbers["recent_mass"] = _recent_mass(kernels, query_BHND, key, lse, sink, scale, widths, window)
    if sinks_BHN is not None:
        true_lse = lse + _dot_keys(query_BHND, first_key, scale) if exact else lse
        log_share = F.logsigmoid(true_lse - sinks_BHN.to(lse.dtype))
        out, numbers = _leave_to_sink(out, numbers, log_share)
    return out, numbers


def _call(
    kernels: FusedKernels, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """One fused call, its output (B, K, G, N, Dv); keys and values of different widths are filled up with zeros."""
    D, Dv = key.shape[-1], value.shape[-1]
    if Dv > D:
        query, key = F.pad(query, (0, Dv - D)), F.pad(key, (0, Dv - D))
    elif Dv < D:
        value = F.pad(value, (0, D - Dv))
    if window is None:
        out, lse = kernels.causal(query, key, value, scale)
    else:
        out, lse = kernels.band(query, key, value, scale, window)
    return out[..., :Dv], lse


def _ungrouped(out_BKGND: Tensor) -> Tensor:
    """(B, H, N, D), in memory (B, N, H, D): what the model makes of it anyway, so nothing is copied twice."""
    return out_BKGND.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise dot product in float32 or wider: (..., D) x (..., D) to (...)."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    return (left.to(dtype) * right.to(dtype)).sum(-1)


def _dot_keys(query_BHND: Tensor, key_BKND: Tensor, scale: float) -> Tensor:
    """Score of every query on the key beside it (or on the only one): (B, H, N)."""
    grouped = query_BHND.unflatten(1, (key_BKND.shape[1], -1))
    return scale * _dot(grouped, key_BKND[:, :, None]).flatten(1, 2)


def _in_window(weight_BHN: Tensor, window: int | None, past: int) -> Tensor:
    """Zero where the first key is out of sight."""
    if window is not None:
        weight_BHN[..., max(0, window - past) :] = 0.0
    return weight_BHN


def _sink_mass(
    query_BHND: Tensor, key_BKND: Tensor, lse_BHN: Tensor, scale: float, sink: int, window: int | None
) -> Tensor:
    """Mass on the first ``sink`` keys that a query sees: (B, H, N)."""
    B, H, N, D = query_BHND.shape
    K = key_BKND.shape[1]
    first = key_BKND[:, :, :sink].to(lse_BHN.dtype)
    scores = query_BHND.reshape(B, K, (H // K) * N, D).to(lse_BHN.dtype) @ first.mT
    weights = (scale * scores.reshape(B, H, N, -1) - lse_BHN[..., None]).exp()
    position = torch.arange(N, device=weights.device)[:, None]
    seen = position >= position[: first.shape[2], 0]
    if window is not None:
        seen = seen & (position < position[: first.shape[2], 0] + window)
    return torch.where(seen, weights, 0.0).sum(-1)


def _recent_mass(
    kernels: FusedKernels,
    query_BHND: Tensor,
    key_BKND: Tensor,
    lse_BHN: Tensor,
    sink_BHN: Tensor,
    scale: float,
    widths: MassWidths,
    window: int | None,
) -> Tensor:
    """Mass on the last ``widths.recent`` keys that are not of the sink: (B, H, N)."""
    N = query_BHND.shape[2]
    if widths.recent + widths.sink >= N or (window is not None and widths.recent >= window):
        return (1.0 - sink_BHN).clamp_min(0.0)  # whatever is not sink is recent
    _, lse = kernels.band(query_BHND, key_BKND, key_BKND, scale, widths.recent, widths.sink)
    mass = (lse - lse_BHN).exp()
    mass[..., : widths.sink] = 0.0  # these queries see nothing but the sink
    return mass


def _leave_to_sink(
    out_BHND: Tensor, numbers: dict[str, Tensor], log_share_BHN: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scale what the keys would have had by the share that a learned sink leaves them."""
    share = log_share_BHN.exp()
    scaled = {name: values * share for name, values in numbers.items()}
    if "entropy" in numbers:
        scaled["entropy"] = scaled["entropy"] - share * log_share_BHN  # -sum rA ln rA
    return (out_BHND * share[..., None]).to(out_BHND.dtype), scaled
