"""Attention calls of a layer, as hooks receive them, and the numbers that are measured on them.

The blockwise path computes explicit weights, one block of queries at a time. It is exact for any mask, and its memory
is linear in the length. It supports soft caps, position biases, arbitrary masks and statistics of explicit weights,
which fused calls do not. Tests compare the fused path with it.

Shapes: B sequences, N queries, R queries of a block, S keys, C keys that a block may see, H query heads, K KV heads,
G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from headscan.attention.fused import FusedKernels, attend_fused, kernels_for
from headscan.catalog import MassWidths
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.models.forward_inputs import widened
from headscan.statistics.registry import (
    CONTINUABLE,
    EXPLICIT,
    POSITIONAL,
    QUERY_NUMBERS,
    WEIGHT_STATISTICS,
    fused_numbers,
    needed_numbers,
    value_statistics,
    weight_statistics,
)
from headscan.statistics.weight_statistics import (
    AttentionPath,
    AttentionRequest,
    CallNumbers,
    Geometry,
    QuerySum,
    WeightBlock,
)

#: Largest number of queries, and of weights, in one block.
BLOCK, MAX_WEIGHTS = 128, 1 << 23
#: On a GPU, where the operations of a smaller block take longer to launch than to run. A float32 block has 128 MiB.
GPU_BLOCK, GPU_MAX_WEIGHTS = 512, 1 << 25


def block_rows(sequences: int, heads: int, keys: int, device: torch.device) -> int:
    """Return the number of queries in one block of explicit weights."""
    rows, weights = (BLOCK, MAX_WEIGHTS) if device.type == "cpu" else (GPU_BLOCK, GPU_MAX_WEIGHTS)
    return max(16, min(rows, weights // (sequences * heads * keys)))


def _at_queries(terms: Tensor, position_BR: Tensor, keys: slice) -> Tensor:
    """Select queries and keys of a mask, bias or sink (B or 1, H or 1, N or 1, S or 1); the queries are those at
    ``position_BR`` (B or 1, R).
    """
    terms = terms[..., keys]
    if terms.shape[2] == 1:
        return terms
    if len(position_BR) == 1:
        return terms[:, :, position_BR[0]]
    terms = terms.expand(len(position_BR), -1, -1, -1)
    return torch.stack([terms_HNC[:, position_R] for terms_HNC, position_R in zip(terms, position_BR, strict=True)])


def attend_blockwise(call: ScoredCall, tally: WeightTally, past: int = 0) -> Tensor:
    """Return the output (B, H, N, Dv), and add the weights of each block of queries to ``tally``."""
    B, H, N, S = call.shape_BHNS
    K, Dv = call.num_key_value_heads, call.value_dim
    block_size = block_rows(B, H, S, call.device)
    outs: list[Tensor] = []
    for start in range(0, N, block_size):
        rows = slice(start, min(start + block_size, N))
        first_key = 0 if call.window is None else max(0, past + start - call.window + 1)
        keys = slice(first_key, past + rows.stop if call.causal else S)
        weights = call.block(rows, keys, past)
        R, C = weights.shape[2:]
        outs.append((weights.reshape(B, K, (H // K) * R, C) @ call.value_BKSD[:, :, keys]).reshape(B, H, R, Dv))
        tally.add(weights, past + start, first_key)
        del weights  # frees the block before the next one is computed
    return torch.cat(outs, 2)


class WeightTally:
    """An accumulator of explicit weights, one block of queries after the other; ``normalised`` if the weights of every
    query are known to sum to 1.
    """

    def __init__(self, request: AttentionRequest, geometry: Geometry, *, normalised: bool = False) -> None:
        self.request, self.geometry, self._normalised = request, geometry, normalised
        self._numbers: dict[str, list[Tensor]] = {number.name: [] for number in needed_numbers(request.statistics)}
        defined_statistics = request.statistics - POSITIONAL if geometry.cross else request.statistics
        self._query_sums: dict[str, QuerySum] = {
            query_sum.name: query_sum
            for name in defined_statistics & WEIGHT_STATISTICS.keys()
            for query_sum in WEIGHT_STATISTICS[name].query_sums
        }
        self._sums: dict[str, Tensor] = {}
        self._unpadded_queries = request.unpadded_queries if self._query_sums else 0

    def add(self, weights_BHRC: Tensor, first_query: int, first_key: int) -> None:
        """Add the weights of one block, from its first query and key on; blocks come in order."""
        unpadded = first_query + weights_BHRC.shape[-2] <= self._unpadded_queries
        block = WeightBlock(weights_BHRC, first_query, first_key, self.request, self._normalised, unpadded)
        for name, blocks in self._numbers.items():
            blocks.append(QUERY_NUMBERS[name].of_block(block))
        for name, query_sum in self._query_sums.items():
            if name not in self._sums:
                self._sums[name] = query_sum.zeros(block, self.geometry)
            query_sum.add(self._sums[name], block)

    def numbers(self) -> CallNumbers:
        per_query = {name: torch.cat(blocks, -1) for name, blocks in self._numbers.items()}
        return CallNumbers(per_query, self._sums, self.request, self.geometry)


class AttentionCall(ABC):
    """One call of a layer's attention; ``causal`` and ``cross`` as in `Geometry`. ``sliding_window`` is the window that
    the model passes, whether or not the mask encodes it too; None means none.
    """

    value_BKSD: Tensor
    causal: bool
    cross: bool
    sliding_window: int | None

    @property
    @abstractmethod
    def shape_BHNS(self) -> tuple[int, int, int, int]:
        """Numbers of sequences, query heads, queries and keys."""

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """D; 0 if keys are not shown."""

    @property
    def sequences(self) -> int:
        return self.shape_BHNS[0]

    @property
    def num_attention_heads(self) -> int:
        return self.shape_BHNS[1]

    @property
    def num_key_value_heads(self) -> int:
        return self.value_BKSD.shape[1]

    @property
    def value_dim(self) -> int:
        return self.value_BKSD.shape[-1]

    @property
    def geometry(self) -> Geometry:
        return Geometry(*self.shape_BHNS[2:], self.causal, self.cross)

    @property
    def device(self) -> torch.device:
        return self.value_BKSD.device

    @abstractmethod
    def output(self) -> Tensor:
        """Return the heads' outputs (B, H, N, Dv), in the model's dtype."""

    @abstractmethod
    def measure(self, request: AttentionRequest) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output, and the requested statistics (B, H) and profiles (B, H, bins), float32."""

    @abstractmethod
    def weights(self, position_BR: Tensor) -> Tensor:
        """Return the weights (B, H, R, S) of the queries at ``position_BR``, float32 or wider."""

    def placed(self, *, causal: bool, cross: bool) -> Self:
        """Return the call with ``causal`` and ``cross`` set."""
        return replace(self, causal=causal, cross=cross)  # type: ignore[type-var]


class AttentionSession(Protocol):
    """The recipient of attention calls while a hook is open."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Return the attention's output (B, H, N, Dv)."""
        ...


@dataclass(frozen=True)
class ScoredCall(AttentionCall):
    """An attention call that shows query, key and value, as the model passes them, with positions encoded.

    Attributes:
        window: Number of keys that a query sees, its own included, if the mask does not encode it; None means all.
        mask: (B or 1, H or 1, N, S), bool (True means attend) or additive, causality included; None applies ``causal``
            alone.
        bias: (B or 1, H or 1, N or 1, S), added to the scores; None adds nothing.
        softcap: Cap c of ``c * tanh(s / c)``, applied before the mask; None disables it.
        sinks_BHN: Learned sink logit in a query's softmax, (B or 1, H, N or 1); None without a learned sink.
        unread: Names of further tensors that the model passes to its attention, which this call leaves out.
    """

    query_BHND: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    scale: float
    causal: bool
    cross: bool = False
    window: int | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks_BHN: Tensor | None = None
    sliding_window: int | None = None
    unread: tuple[str, ...] = ()

    @property
    def shape_BHNS(self) -> tuple[int, int, int, int]:
        B, H, N, _ = self.query_BHND.shape
        return B, H, N, self.key_BKSD.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query_BHND.shape[-1]

    def output(self, *, past: int = 0, path: AttentionPath = "auto") -> Tensor:
        """Return the outputs of queries after ``past`` cached keys, in fused kernels or not (`AttentionRequest`)."""
        ones = torch.ones(self.sequences, dtype=torch.long, device=self.device)
        return self.measure(AttentionRequest(frozenset(), ones, ones, MassWidths(), path, past=past))[0]

    def measure(self, request: AttentionRequest) -> tuple[Tensor, dict[str, Tensor]]:
        _check_whole(self.geometry, request.past)
        need_whole_sequences = sorted(request.statistics - CONTINUABLE)
        if request.past and need_whole_sequences:
            names = ", ".join(need_whole_sequences)
            raise InterventionError(
                f"{names} cannot be computed after {request.past} cached tokens. Pass whole sequences"
            )
        kernels, needs_weights = self._kernels(), bool(request.statistics & EXPLICIT)
        if request.path == "fused" and (kernels is None or needs_weights):
            unsupported = "statistics that need explicit weights" if needs_weights else "this model or device"
            raise UnsupportedModelError(f"fused attention does not support {unsupported}. Use `path='auto'`")
        if kernels is None or needs_weights or request.path == "blockwise":
            out, call_numbers = self._measure_blockwise(request)
        else:
            out, call_numbers = self._measure_fused(request, kernels)
        new_values = self.value_BKSD[:, :, request.past :]
        statistics = weight_statistics(call_numbers)
        statistics |= value_statistics(new_values, request.over_keys, request.statistics, self.num_attention_heads)
        return out.to(self.query_BHND.dtype), statistics

    def _measure_blockwise(self, request: AttentionRequest) -> tuple[Tensor, CallNumbers]:
        """Return the output and numbers per query from explicit weights, a block of queries at a time."""
        tally = WeightTally(request, self.geometry, normalised=self.sinks_BHN is None)
        out = attend_blockwise(self._wide(), tally, request.past)
        return out, tally.numbers()

    def _measure_fused(self, request: AttentionRequest, kernels: FusedKernels) -> tuple[Tensor, CallNumbers]:
        """Return the output and numbers per query from fused calls."""
        dtype = kernels.dtype or torch.promote_types(self.query_BHND.dtype, torch.float32)
        query, key, value = (x.to(dtype) for x in (self.query_BHND, self.key_BKSD, self.value_BKSD))
        query_numbers = needed_numbers(request.statistics)
        out, fused = attend_fused(
            kernels,
            query,
            key,
            value,
            self.scale,
            request.widths,
            window=self.window,
            sinks_BHN=self.sinks_BHN,
            numbers_with_output=any(number.with_output for number in query_numbers),
        )
        if query_numbers and request.path == "auto" and fused.loses_weights:
            return self._measure_blockwise(request)
        return out, CallNumbers(fused_numbers(query_numbers, fused), {}, request, self.geometry)

    def weights(self, position_BR: Tensor) -> Tensor:
        _check_whole(self.geometry)
        wide, query_position_BR = self._wide(), position_BR.to(self.device)
        index = query_position_BR[:, None, :, None].expand(-1, self.num_attention_heads, -1, self.head_dim)
        scores, key_position_S = wide._scores(wide.query_BHND.gather(2, index), query_position_BR, slice(None))
        wide._hide_by_position(scores, query_position_BR, key_position_S)
        return wide._normalise(scores, query_position_BR)

    def block(self, rows: slice, keys: slice, past: int) -> Tensor:
        """Return weights (B, H, R, C) of queries, after ``past`` keys, and the keys that they may see."""
        position = torch.arange(rows.start, rows.stop, device=self.device)[None]
        scores, key_position_C = self._scores(self.query_BHND[:, :, rows], position, keys)
        R, C = scores.shape[-2:]
        if self.causal:
            # Later keys are among the last R columns, and keys that have left the window among the first R.
            first_columns = {C - R, 0} if self.window is not None else {C - R}
            for first_column in first_columns:
                columns = slice(first_column, first_column + R)
                self._hide_by_position(scores[..., columns], position + past, key_position_C[columns])
        else:
            self._hide_by_position(scores, position + past, key_position_C)
        return self._normalise(scores, position)

    def _scores(self, query_BHRD: Tensor, position_BR: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """Return new scores (B, H, R, C) of the queries at ``position_BR`` (B or 1, R), before any key is hidden, and
        the positions of the keys (C,).
        """
        key = self.key_BKSD[:, :, keys]
        B, H, R, D = query_BHRD.shape
        K, C = key.shape[1:3]
        scale = self.scale if self.softcap is None else self.scale / self.softcap
        scores = (scale * query_BHRD.reshape(B, K, (H // K) * R, D) @ key.mT).reshape(B, H, R, C)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores)
        if self.bias is not None:
            scores = scores + _at_queries(self.bias, position_BR, keys)
        if self.mask is not None:
            mask = _at_queries(self.mask, position_BR, keys)
            scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return scores, torch.arange(self.key_BKSD.shape[2], device=key.device)[keys]

    def _hide_by_position(self, scores_BHRC: Tensor, query_position_BR: Tensor, key_position_C: Tensor) -> None:
        """Set scores to -inf where causality or the window hides the key."""
        if self.causal:
            is_later_key = key_position_C > query_position_BR[..., None]
            scores_BHRC.masked_fill_(is_later_key[:, None], float("-inf"))
        if self.window is not None:
            is_outside_window = (query_position_BR[..., None] - key_position_C).abs() >= self.window
            scores_BHRC.masked_fill_(is_outside_window[:, None], float("-inf"))

    def _normalise(self, scores_BHRC: Tensor, position_BR: Tensor) -> Tensor:
        """Return the weights; the scores may be overwritten."""
        if self.mask is None and self.bias is None and self.sinks_BHN is None:
            # Every query sees a key. `Interceptor` would take the result of `torch.softmax` for a model's own weights.
            return torch.special.softmax(scores_BHRC, -1)
        lse = scores_BHRC.logsumexp(-1, keepdim=True)
        # A padding query may see no key. Its weights are set to 0, because NaN would spread through later layers.
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        if self.sinks_BHN is not None:
            sinks = _at_queries(self.sinks_BHN[..., None], position_BR, slice(None))
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        return (scores_BHRC - lse).exp() if torch.is_grad_enabled() else scores_BHRC.sub_(lse).exp_()

    def _wide(self) -> ScoredCall:
        """Return the call in float32 or wider; a mask replaces causality."""
        wide = torch.promote_types(self.query_BHND.dtype, torch.float32)
        query, key, value = (x.to(wide) for x in (self.query_BHND, self.key_BKSD, self.value_BKSD))
        causal = self.causal and self.mask is None
        return replace(self, query_BHND=query, key_BKSD=key, value_BKSD=value, causal=causal)

    def _kernels(self) -> FusedKernels | None:
        """Return the fused kernels for this call; None if it is more than causal attention, or no kernels serve it."""
        if not self.causal or self.mask is not None or self.bias is not None or self.softcap is not None:
            return None
        width = max(self.head_dim, self.value_dim)
        return kernels_for(self.query_BHND, width, self.num_attention_heads // self.num_key_value_heads)


def _check_whole(geometry: Geometry, past: int = 0) -> None:
    if past + geometry.queries != geometry.keys and not geometry.cross:
        raise UnsupportedModelError(
            f"heads are measured on whole sequences, without a KV cache: {geometry.queries} queries, {geometry.keys} "
            "keys. Pass `use_cache=False`"
        )


@dataclass(frozen=True)
class WeightsCall(AttentionCall):
    """An attention call of a model that computes explicit weights, after the softmax, and outputs itself."""

    weights_BHNS: Tensor
    value_BKSD: Tensor
    out_BHND: Tensor
    causal: bool = True
    cross: bool = False
    sliding_window: int | None = None
    head_dim = 0

    @property
    def shape_BHNS(self) -> tuple[int, int, int, int]:
        B, H, N, S = self.weights_BHNS.shape
        return B, H, N, S

    def output(self) -> Tensor:
        return self.out_BHND

    def measure(self, request: AttentionRequest) -> tuple[Tensor, dict[str, Tensor]]:
        _check_whole(self.geometry)
        if request.path == "fused":
            raise UnsupportedModelError(
                "fused attention does not support a model that computes its own weights. Use `path='auto'`"
            )
        tally = WeightTally(request, self.geometry)
        B, H, N, S = self.shape_BHNS
        block_size = block_rows(B, H, S, self.device)
        for start in range(0, N, block_size):
            tally.add(widened(self.weights_BHNS[:, :, start : start + block_size]), start, 0)
        statistics = weight_statistics(tally.numbers())
        statistics |= value_statistics(self.value_BKSD, request.over_keys, request.statistics, H)
        return self.out_BHND, statistics

    def weights(self, position_BR: Tensor) -> Tensor:
        _, H, _, S = self.weights_BHNS.shape
        index = position_BR.to(self.device)[:, None, :, None].expand(-1, H, -1, S)
        return widened(self.weights_BHNS.gather(2, index))
