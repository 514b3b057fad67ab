"""Attention statistics from fused calls that also return the log-sum-exp of scores, without an N x N matrix.

There is one class of kernels per device. With ``s_ij = scale q_i . k_j`` and the call's log-sum-exp ``lse_i``, the
weight on any one key is ``exp(s_ij - lse_i)``, the entropy is ``lse_i - scale q_i . (sum_j A_ij k_j)`` (the bracket is
a second fused call with the keys as values), and the mass on a set of keys is ``exp(lse over the set - lse_i)``. On a
CPU, blocks of explicit scores that stay in its cache give the output and the entropy together.

Subtracting one vector from all keys changes none of these numbers. The first key is subtracted: on a head with an
attention sink, both terms of the entropy are then near zero instead of large and cancelling. In CUDA's half-precision
kernels that would round the model's scores, so there ``lse_i`` alone is corrected afterwards
(`FusedCall.centred_lse_BHN`). A learned sink takes the share ``1 - r`` of the weight, with ``r = sigmoid(lse_i -
sink)``.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value. Outputs of
kernels are (B, K, G, N, D): on a CPU these are views of the kernel's result, where (B, H, N, D) would be a copy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from headscan.catalog import MassWidths
from headscan.models.forward_inputs import widened
from headscan.models.token_batches import is_out_of_memory

_log = logging.getLogger("headscan")

#: Queries in one block of a band; larger blocks would score more keys outside the band.
_BAND_QUERIES = 128
#: Queries and keys of a block of explicit scores, and scores of a block for each thread, which fit in its cache.
_BLOCK_QUERIES, _BLOCK_KEYS, _BLOCK_SCORES = 256, 1024, 1 << 19
#: Blocks of queries in a short sequence: half of a block on the diagonal is computed in vain.
_BLOCKS = 8
#: Lowest difference of a score from its query's largest, in powers of two. Its weight, 1e-38, is lost in any sum; that
#: of lower ones, which is no normal float32, takes a CPU many times as long.
_LOWEST = -126.0
#: Largest rounding of a score, which is the relative error of a weight that is computed from it. Scores of up to 800
#: round by less in float32.
_ROUNDING = 1e-4
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

    def band(self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
        """Return `causal` over each query's last ``width`` keys."""
        ...

    def causal_with_entropy(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return `causal` and the entropy of the weights (B, H, N), without gradients; None if two calls of `causal`
        compute both.
        """
        ...


class CpuKernels:
    """The fused kernel of the CPU. A KV head serves its group by a stride of zero, so nothing is copied."""

    dtype: torch.dtype | None = None

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys = key.shape[2]
        past = keys - query.shape[2]
        return self._call_kernel(query, key, value, scale, _band_mask(query, past, keys, 0, keys) if past else None)

    def band(self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
        S = key.shape[2]
        past = S - query.shape[2]
        outs, lses = [], []
        whole_block_mask: Tensor | None = None  # equal for all blocks that are not cut at either end
        for start in range(past, S, _BAND_QUERIES):
            stop = min(start + _BAND_QUERIES, S)
            first_key = max(0, start - width + 1)
            is_whole_block = first_key > 0 and stop - start == _BAND_QUERIES
            if not is_whole_block:
                mask = _band_mask(query, start, stop, first_key, width)
            else:
                if whole_block_mask is None:
                    whole_block_mask = _band_mask(query, start, stop, first_key, width)
                mask = whole_block_mask
            keys, values = key[:, :, first_key:stop], value[:, :, first_key:stop]
            out, lse = self._call_kernel(query[:, :, start - past : stop - past], keys, values, scale, mask)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 3), torch.cat(lses, 2)

    @staticmethod
    def causal_with_entropy(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return `causal` and the entropy of the weights (B, H, N), in less time than two fused calls. The value may be
        of another width. Nothing is differentiable.

        With ``x_ij`` the score minus the largest of its query, divided by ``ln 2``, and ``Z_i = sum_j 2^x_ij``, the
        entropy is ``ln 2 (log2 Z_i - sum_j 2^x_ij x_ij / Z_i)``: a power of two takes a third of the time of ``exp``.
        """
        B, H, N, D = query.shape
        K, S, Dv = value.shape[1:]
        G, past = H // K, S - N
        query = (query * (scale / math.log(2))).reshape(B * K, G, N, D)
        key, value = key.reshape(B * K, S, D), value.reshape(B * K, S, Dv)
        out = query.new_empty(B * K, G, N, Dv)
        largest, sums, products = query.new_empty(3, B * K, G, N)
        block = min(_BLOCK_QUERIES, max(64, N // _BLOCKS), N)
        head_scores = G * block * min(_BLOCK_KEYS, S)
        most_scores = max(head_scores, _BLOCK_SCORES * torch.get_num_threads())
        # Two buffers: memory from the system for every block would cost more than a product.
        buffers = query.new_empty(2, min(most_scores, B * K * head_scores))
        later = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)
        for start in range(0, N, block):
            rows = slice(start, min(start + block, N))
            first_own_key, keys_end = past + rows.start, past + rows.stop
            heads_per_block = max(1, most_scores // (G * block * min(_BLOCK_KEYS, keys_end)))
            for first_head in range(0, B * K, heads_per_block):
                heads = slice(first_head, min(first_head + heads_per_block, B * K))
                block_query = query[heads, :, rows].flatten(1, 2)
                sums_of_rows: _KeySums | None = None
                # The first block of keys, at the end, holds every row's own key.
                for stop in range(keys_end, 0, -_BLOCK_KEYS):
                    keys = slice(max(0, stop - _BLOCK_KEYS), stop)
                    hidden = later[: rows.stop - rows.start, : max(0, stop - first_own_key)]
                    block_sums = _key_sums(block_query, key[heads, keys], value[heads, keys], hidden, buffers)
                    sums_of_rows = block_sums if sums_of_rows is None else sums_of_rows.joined(block_sums)
                assert sums_of_rows is not None
                out[heads, :, rows] = sums_of_rows.out.unflatten(1, (G, -1))
                largest[heads, :, rows] = sums_of_rows.largest.unflatten(1, (G, -1))
                sums[heads, :, rows] = sums_of_rows.sums.unflatten(1, (G, -1))
                products[heads, :, rows] = sums_of_rows.products.unflatten(1, (G, -1))
        log_sums = sums.log2()
        entropy = log_sums.sub(products.div_(sums)).clamp_min_(0.0)
        out.div_(sums[..., None])
        lse, entropy = (x.mul_(math.log(2)).view(B, H, N) for x in (largest.add_(log_sums), entropy))
        return out.unflatten(0, (B, K)), lse, entropy

    @staticmethod
    def _call_kernel(
        query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
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


class _KeySums(NamedTuple):
    """Sums over a block of keys for each query (K, GN), which sees at least one of them. With ``x`` a score in powers
    of two minus the largest one, ``out`` is the sum of ``2^x v`` (K, GN, Dv), ``sums`` that of ``2^x``, and
    ``products`` that of ``2^x x``.
    """

    out: Tensor
    largest: Tensor
    sums: Tensor
    products: Tensor

    def joined(self, other: _KeySums) -> _KeySums:
        """Return the sums over the keys of both."""
        largest = torch.maximum(self.largest, other.largest)
        ours, theirs = self._relative_to(largest), other._relative_to(largest)
        return _KeySums(ours.out + theirs.out, largest, ours.sums + theirs.sums, ours.products + theirs.products)

    def _relative_to(self, largest: Tensor) -> _KeySums:
        """Return the sums if ``largest`` is subtracted from the scores instead."""
        shift = self.largest - largest
        share = shift.exp2()
        products = share * (self.products + shift * self.sums)
        return _KeySums(share[..., None] * self.out, largest, share * self.sums, products)


def _key_sums(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, buffers: Tensor) -> _KeySums:
    """Return the sums of queries (K, GN, D) over keys (K, C, D), of whose last ones ``hidden`` (N, n) hides some. The
    scores and weights are written to ``buffers``.
    """
    shape = *query.shape[:2], key.shape[1]
    scores, weights = (x[: math.prod(shape)].view(shape) for x in buffers)
    torch.bmm(query, key.mT, out=scores)
    R, last_keys = hidden.shape
    scores.unflatten(1, (-1, R))[..., shape[2] - last_keys :].masked_fill_(hidden, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    torch.exp2(scores.sub_(largest).clamp_(min=_LOWEST), out=weights)
    out = torch.bmm(weights, value)
    return _KeySums(out, largest[..., 0], weights.sum(-1), scores.mul_(weights).sum(-1))


class CudaKernels:
    """FlashAttention 2 from torch (half precision, GQA, windows), as ``aten::_flash_attention_forward`` has it.

    For whole sequences, cuDNN's kernel takes its place where torch would choose it for the model itself: on Hopper it
    takes about half the time. It builds a plan for every new shape, as it does for the plain model. A ``cudnn`` of None
    uses FlashAttention alone.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward,
        cudnn: Callable[..., Any] | None = torch.ops.aten._scaled_dot_product_cudnn_attention,
        prefers_cudnn: Callable[[Tensor, Tensor, Tensor], bool] | None = None,
    ) -> None:
        self.dtype: torch.dtype | None = dtype
        self._forward, self._cudnn, self._prefers_cudnn = forward, cudnn, prefers_cudnn or _torch_prefers_cudnn

    def __str__(self) -> str:
        return "FlashAttention 2" if self._cudnn is None else "cuDNN's attention beside FlashAttention 2"

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # cuDNN aligns causality to the first key, which differs where keys precede the first query.
        is_whole_sequence = query.shape[2] == key.shape[2]
        if self._cudnn is None or not is_whole_sequence or not self._prefers_cudnn(query, key, value):
            return self._call_kernel(query, key, value, scale, None)
        D = query.shape[-1]
        query, key, value = (_loadable(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = self._cudnn(query, key, value, None, True, 0.0, True, False, scale=scale)
        return _checked(out[..., :D], lse.view(out.shape[:3]), key.shape[1])

    def band(self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
        return self._call_kernel(query, key, value, scale, width)

    def causal_with_entropy(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        return None

    def output(self, query_BNHD: Tensor, key_BSKD: Tensor, value_BSKD: Tensor, scale: float) -> Tensor:
        """Return only the output (B, N, H, D) of `causal`, by one operator. The width must be a multiple of 8."""
        tensors = (_loadable(x) for x in (query_BNHD, key_BSKD, value_BSKD))
        queries, keys = query_BNHD.shape[1], key_BSKD.shape[1]
        out: Tensor = self._forward(*tensors, None, None, queries, keys, 0.0, True, False, scale=scale)[0]
        return out

    def _call_kernel(
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
        return _checked(out[..., :D].transpose(1, 2), lse[..., :tokens], key.shape[1])


def _checked(out_BHND: Tensor, lse_BHN: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return a kernel's output (B, K, G, N, D) and log-sum-exp, NaN where the scores were."""
    # Of a row whose sum is NaN FlashAttention returns +inf, so that every weight would be exp(-inf), a finite 0. Where
    # it splits the keys among blocks, it leaves the NaN block out of the log-sum-exp. The output is NaN in both cases.
    return out_BHND.unflatten(1, (kv_heads, -1)), lse_BHN.add(out_BHND[..., 0], alpha=0)


def _torch_prefers_cudnn(query_BHND: Tensor, key_BKND: Tensor, value_BKND: Tensor) -> bool:
    """Return True if torch would run this causal call with cuDNN."""
    if any(0 in x.stride() for x in (query_BHND, key_BKND, value_BKND)):
        return False  # expanded tensors: cuDNN wants keys of every row in memory
    choice = torch._fused_sdp_choice(query_BHND, key_BKND, value_BKND, is_causal=True, enable_gqa=True)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def _loadable(x_BNHD: Tensor) -> Tensor:
    """Return a tensor in a layout that FlashAttention accepts, padded with zeros, which change no score.

    A row that does not begin at 16 bytes is a misaligned address for the kernel, from which the process cannot recover.
    """
    if missing := -x_BNHD.shape[-1] % _LOAD:
        return F.pad(x_BNHD, (0, missing))
    strides = [stride for size, stride in zip(x_BNHD.shape, x_BNHD.stride(), strict=True) if size > 1]
    has_aligned_rows = strides[-1] == 1 and all(stride % _LOAD == 0 for stride in strides[:-1])
    if has_aligned_rows and x_BNHD.data_ptr() % (_LOAD * x_BNHD.element_size()) == 0:
        return x_BNHD
    return x_BNHD.clone(memory_format=torch.contiguous_format)


def kernels_for(query: Tensor, width: int, groups: int) -> FusedKernels | None:
    """Return the fused kernels for a query (B, H, N, D) with ``groups`` query heads per KV head, or None."""
    if query.device.type in ("cpu", "meta"):
        return CpuKernels()
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        return _cuda_kernels(query.device, query.dtype, width, groups)
    return None


def cache_kernels(device: torch.device, dtype: torch.dtype, width: int, groups: int) -> CudaKernels | None:
    """Return FlashAttention for few queries on the keys of a cache, or None if it does not serve them. A width that it
    would have to pad is left out, because padding copies the cache.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or width % _LOAD or width > _WIDEST:
        return None
    return _cuda_kernels(device, dtype, width, groups)


@lru_cache
def _cuda_kernels(device: torch.device, dtype: torch.dtype, width: int, groups: int) -> CudaKernels | None:
    """Return the kernels that agree with plain arithmetic on a small input; builds and drivers differ."""
    for kernels in (CudaKernels(dtype), CudaKernels(dtype, cudnn=None)):
        if _agree(kernels, device, width, groups):
            return kernels
    return None


def _agree(kernels: CudaKernels, device: torch.device, width: int, groups: int) -> bool:
    tokens, band = 160, 32
    dtype = kernels.dtype or torch.float32
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, width, generator=generator).to(device, dtype) for heads in (2 * groups, 2, 2)
    )
    scale = width**-0.5
    position = torch.arange(tokens, device=device)
    is_seen = position <= position[:, None]
    is_in_band = is_seen & (position > position[:, None] - band)
    try:
        out, lse = kernels.causal(query, key, value, scale)
        band_out, band_lse = kernels.band(query, key, value, scale, band)
        last_out, _ = kernels.causal(query[:, :, band:], key, value, scale)
    except (RuntimeError, TypeError) as problem:
        if isinstance(problem, RuntimeError) and is_out_of_memory(problem):
            raise  # running out of memory is temporary and no evidence against the kernels
        _log.warning("%s does not run on %s and is not used: %s", kernels, device, problem)
        return False
    scores = scale * query.float() @ key.float().repeat_interleave(groups, 1).mT
    bound = 8 * torch.finfo(dtype).eps
    causal_scores = scores.masked_fill(~is_seen, float("-inf"))
    band_scores = scores.masked_fill(~is_in_band, float("-inf"))
    values = value.float().repeat_interleave(groups, 1)
    expected_out, expected_band_out = causal_scores.softmax(-1) @ values, band_scores.softmax(-1) @ values
    agrees = (
        torch.allclose(out.flatten(1, 2).float(), expected_out, rtol=bound, atol=bound)
        and torch.allclose(last_out.flatten(1, 2).float(), expected_out[:, :, band:], rtol=bound, atol=bound)
        and torch.allclose(lse.float(), causal_scores.logsumexp(-1), rtol=bound, atol=bound)
        and torch.allclose(band_out.flatten(1, 2).float(), expected_band_out, rtol=bound, atol=bound)
        and torch.allclose(band_lse.float(), band_scores.logsumexp(-1), rtol=bound, atol=bound)
    )
    if not agrees:
        _log.warning("%s gives wrong numbers on %s and is not used", kernels, device)
    return agrees


def _band_mask(like: Tensor, start: int, stop: int, first: int, width: int) -> Tensor:
    """Return the additive mask (stop - start, stop - first) of queries from ``start`` on keys from ``first``."""
    query = torch.arange(start, stop, device=like.device)[:, None]
    key = torch.arange(first, stop, device=like.device)
    is_seen = (key <= query) & (key > query - width)
    return torch.zeros(is_seen.shape, dtype=like.dtype, device=like.device).masked_fill(~is_seen, float("-inf"))


@dataclass(frozen=True)
class FusedCall:
    """The fused call of one attention layer.

    Attributes:
        kernel_key_BKND: The keys as the kernels read them: minus the first key if they compute in float32
            or wider (``kernels.dtype`` is None); else the model's own.
        centred_BKND: The keys minus the first key.
        lse_BHN: Log-sum-exp of the scores on `kernel_key_BKND`.
        past: Number of keys before the first query's own.
        entropy_with_output_BHN: Entropy of the weights on the keys; None if the output came without it.
        log_share_BHN: Logarithm of the weight that a learned sink leaves the keys; None without a learned sink.
    """

    kernels: FusedKernels
    query_BHND: Tensor
    kernel_key_BKND: Tensor
    centred_BKND: Tensor
    lse_BHN: Tensor
    scale: float
    widths: MassWidths
    window: int | None
    past: int
    entropy_with_output_BHN: Tensor | None
    log_share_BHN: Tensor | None

    @property
    def loses_weights(self) -> bool:
        """True if scores are so large that a weight from a score and the log-sum-exp of a kernel, which sums in another
        order, is off by more than `_ROUNDING`. A GPU would have to be waited for, so there it is False.

        The score of a key with a large weight is as large as the log-sum-exp, which is at hand.
        """
        if self.lse_BHN.device.type != "cpu":
            return False
        largest = self.lse_BHN.detach().abs().amax()
        return float(largest) * torch.finfo(self.lse_BHN.dtype).eps > _ROUNDING

    @cached_property
    def _wide_query_BKGND(self) -> Tensor:
        return widened(self.query_BHND).unflatten(1, (self.kernel_key_BKND.shape[1], -1))

    @cached_property
    def _first_scores_BHNF(self) -> Tensor:
        """Scores on the first keys: those of the sink, at least one."""
        query = self._wide_query_BKGND
        first = widened(self.kernel_key_BKND[:, :, : max(self.widths.sink, 1)])
        return self.scale * (query.flatten(2, 3) @ first.mT).unflatten(2, query.shape[2:4]).flatten(1, 2)

    @cached_property
    def centred_lse_BHN(self) -> Tensor:
        """Log-sum-exp of the scores on `centred_BKND`."""
        # In half precision centred keys would round the model's own scores; the first key's is subtracted afterwards.
        return self.lse_BHN if self.kernels.dtype is None else self.lse_BHN - self._first_scores_BHNF[..., 0]

    def scores_before(self, distance: int) -> Tensor:
        """Return the score of each query on the key ``distance`` tokens before its own (B, H, N), 0 without one."""
        query = self._wide_query_BKGND[..., distance:, :]
        key = widened(self.kernel_key_BKND[:, :, None, : query.shape[3]])
        return F.pad(self.scale * (query * key).sum(-1), (distance, 0)).flatten(1, 2)

    def entropy(self) -> Tensor:
        """Return the entropy of each query's weights on the keys (B, H, N)."""
        if self.entropy_with_output_BHN is not None:
            return self.entropy_with_output_BHN
        mean_key, _ = _attend_padded(
            self.kernels, self.query_BHND, self.kernel_key_BKND, self.centred_BKND, self.scale, self.window
        )
        mean_score = self.scale * (self._wide_query_BKGND * widened(mean_key)).sum(-1).flatten(1, 2)
        return (self.centred_lse_BHN - mean_score).clamp_min(0.0)

    @cached_property
    def _sink_weights_BHNF(self) -> Tensor:
        """Weights on the first ``widths.sink`` keys."""
        weights = (self._first_scores_BHNF[..., : self.widths.sink] - self.lse_BHN[..., None]).exp()
        return torch.where(self._within(weights, self.window), weights, 0.0)

    @cached_property
    def sink_mass_BHN(self) -> Tensor:
        """The weight on the first ``widths.sink`` keys."""
        return self._sink_weights_BHNF.sum(-1)

    @cached_property
    def recent_mass_BHN(self) -> Tensor:
        """The weight on the last ``widths.recent`` keys that are not of the sink."""
        recent, weights = self.widths.recent, self._sink_weights_BHNF
        if recent + self.widths.sink >= weights.shape[2] or (self.window is not None and recent >= self.window):
            return (1.0 - self.sink_mass_BHN).clamp_min(0.0)  # every key outside the sink is recent
        lse = self.kernels.band(self.query_BHND, self.kernel_key_BKND, self.kernel_key_BKND, self.scale, recent)[1]
        recent_sink_mass = torch.where(self._within(weights, recent), weights, 0.0).sum(-1)
        return ((lse - self.lse_BHN).exp() - recent_sink_mass).clamp_min(0.0)

    def _within(self, like_BHNF: Tensor, width: int | None) -> Tensor:
        """Return which of the first keys are among a query's last ``width`` keys, bool (N, F); None means all keys."""
        queries, keys = (torch.arange(count, device=like_BHNF.device) for count in like_BHNF.shape[2:])
        distance = queries[:, None] - keys
        return distance >= 0 if width is None else (distance >= 0) & (distance < width)


def differentiated(*tensors: Tensor) -> bool:
    """Return True if a gradient of one of these tensors will be taken."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


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
    numbers_with_output: bool = False,
) -> tuple[Tensor, FusedCall]:
    """Return the output (B, H, N, Dv) of causal attention, and the call from which numbers per query follow.

    Args:
        query_BHND, key_BKND, value_BKND: In the dtype of the kernels. With fewer queries than keys the queries belong
            to the last tokens, and only statistics that continue (`registry.CONTINUABLE`) can be computed.
        window: Number of keys that a query sees; None means all up to its own.
        sinks_BHN: Learned sink logits (B or 1, H, N or 1); None without a learned sink.
        numbers_with_output: Compute the numbers that come with the output (`QueryNumber.with_output`), the entropy.
    """
    keys = key_BKND.shape[2]
    past = keys - query_BHND.shape[2]
    if window is not None and window >= keys:
        window = None
    first_key = key_BKND[:, :, :1]
    centred = key_BKND - first_key
    has_wide_kernels = kernels.dtype is None
    kernel_key = centred if has_wide_kernels else key_BKND
    out_lse_entropy, entropy = None, None
    # The blocks are written in place, so gradients need the fused calls.
    if numbers_with_output and window is None and not differentiated(query_BHND, kernel_key, value_BKND):
        out_lse_entropy = kernels.causal_with_entropy(query_BHND, kernel_key, value_BKND, scale)
    if out_lse_entropy is not None:
        grouped_out, lse, entropy = out_lse_entropy
    else:
        grouped_out, lse = _attend_padded(kernels, query_BHND, kernel_key, value_BKND, scale, window)
    # (B, H, N, D), stored as (B, N, H, D): models transpose the output next, which then copies nothing.
    out = grouped_out.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)
    log_share = None
    if sinks_BHN is not None:
        true_lse = lse + _scores_on_one(query_BHND, first_key, scale) if has_wide_kernels else lse
        log_share = F.logsigmoid(true_lse - sinks_BHN.to(lse.dtype))
        out = (out * log_share.exp()[..., None]).to(out.dtype)
    fused = FusedCall(kernels, query_BHND, kernel_key, centred, lse, scale, widths, window, past, entropy, log_share)
    return out, fused


def _attend_padded(
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


def _scores_on_one(query_BHND: Tensor, key_BK1D: Tensor, scale: float) -> Tensor:
    """Return the score of each query on one key (B, H, N)."""
    query_BKGND = widened(query_BHND).unflatten(1, (key_BK1D.shape[1], -1))
    return scale * (query_BKGND * widened(key_BK1D)[:, :, None]).sum(-1).flatten(1, 2)
