"""The cost of measuring: time and memory of `collect`.

Shapes are a few layers of a Llama model with random weights; ratios do not depend on the depth. Memory is the peak of
all tensors including weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import headscan
from headscan.attention.calls import WeightsCall
from headscan.attention.discovery import discover
from headscan.attention.hooks import output_hook
from headscan.catalog import SCORES, MassWidths, panel_names, statistics_for
from headscan.grid import AttentionSite
from headscan.models.forward_inputs import run_forward
from headscan.statistics.norm_statistics import ProjectionFactors
from headscan.statistics.registry import OUTPUT_STATISTICS, output_statistics
from headscan.statistics.weight_statistics import AttentionRequest

#: By name: hidden size, query heads, KV heads, MLP width, number of layers.
SHAPES = {
    "tiny": (128, 8, 4, 256, 4),
    "10M": (256, 4, 2, 1024, 10),
    "135M": (576, 9, 3, 1536, 4),
    "1B": (2048, 32, 8, 8192, 2),
    "8B": (4096, 32, 8, 14336, 2),
}
VOCABULARY = 1024
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # in malloc.h

Way = Callable[[], object]


def make_model(
    shape: str,
    tokens: int,
    device: str,
    dtype: torch.dtype,
    layers: int | None = None,
    vocabulary: int = VOCABULARY,
    *,
    tied: bool = False,
    rope_theta: float = 1e4,
) -> headscan.LoadedModel:
    """Build layers of a shape with random weights on the device, for sequences of at most ``tokens`` tokens.

    ``layers=None`` uses the number in `SHAPES`.
    """
    hidden, heads, kv_heads, mlp, few = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=few if layers is None else layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=tokens,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    torch.manual_seed(0)
    with torch.device(device):  # random numbers for 8B weights take a CPU minutes
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return headscan.LoadedModel(model, None, discover(model), shape)


def ways(lm: headscan.LoadedModel, ids: Tensor, *, eager: bool) -> dict[str, Way]:
    """Return the plain forward pass and the ways to measure, by name."""

    @torch.no_grad()
    def plain() -> None:
        run_forward(lm.model, {"input_ids": ids})

    found: dict[str, Way] = {
        "plain": plain,
        "15 scores": lambda: headscan.collect(lm, ids, statistics=statistics_for(SCORES)),
        "fast panel": lambda: headscan.collect(lm, ids),
        "full panel": lambda: headscan.collect(lm, ids, statistics=panel_names("full")),
    }
    if eager:
        found["eager"] = lambda: eager_statistics(lm, ids)
    return found


@torch.no_grad()
def eager_statistics(lm: headscan.LoadedModel, ids: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return the fast panel without this package, from eager attention."""
    outputs: dict[int, Tensor] = {}

    def keep(site: AttentionSite, outputs_BNHD: Tensor) -> None:
        outputs[site.layer] = outputs_BNHD

    cache = DynamicCache()
    before = lm.model.config._attn_implementation
    lm.model.set_attn_implementation("eager")
    try:
        with output_hook(lm, keep):
            out: Any = lm.model.base_model(ids, output_attentions=True, past_key_values=cache, use_cache=True)
    finally:
        lm.model.set_attn_implementation(before)
    lengths = torch.full((len(ids),), ids.shape[1], device=ids.device)
    wanted = frozenset(panel_names("fast"))
    request = AttentionRequest(wanted - OUTPUT_STATISTICS.keys(), lengths, lengths, MassWidths())
    factors = ProjectionFactors(lm)
    found: dict[tuple[str, int], Tensor] = {}
    for site, weights in zip(lm.grid.sites, out.attentions, strict=True):
        heads = outputs[site.layer]
        value = getattr(cache.layers[site.layer], "values")  # noqa: B009 - the cache's layers are of several types
        _, numbers = WeightsCall(weights, value, heads.transpose(1, 2)).measure(request)
        numbers |= output_statistics(heads, request.over_queries, wanted, factors.of(site))
        found.update({(name, site.layer): values for name, values in numbers.items()})
    return found


def peak_bytes(lm: headscan.LoadedModel, way: Way) -> int:
    """Return the peak bytes of all tensors, including weights."""
    if lm.device.type == "cuda":
        return gpu_peak_bytes(lm.device, way)
    with _large_blocks_unmapped(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        way()
    results = trace.profiler.kineto_results if trace.profiler else None
    assert results is not None
    # Every allocation and release, in order: the process's own peak would include memory that malloc keeps.
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    weights = sum(parameter.nbytes for parameter in lm.model.parameters())
    return weights + max(accumulate(change for _, change in changes), default=0)


def gpu_peak_bytes(device: torch.device, way: Way) -> int:
    """Return the peak bytes of all tensors on a GPU."""
    torch.cuda.reset_peak_memory_stats(device)
    way()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


@contextmanager
def _large_blocks_unmapped() -> Iterator[None]:
    """Make malloc return every freed tensor at once. Otherwise the trace's small records fragment the heap, freed
    memory is not reused, and the process grows by gigabytes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    threshold, usual = 1 << 20, 32 << 20
    try:
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, threshold)
        yield
    finally:
        if mallopt is not None:
            # A threshold that was set no longer grows, nor does the other one, which glibc keeps at twice as much.
            mallopt(_MMAP_THRESHOLD, usual)
            mallopt(_TRIM_THRESHOLD, 2 * usual)


def eager_bytes(shape: str, tokens: int, dtype: torch.dtype, layers: int | None = None) -> int:
    """Return the bytes of eager attention. They hold all layers' weights, and two float32 copies of one layer's in
    softmax.
    """
    _, heads, _, _, few = SHAPES[shape]
    return heads * tokens**2 * ((few if layers is None else layers) * dtype.itemsize + 2 * 4)
