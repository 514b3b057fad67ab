"""Emulations of `aten::_flash_attention_forward` and `aten::_scaled_dot_product_cudnn_attention` on the CPU.

Read off torch's `mha_fwd`: half-precision inputs, float32 scores and sums, weights rounded before they meet the values,
causality and windows aligned to the last key, widths up to 256 that are multiples of 8, rows that begin at 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Keys of a block where the kernel splits them, as it does for few queries.
SPLIT = 128


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Take (B, N, H, D), give the output (B, N, H, D) and the log-sum-exp (B, H, N), among others."""
    (N, H, D), (S, K) = query.shape[1:], key.shape[1:3]
    assert (max_q, max_k, dropout_p, is_causal, return_debug_mask) == (N, S, 0.0, True, False)
    for tensor in (query, key, value):
        _check(tensor, D, query.dtype)
    scores = scale * torch.einsum("bnkgd,bskd->bkgns", query.float().unflatten(2, (K, H // K)), key.float())
    at, row = torch.arange(S), torch.arange(S - N, S)[:, None]
    seen = at <= row
    if window_size_left is not None:
        assert window_size_right == 0
        seen = seen & (at >= row - window_size_left)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().to(query.dtype).float()
    out = torch.einsum("bkgns,bskd->bnkgd", weights, value.float()).flatten(2, 3)
    found = torch.empty_like(query).copy_(out)
    return found, _as_reported(scores, lse.squeeze(-1)).flatten(1, 2), query, query, query


def cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """Take (B, H, N, D), give the output (B, H, N, D) and the log-sum-exp (B, H, N, 1), among others."""
    assert attn_bias is None and compute_log_sumexp
    assert query.shape[2] == key.shape[2], "cuDNN places the first query at the first key"
    places = (x.transpose(1, 2) for x in (query, key, value))
    sizes = query.shape[2], key.shape[2]
    out, lse, *rest = flash_attention_forward(
        *places, None, None, *sizes, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse[..., None], *rest


def _check(tensor: Tensor, width: int, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if tensor.stride(-1) != 1:
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if tensor.shape[-1] != width or width % 8 or width > 256:
        raise RuntimeError("head_size must be a multiple of 8, at most 256, and the same for all")
    steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    if tensor.data_ptr() % 16 or any(step % 8 for step in steps):
        raise RuntimeError("CUDA error: misaligned address")


def _as_reported(scores: Tensor, lse: Tensor) -> Tensor:
    """A sum that is NaN is +inf; where the keys are split, the blocks without one are all that counts."""
    if scores.shape[-1] <= SPLIT:
        return lse.masked_fill(lse.isnan(), float("inf"))
    blocks = torch.stack([part.logsumexp(-1) for part in scores.split(SPLIT, -1)], -1)
    joined = blocks.masked_fill(blocks.isnan(), float("-inf")).logsumexp(-1)
    return joined.masked_fill(joined == float("-inf"), float("inf"))
