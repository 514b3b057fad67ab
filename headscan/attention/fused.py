"""Attention statistics from fused calls that also return the log-sum-exp of scores, without an N x N matrix.

There is one class of kernels per device. With ``s_ij = scale q_i . k_j`` and the call's log-sum-exp ``lse_i``, the
weight on any one key is ``exp(s_ij - lse_i)``, the entropy is ``lse_i - scale q_i . (sum_j A_ij k_j)`` (the bracket is
a second fused call with the keys as values), and the mass on a set of keys is ``exp(lse over the set - lse_i)``.

Subtracting one vector from all keys changes none of these numbers. The first key is subtracted: on a head with an
attention sink, both terms of the entropy are then near zero instead of large and cancelling. A learned sink takes the
share ``1 - r`` of the weight, with ``r = sigmoid(lse_i - sink)``.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value. Outputs of
kernels are (B, K, G, N, D): on a CPU these are views of the kernel's result, where (B, H, N, D) would be a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.catalog import MassWidths
from headscan.models.token_batches import is_out_of_memory

_log = logging.getLogger("headscan")

#: Queries in one block of a band; larger blocks would score more keys outside the band.
_BAND_QUERIES = 128
#: FlashAttention loads 16 bytes at a time, which are this many half-precision numbers.
_LOAD = 8
#: Largest width of a head in FlashAttention.
_WIDEST = 256


class FusedKernels(Protocol):
    """Causal attention, full or banded; the last query is at the last key. A dtype of None means float32 or wider."""

    dtype: torch.dtype | None

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return output (B, K, G, N, D) and log-sum-exp (B, H, N). D is the same for query, key and value."""
        ...

    def band(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `causal` over each query's last ``width`` keys, without the first ``skip`` keys of all. A query that
        is left without keys has a meaningless output.
        """
        ...


class CpuKernels:
    """The fused kernel of the CPU. A KV head serves its group by a stride of zero, so nothing is copied."""

    dtype: torch.dtype | None = None

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys = key.shape[2]
        past = keys - query.shape[2]
        return self._call(query, key, value, scale, _band_mask(query, past, keys, 0, keys, 0) if past else None)

    def band(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        keys_there = key.shape[2]
        past = keys_there - query.shape[2]
        outs, lses = [], []
        inner: Tensor | None = None  # the mask of every block that is not cut at either end
        for start in range(past, keys_there, _BAND_QUERIES):
            stop = min(start + _BAND_QUERIES, keys_there)
            first = max(0, start - width + 1)
            whole = first >= max(skip, 1) and stop - start == _BAND_QUERIES
            if not whole or inner is None:
                mask = _band_mask(query, start, stop, first, width, skip)
                if whole:
                    inner = mask
            else:
                mask = inner
            keys, values = key[:, :, first:stop], value[:, :, first:stop]
            out, lse = self._call(query[:, :, start - past : stop - past], keys, values, scale, mask)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 3), torch.cat(lses, 2)

    @staticmethod
    def _call(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        B, H, N, D = query.shape
        K, S = key.shape[1:3]
        grouped = (B * K, H // K)
        # The kernel assumes contiguous vectors and returns wrong numbers for others.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        query = query.reshape(*grouped, N, D)
        key, value = (x.reshape(B * K, 1, S, D).expand(*grouped, S, D) for x in (key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return out.unflatten(0, (B, K)), lse.reshape(B, H, N)


class CudaKernels:
    """FlashAttention 2 from torch (half precision, GQA, windows), as ``aten::_flash_attention_forward`` has it."""

    def __init__(
        self, dtype: torch.dtype, forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    ) -> None:
        self.dtype: torch.dtype | None = dtype
        self._forward = forward

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self._call(query, key, value, scale, None)

    def band(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._call(query, key, value, scale, width)
        if not skip:
            return out, lse
        # The kernel cannot skip keys, so their weight is subtracted from the log-sum-exp of the few rows that see them.
        rows = min(query.shape[2], width + skip - 1)
        groups = query.shape[1] // key.shape[1]
        first = key[:, :, :skip].float().repeat_interleave(groups, 1)
        scores = scale * (query[:, :, :rows].float() @ first.mT)
        position = torch.arange(rows, device=query.device)[:, None]
        skipped = torch.arange(first.shape[2], device=query.device)
        seen = (skipped <= position) & (skipped > position - width)
        taken = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
        lse = lse.clone()
        lse[..., :rows] += torch.log1p(-(taken - lse[..., :rows]).exp().clamp_max(1.0))
        return out, lse

    def output(self, query_BNHD: Tensor, key_BSKD: Tensor, value_BSKD: Tensor, scale: float) -> Tensor:
        """Return only the output (B, N, H, D) of `causal`, by one operator. The width must be a multiple of 8."""
        tensors = (_loadable(x) for x in (query_BNHD, key_BSKD, value_BSKD))
        queries, keys = query_BNHD.shape[1], key_BSKD.shape[1]
        out: Tensor = self._forward(*tensors, None, None, queries, keys, 0.0, True, False, scale=scale)[0]
        return out

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int | None
    ) -> tuple[Tensor, Tensor]:
        tokens, D = query.shape[2:]
        out, lse, *_ = self._forward(
            *(_loadable(x.transpose(1, 2)) for x in (query, key, value)),
            None,
            None,
            tokens,
            key.shape[2],
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=None if width is None else width - 1,
            window_size_right=None if width is None else 0,
        )
        out, lse = out[..., :D].transpose(1, 2), lse[..., :tokens]
        # Of a row whose sum is NaN the kernel returns +inf, so that every weight would be exp(-inf), a finite 0. Where
        # it splits the keys among blocks, it leaves the NaN block out of the log-sum-exp, and only the output is NaN.
        lse = lse.masked_fill((lse == float("inf")) | out[..., 0].isnan(), float("nan"))
        return out.unflatten(1, (key.shape[1], -1)), lse


def _loadable(x_BNHD: Tensor) -> Tensor:
    """Return a tensor in a layout that FlashAttention accepts, padded with zeros, which change no score.

    A row that does not begin at 16 bytes is a misaligned address for the kernel, from which the process cannot recover.
    """
    if missing := -x_BNHD.shape[-1] % _LOAD:
        return F.pad(x_BNHD, (0, missing))
    steps = [step for size, step in zip(x_BNHD.shape, x_BNHD.stride(), strict=True) if size > 1]
    aligned = steps[-1] == 1 and all(step % _LOAD == 0 for step in steps[:-1])
    if aligned and x_BNHD.data_ptr() % (_LOAD * x_BNHD.element_size()) == 0:
        return x_BNHD
    return x_BNHD.clone(memory_format=torch.contiguous_format)


def kernels_for(query: Tensor, width: int, groups: int) -> FusedKernels | None:
    """Return the fused kernels for a query (B, H, N, D) with ``groups`` query heads per KV head, or None."""
    if query.device.type in ("cpu", "meta"):
        return CpuKernels()
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        kernels = CudaKernels(query.dtype)
        if _trusted(query.device, query.dtype, width, groups):
            return kernels
    return None


def cache_kernels(device: torch.device, dtype: torch.dtype, width: int, groups: int) -> CudaKernels | None:
    """Return FlashAttention for few queries on the keys of a cache, or None if it does not serve them. A width that it
    would have to pad is left out, because padding copies the cache.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or width % _LOAD or width > _WIDEST:
        return None
    return CudaKernels(dtype) if _trusted(device, dtype, width, groups) else None


@lru_cache
def _trusted(device: torch.device, dtype: torch.dtype, width: int, groups: int) -> bool:
    """Return True if the kernels agree with plain arithmetic on a small input; builds and drivers differ."""
    tokens, band, skip = 160, 32, 3
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, width, generator=generator).to(device, dtype) for heads in (2 * groups, 2, 2)
    )
    scale = width**-0.5
    position = torch.arange(tokens, device=device)
    seen = position <= position[:, None]
    in_band = seen & (position > position[:, None] - band) & (position >= skip)
    kernels = CudaKernels(dtype)
    try:
        results = kernels.causal(query, key, value, scale), kernels.band(query, key, value, scale, band, skip)
        late, _ = kernels.causal(query[:, :, band:], key, value, scale)
    except (RuntimeError, TypeError) as problem:
        if isinstance(problem, RuntimeError) and is_out_of_memory(problem):
            raise  # running out of memory is temporary and no evidence against the kernels
        _log.warning("fused attention does not run on %s; using blockwise attention: %s", device, problem)
        return False
    scores = scale * query.float() @ key.float().repeat_interleave(groups, 1).mT
    bound = 8 * torch.finfo(dtype).eps
    full = scores.masked_fill(~seen, float("-inf"))
    out = (full - full.logsumexp(-1, keepdim=True)).exp() @ value.float().repeat_interleave(groups, 1)
    lse_band = scores.masked_fill(~in_band, float("-inf")).logsumexp(-1)
    right = (
        torch.allclose(results[0][0].flatten(1, 2).float(), out, rtol=bound, atol=bound)
        and torch.allclose(late.flatten(1, 2).float(), out[:, :, band:], rtol=bound, atol=bound)
        and torch.allclose(results[0][1].float(), full.logsumexp(-1), rtol=bound, atol=bound)
        and torch.allclose(results[1][1][..., skip:].float(), lse_band[..., skip:], rtol=bound, atol=bound)
    )
    if not right:
        _log.warning("fused attention gives wrong numbers on %s; using blockwise attention", device)
    return right


def _band_mask(like: Tensor, start: int, stop: int, first: int, width: int, skip: int) -> Tensor:
    """Return the additive mask (stop - start, stop - first) of queries from ``start`` on keys from ``first``."""
    query = torch.arange(start, stop, device=like.device)[:, None]
    key = torch.arange(first, stop, device=like.device)
    seen = (key <= query) & (key > query - width) & (key >= skip)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, float("-inf"))


@dataclass(frozen=True)
class FusedPass:
    """The fused call of one attention layer.

    Attributes:
        centred_BKND: The keys minus the first key.
        lse_BHN: Log-sum-exp of the scores on `key_BKND`.
        centred_lse_BHN: Log-sum-exp of the scores on `centred_BKND`.
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
        """Return the weighted mean score of each query (B, H, N). The scores are those on the centred keys."""
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


def attend_fused(
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
    """Return the output (B, H, N, Dv) of causal attention, and the call from which numbers per query follow.

    Args:
        query_BHND, key_BKND, value_BKND: In the dtype of the kernels. With fewer queries than keys the queries belong
            to the last tokens, and only ``first_token_weight`` and ``entropy`` can be computed.
        window: Number of keys that a query sees; None means all up to its own.
        sinks_BHN: Learned sink logits (B or 1, H, N or 1); None without a learned sink.
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
    """Run one fused call, output (B, K, G, N, Dv). Zeros pad keys and values to one width."""
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
    """Return (B, H, N, D), stored as (B, N, H, D). Models transpose the output next, which then copies nothing."""
    return out_BKGND.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the row-wise dot product in float32 or wider: (..., D) x (..., D) to (...)."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    return (left.to(dtype) * right.to(dtype)).sum(-1)


def _dot_keys(query_BHND: Tensor, key_BKND: Tensor, scale: float) -> Tensor:
    """Return the score of each query on its own key (B, H, N); with a single key, the score on it."""
    grouped = query_BHND.unflatten(1, (key_BKND.shape[1], -1))
    return scale * _dot(grouped, key_BKND[:, :, None]).flatten(1, 2)
