"""Attention statistics from fused calls, without an N x N matrix.

With ``s_ij = scale q_i . k_j`` and the call's log-sum-exp ``lse_i``, the weight on any one key is ``exp(s_ij -
lse_i)``, the entropy is ``lse_i - scale q_i . (sum_j A_ij k_j)`` (the bracket is a second fused call with the keys as
values), and the mass on a set of keys is ``exp(lse over the set - lse_i)``.

Subtracting one vector from all keys changes none of these numbers. The first key is subtracted: on a head with an
attention sink, both terms of the entropy are then near zero instead of large and cancelling. A learned sink takes the
share ``1 - r`` of the weight, with ``r = sigmoid(lse_i - sink)``.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.attention_request import MassWidths
from headscan.attention.kernels import FusedKernels


@dataclass(frozen=True)
class FusedPass:
    """The fused call of one attention layer.

    Attributes:
        kernels: The fused calls of the device.
        query_BHND, key_BKND: As `kernels` receive them.
        centred_BKND: The keys minus the first key.
        lse_BHN: Log-sum-exp of the scores on `key_BKND`.
        centred_lse_BHN: Log-sum-exp of the scores on `centred_BKND`.
        scale: Factor of the scores.
        widths: Widths of sink and recent mass.
        window: Number of keys that a query sees; None means all up to its own.
        past: Number of keys before the first query's own.
        log_share_BHN: Logarithm of the weight that a learned sink leaves the keys; None without a learned sink.
    """

    kernels: FusedKernels
    query_BHND: Tensor
    key_BKND: Tensor
    centred_BKND: Tensor
    lse_BHN: Tensor
    centred_lse_BHN: Tensor
    scale: float
    widths: MassWidths
    window: int | None
    past: int
    log_share_BHN: Tensor | None

    def scores_on(self, key_BKND: Tensor) -> Tensor:
        """Return the score of each query on its own key (B, H, N)."""
        return _dot_keys(self.query_BHND, key_BKND, self.scale)

    def mean_centred_score(self) -> Tensor:
        """Return the weighted mean score of each query (B, H, N).

        The scores are those on the centred keys.
        """
        mean_key, _ = _call(self.kernels, self.query_BHND, self.key_BKND, self.centred_BKND, self.scale, self.window)
        return self.scale * _dot(self.query_BHND.unflatten(1, mean_key.shape[1:3]), mean_key).flatten(1, 2)

    def band_lse(self, width: int, *, skip: int) -> Tensor:
        """Return the log-sum-exp (B, H, N) over the last ``width`` keys without the first ``skip``."""
        return self.kernels.band(self.query_BHND, self.key_BKND, self.key_BKND, self.scale, width, skip)[1]

    @cached_property
    def sink_mass_BHN(self) -> Tensor:
        """The weight on the first ``widths.sink`` keys."""
        B, H, N, D = self.query_BHND.shape
        K = self.key_BKND.shape[1]
        first = self.key_BKND[:, :, : self.widths.sink].to(self.lse_BHN.dtype)
        scores = self.query_BHND.reshape(B, K, (H // K) * N, D).to(self.lse_BHN.dtype) @ first.mT
        weights = (self.scale * scores.reshape(B, H, N, -1) - self.lse_BHN[..., None]).exp()
        position = torch.arange(N, device=weights.device)[:, None]
        seen = position >= position[: first.shape[2], 0]
        if self.window is not None:
            seen = seen & (position < position[: first.shape[2], 0] + self.window)
        return torch.where(seen, weights, 0.0).sum(-1)


def attend(
    kernels: FusedKernels,
    query_BHND: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    scale: float,
    widths: MassWidths,
    *,
    window: int | None = None,
    sinks_BHN: Tensor | None = None,
) -> tuple[Tensor, FusedPass]:
    """Compute causal attention, and what numbers per query follow from.

    Args:
        kernels: The fused calls of the device.
        query_BHND, key_BKND, value_BKND: In the dtype of the kernels. With fewer queries than keys the queries belong
            to the last tokens, and only ``first_token_weight`` and ``entropy`` can be computed.
        scale: Factor of the scores.
        widths: Widths of sink and recent mass.
        window: Number of keys that a query sees; None means all up to its own.
        sinks_BHN: Learned sink logits (B or 1, H, N or 1); None without a learned sink.

    Returns:
        The output (B, H, N, Dv), and the call for `registry.fused_numbers`.
    """
    keys = key_BKND.shape[2]
    past = keys - query_BHND.shape[2]
    if window is not None and window >= keys:
        window = None
    first_key = key_BKND[:, :, :1]
    centred = key_BKND - first_key
    # Centred keys in half precision would round the model's own scores; there the first key's score is subtracted
    # afterwards.
    exact = kernels.dtype is None
    key = centred if exact else key_BKND
    grouped_out, lse = _call(kernels, query_BHND, key, value_BKND, scale, window)
    out = _ungrouped(grouped_out)
    centred_lse = lse if exact else lse - _dot_keys(query_BHND, first_key, scale)
    log_share = None
    if sinks_BHN is not None:
        true_lse = lse + _dot_keys(query_BHND, first_key, scale) if exact else lse
        log_share = F.logsigmoid(true_lse - sinks_BHN.to(lse.dtype))
        out = (out * log_share.exp()[..., None]).to(out.dtype)
    fused = FusedPass(kernels, query_BHND, key, centred, lse, centred_lse, scale, widths, window, past, log_share)
    return out, fused


def _call(
    kernels: FusedKernels, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Run one fused call, output (B, K, G, N, Dv).

    Zeros pad keys and values to one width.
    """
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
    """Return (B, H, N, D), stored as (B, N, H, D).

    Models transpose the output next, which then copies nothing.
    """
    return out_BKGND.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the row-wise dot product in float32 or wider: (..., D) x (..., D) to (...)."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    return (left.to(dtype) * right.to(dtype)).sum(-1)


def _dot_keys(query_BHND: Tensor, key_BKND: Tensor, scale: float) -> Tensor:
    """Return the score of each query on its own key (B, H, N).

    If there is only one key, it is that key's score.
    """
    grouped = query_BHND.unflatten(1, (key_BKND.shape[1], -1))
    return scale * _dot(grouped, key_BKND[:, :, None]).flatten(1, 2)
