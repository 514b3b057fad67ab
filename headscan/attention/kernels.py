"""Fused attention calls that also return the log-sum-exp of scores.

There is one class per device.

Shapes: B sequences, N queries and keys, H query heads, K KV heads, G = H / K, D width of a head. Outputs are (B, K, G,
N, D): on a CPU these are views of the kernel's result, where (B, H, N, D) would be a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.models.token_batches import is_out_of_memory

_log = logging.getLogger("headscan")

#: Queries in one block of a band; larger blocks would score more keys outside the band.
_BAND_QUERIES = 128
#: FlashAttention loads 16 bytes at a time, which are this many half-precision numbers.
_LOAD = 8


class FusedKernels(Protocol):
    """Causal attention, full or banded.

    The last query is at the last key.

    Attributes:
        dtype: Required dtype of queries, keys and values; None requires float32 or wider.
    """

    dtype: torch.dtype | None

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return output (B, K, G, N, D) and log-sum-exp (B, H, N).

        D is the same for query, key and value.
        """
        ...

    def band(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `causal` over each query's last ``width`` keys, without ``skip``.

        ``skip`` is the number of keys left out at their start.

        A query that is left without keys has a meaningless output.
        """
        ...


class CpuKernels:
    """The fused kernel of the CPU.

    A KV head serves its group by a stride of zero, so nothing is copied.
    """

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
    """FlashAttention 2 from torch: half precision, GQA and windows.

    Args:
        dtype: bfloat16 or float16.
        forward: The operator, with the arguments and results of ``aten::_flash_attention_forward``.
    """

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
    """Return a tensor in a layout that FlashAttention accepts.

    It is copied only if its own layout is not accepted.

    The width is padded with zeros, which change no score. A row that does not begin at 16 bytes is a misaligned address
    for the kernel, an error from which the process cannot recover.
    """
    if missing := -x_BNHD.shape[-1] % _LOAD:
        return F.pad(x_BNHD, (0, missing))
    steps = [step for size, step in zip(x_BNHD.shape, x_BNHD.stride(), strict=True) if size > 1]
    aligned = steps[-1] == 1 and all(step % _LOAD == 0 for step in steps[:-1])
    if aligned and x_BNHD.data_ptr() % (_LOAD * x_BNHD.element_size()) == 0:
        return x_BNHD
    return x_BNHD.clone(memory_format=torch.contiguous_format)


def kernels_for(query: Tensor, width: int, groups: int) -> FusedKernels | None:
    """Return the fused kernels for a query (B, H, N, D), or None.

    ``groups`` is the number of query heads per KV head.
    """
    if query.device.type in ("cpu", "meta"):
        return CpuKernels()
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        kernels = CudaKernels(query.dtype)
        if _trusted(query.device, query.dtype, width, groups):
            return kernels
    return None


@lru_cache
def _trusted(device: torch.device, dtype: torch.dtype, width: int, groups: int) -> bool:
    """Return True if the device's kernels agree with plain arithmetic.

    It compares a small input, because builds and drivers differ.
    """
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
        found = kernels.causal(query, key, value, scale), kernels.band(query, key, value, scale, band, skip)
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
        torch.allclose(found[0][0].flatten(1, 2).float(), out, rtol=bound, atol=bound)
        and torch.allclose(late.flatten(1, 2).float(), out[:, :, band:], rtol=bound, atol=bound)
        and torch.allclose(found[0][1].float(), full.logsumexp(-1), rtol=bound, atol=bound)
        and torch.allclose(found[1][1][..., skip:].float(), lse_band[..., skip:], rtol=bound, atol=bound)
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
