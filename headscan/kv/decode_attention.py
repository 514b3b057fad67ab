"""Attention of the newest tokens to the keys of a cache, whose number grows at every step.

On a GPU in half precision, ``scaled_dot_product_attention`` may choose cuDNN, which makes a plan for every new number
of keys, in tens of milliseconds. FlashAttention 2 and torch's memory-efficient kernel need no plan. FlashAttention
splits the keys of one query among the cores of a GPU; the other kernel has masks, and values narrower than keys.

Shapes: B sequences, N queries, S keys, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.fused import cache_kernels, differentiated
from headscan.models.token_batches import is_out_of_memory

_log = logging.getLogger("headscan")

#: Numbers in a row of a bias must be a multiple of this, so that rows begin at 16 bytes.
_BIAS_ROW = 16
_efficient_kernel = torch.ops.aten._scaled_dot_product_efficient_attention


def one_query_attention(
    query_BKGD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float, seen_BNS: Tensor | None = None
) -> Tensor:
    """Return attention (B, K, G, Dv) of one query per head over the keys that ``seen_BNS`` (B or 1, 1, S) marks; None
    marks all.
    """
    if _served(query_BKGD, key_BKSD, value_BKSD):
        B, K, G, D = query_BKGD.shape
        if seen_BNS is None:
            out = flash_output(query_BKGD.reshape(B, 1, K * G, D), key_BKSD, value_BKSD, scale)
            if out is not None:
                return out.view(B, K, G, D)
        if _efficient_serves(query_BKGD.device, query_BKGD.dtype, D, value_BKSD.shape[-1], G):
            return _efficient(query_BKGD, key_BKSD, value_BKSD, scale, seen_BNS)
    mask = None if seen_BNS is None else seen_BNS[:, None]
    return F.scaled_dot_product_attention(query_BKGD, key_BKSD, value_BKSD, attn_mask=mask, scale=scale)


def _served(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernels of a GPU may serve these tensors."""
    return _on_gpu_in_half(query) and key.dtype == query.dtype and not differentiated(query, key, value)


def _on_gpu_in_half(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


def flash_output(query_BNHD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float) -> Tensor | None:
    """Return causal attention (B, N, H, D) of the last queries from FlashAttention, or None if it does not serve these
    tensors.
    """
    H, D = query_BNHD.shape[2:]
    if value_BKSD.shape[-1] != D or not _served(query_BNHD, key_BKSD, value_BKSD):
        return None
    kernels = cache_kernels(query_BNHD.device, query_BNHD.dtype, D, H // key_BKSD.shape[1])
    if kernels is None:
        return None
    return kernels.output(query_BNHD, key_BKSD.transpose(1, 2), value_BKSD.transpose(1, 2), scale)


def _efficient(
    query_BKGD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float, seen_BNS: Tensor | None
) -> Tensor:
    """Return `one_query_attention` from torch's memory-efficient kernel, whose speed does not depend on earlier
    shapes.
    """
    bias = None
    if seen_BNS is not None:
        B, K, G, _ = query_BKGD.shape
        rows, S = len(seen_BNS), seen_BNS.shape[2]
        # A finite number, so that a row of padding alone gets finite outputs.
        lowest = torch.finfo(query_BKGD.dtype).min / 2
        bias = query_BKGD.new_zeros(rows, 1, 1, S + -S % _BIAS_ROW)[..., :S]
        bias = bias.masked_fill_(~seen_BNS[:, None], lowest).expand(B, K, G, S)
    out: Tensor = _efficient_kernel(query_BKGD, key_BKSD, value_BKSD, bias, False, scale=scale)[0]
    return out


@lru_cache
def _efficient_serves(device: torch.device, dtype: torch.dtype, width: int, value_width: int, groups: int) -> bool:
    """Return True if `_efficient` agrees with plain arithmetic on a small input; builds and drivers differ."""
    tokens, generator = 75, torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 2, *shape, generator=generator).to(device, dtype)
        for shape in ((groups, width), (tokens, width), (tokens, value_width))
    )
    seen = torch.arange(tokens, device=device) >= torch.tensor([[[0]], [[40]]], device=device)
    scale, bound = width**-0.5, 8 * torch.finfo(dtype).eps
    for mask in (None, seen):
        try:
            found = _efficient(query, key, value, scale, mask)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise  # running out of memory is temporary and no evidence against the kernel
            _log.warning("memory-efficient attention does not run on %s; using torch's choice: %s", device, problem)
            return False
        scores = scale * query.float() @ key.float().mT
        scores = scores if mask is None else scores.masked_fill(~mask[:, None], float("-inf"))
        if not torch.allclose(found.float(), scores.softmax(-1) @ value.float(), rtol=bound, atol=bound):
            _log.warning("memory-efficient attention gives wrong numbers on %s; using torch's choice", device)
            return False
    return True


class OneQueryKeys(Tensor):
    """Keys or values that a single token reads: ordinary numbers, but ``scaled_dot_product_attention`` on them is
    `one_query_attention`.
    """

    @staticmethod
    def of(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, K, S, D) and values (B, K, S, Dv), without a copy; as they are if nothing is gained."""
        if not _on_gpu_in_half(keys) or torch.compiler.is_compiling():
            return keys, values
        return keys.as_subclass(OneQueryKeys), values.as_subclass(OneQueryKeys)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return (_attend_once if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attend_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` for a query (B, H, 1, D), or (B, K, H / K, D) of the same token."""
    masked = attn_mask is not None
    ours = isinstance(key, OneQueryKeys) and isinstance(value, OneQueryKeys) and query.shape[0] == key.shape[0]
    if masked:
        ours = ours and attn_mask.dtype == torch.bool and attn_mask.shape[1:3] == (1, 1)  # type: ignore[union-attr]
    if not ours or dropout_p or is_causal:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    B, K = key.shape[:2]
    out = one_query_attention(
        query.reshape(B, K, -1, query.shape[-1]), key, value, scale, attn_mask[:, 0] if attn_mask is not None else None
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])
