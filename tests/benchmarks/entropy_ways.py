"""Ways to the entropy of a layer's attention weights, timed on the layer's own queries, keys and values.

On a GPU the entropy takes a second attention call, with the keys as values. The alternatives:

- *joined*: one call whose values are the model's values and the keys, side by side, so they are twice as wide; in every
  kernel of torch that may take them. Kernels that need one width get queries and keys padded with zeros.
- *Triton*: the kernel of `entropy_kernel`, which sums ``p log p`` and the first key's weight in the pass of the output.
- *sampled*: the second call for a part of the queries, blocks of equal distance, which torch's kernels can read; its
  error is that of a head's mean entropy over queries. Single queries of equal distance need a kernel of their own, so
  they are rows with an error and no time.

Shapes: B sequences, N tokens, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.fused import FusedKernels, kernels_for
from headscan.attention.hooks import attention_hook
from headscan.grid import AttentionSite
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import release_memory
from tests.benchmarks.measuring import first_line, medians

COLUMNS = ("tokens", "way", "card", "ms", "x one call", "root mean square error of a head's entropy, nats", "largest")
#: Shares of the queries in a sample, and queries of a block.
_SAMPLES, _BLOCK = (1 / 4, 1 / 8, 1 / 16), 128
_ONE, _TWO = "one call: output and log-sum-exp", "two calls"

#: Mean entropy of each head (B, H).
Way = Callable[[], Tensor]


def attention_inputs(lm: LoadedModel, ids: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (B, H, N, D), key and value (B, K, N, D) of a layer, with positions encoded."""
    kept: list[ScoredCall] = []

    def keep(site: AttentionSite, call: AttentionCall) -> None:
        if site.layer == layer and isinstance(call, ScoredCall):
            kept.append(call)

    with torch.no_grad(), attention_hook(lm, keep):
        run_forward(lm.model, {"input_ids": ids})
    [call] = kept
    return call.query_BHND, call.key_BKSD, call.value_BKSD


def entropy_rows(query: Tensor, key: Tensor, value: Tensor, card: str, seconds: float) -> Iterator[tuple[object, ...]]:
    """Time the ways in turn and yield the cells of `COLUMNS`. A way that does not run here is a row with its error.

    Args:
        seconds: Time after which no further round starts.
    """
    calls = _Calls(query, key, value)
    running: dict[str, Way] = {}
    values: dict[str, Tensor] = {}
    for name, way in calls.ways().items():
        failed = None
        try:
            values[name] = way()
        except Exception as problem:  # kernels and compilers of several packages, each with errors of its own
            failed = first_line(problem)
        if failed is not None:
            release_memory()
            yield query.shape[2], name, card, "not run", "", failed
        else:
            running[name] = way
    by_query = calls.by_query()
    for share in _SAMPLES:
        step = round(1 / share)
        errors = _errors(by_query[..., step // 2 :: step].mean(-1), by_query.mean(-1))
        yield query.shape[2], f"every {step}th query, its error alone", card, "", "", *errors
    took = medians({_ONE: calls.one} | running, query.device, seconds)
    for name, duration in took.items():
        errors = _errors(values[name], by_query.mean(-1)) if name in values else ()
        yield query.shape[2], name, card, f"{1e3 * duration:.3f}", f"{duration / took[_ONE]:.2f}", *errors


def _errors(found_BH: Tensor, exact_BH: Tensor) -> tuple[str, str]:
    """Return the root mean square over heads of the error, and the largest."""
    difference = (found_BH - exact_BH).double()
    return f"{float(difference.square().mean().sqrt()):.1e}", f"{float(difference.abs().max()):.1e}"


class _Calls:
    """The ways for the tensors of one layer; `ways` has them by name, each returns mean entropies (B, H)."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.query, self.key, self.value = query, key, value
        self.scale, self.groups = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
        kernels = kernels_for(query, query.shape[-1], self.groups)
        if kernels is None:
            raise RuntimeError(f"no fused kernels for {query.dtype} on {query.device}")
        self.kernels: FusedKernels = kernels
        self.centred = key - key[:, :, :1]

    def ways(self) -> dict[str, Way]:
        found: dict[str, Way] = {_TWO: self.two}
        for name, joined in _JOINED[self.query.device.type].items():
            found[f"joined, {name}"] = partial(self.joined, joined)
        for blocks, warps in (((128, 64), 8), ((128, 128), 8), ((64, 64), 4)):
            found["Triton, blocks of {} x {}, {} warps".format(*blocks, warps)] = partial(self.triton, blocks, warps)
        for share in _SAMPLES:
            found[f"sampled, 1/{round(1 / share)} of the queries"] = partial(self.sampled, share)
        return found

    def one(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp alone."""
        return self.kernels.causal(self.query, self.key, self.value, self.scale)

    def by_query(self) -> Tensor:
        """Return the entropy of every query (B, H, N) from two calls."""
        _, lse = self.one()
        mean_key, _ = self.kernels.causal(self.query, self.key, self.centred, self.scale)
        return self._entropy(self.query, lse, mean_key.flatten(1, 2))

    def two(self) -> Tensor:
        return self.by_query().mean(-1)

    def joined(self, call: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        out, lse = call(self.query, self.key, torch.cat([self.value, self.centred], -1), self.scale)
        D = self.query.shape[-1]
        return self._entropy(self.query, lse, out[..., D : 2 * D]).mean(-1)

    def triton(self, blocks: tuple[int, int], warps: int) -> Tensor:
        # Triton is not everywhere, and its import takes a second.
        from tests.benchmarks.entropy_kernel import attend

        return attend(self.query, self.key, self.value, self.scale, blocks, warps).entropy.mean(-1)

    def sampled(self, share: float) -> Tensor:
        """Return the mean over blocks of queries with equal distances, which begin with the middle of a distance."""
        _, lse = self.one()
        tokens = self.query.shape[2]
        size = min(_BLOCK, max(1, round(share * tokens)))
        step = round(size / share)
        sums, count = torch.zeros_like(lse[..., 0]), 0
        for start in range((step - size) // 2, tokens, step):
            stop = min(start + size, tokens)
            query = self.query[:, :, start:stop]
            mean_key, _ = self.kernels.causal(query, self.key[:, :, :stop], self.centred[:, :, :stop], self.scale)
            entropy = self._entropy(query, lse[..., start:stop], mean_key.flatten(1, 2))
            sums, count = sums + entropy.sum(-1), count + stop - start
        return sums / count

    def _entropy(self, query_BHND: Tensor, lse_BHN: Tensor, mean_key_BHND: Tensor) -> Tensor:
        """Return the entropy (B, H, N) from the mean of the centred keys."""
        first_BH1D = self.key[:, :, :1].float().repeat_interleave(self.groups, 1)
        mean_score = self.scale * (query_BHND.float() * (mean_key_BHND.float() + first_BH1D)).sum(-1)
        return (lse_BHN.float() - mean_score).clamp_min(0.0)


def _expanded(query: Tensor, *of_groups: Tensor) -> Iterator[Tensor]:
    """Yield keys or values for every query head."""
    return (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in of_groups)


def _efficient(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    key, value = _expanded(query, key, value)
    call = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = call(query, key, value, None, True, 0.0, True, scale=scale)
    return out, lse[..., : query.shape[2]]


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = call(query, key, value, None, True, 0.0, True, False, scale=scale)
    return out, lse.view(out.shape[:3])


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._flash_attention_forward
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = call(*tensors, None, None, query.shape[2], key.shape[2], 0.0, True, False, scale=scale)
    return out.transpose(1, 2), lse[..., : query.shape[2]]


def _flash_padded(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    missing = value.shape[-1] - key.shape[-1]
    return _flash(F.pad(query, (0, missing)), F.pad(key, (0, missing)), value, scale)


def _cpu(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    key, value = _expanded(query, key, value)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
    return out, lse


def _cpu_padded(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    missing = value.shape[-1] - key.shape[-1]
    return _cpu(F.pad(query, (0, missing)), F.pad(key, (0, missing)), value, scale)


def _flex(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    mask = _causal_mask(query.shape[2], query.device)
    return _compiled_flex()(query, key, value, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True)


@lru_cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache
def _causal_mask(tokens: int, device: torch.device) -> BlockMask:
    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_seen, None, None, tokens, tokens, device=str(device))


#: Calls that return output (B, H, N, 2 D) and log-sum-exp (B, H, N) of joined values, by type of device.
_JOINED: Mapping[str, Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = {
    "cuda": {
        "FlashAttention 2": _flash,
        "FlashAttention 2, padded": _flash_padded,
        "cuDNN": _cudnn,
        "memory-efficient attention": _efficient,
        "flex_attention": _flex,
    },
    "cpu": {"the CPU's kernel": _cpu, "the CPU's kernel, padded": _cpu_padded},
}
