"""Cost of a KV cache with windows, in bytes and in time per token, compared with transformers' own caches.

    python -m tests.benchmarks.bench_cache [--device cuda --dtype bfloat16 --shape 8B --tokens 4096,32768]
    python -m tests.benchmarks.bench_cache --model smollm2 --tokens 2048,4096,8000

Half of the KV heads of every layer keep a window, as in DuoAttention's published patterns. Each way decodes in turn,
token by token, after a context of random keys and values, since their numbers change neither bytes nor speed.
`DynamicCache` copies all keys at every step; `StaticCache` and a plan without windows show how much of a gain comes
from memory that is allocated ahead. On a GPU, torch may choose cuDNN for `DynamicCache`, which plans for every new
number of keys; one more row shows that cache with FlashAttention 2 alone. The benchmark needs torch, transformers and
accelerate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, StaticCache

import headscan
from headscan.kv.plan_cache import PlanCache
from headscan.kv.plan_layer import PlanLayer
from headscan.kv.window_keys import WindowKeys
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import release_memory
from tests.benchmarks.measuring import Table, device_of, medians, numbers, parser_of, show
from tests.benchmarks.overhead import SHAPES, make_model
from tests.instrument.kv.cache_plans import PlainHead, PlainPlan

COLUMNS = ("setting", "cache", "MiB", "ms/token", "bytes x", "time x", "x faster", "time x StaticCache")
_DYNAMIC, _STATIC, _FULL, _PLAN = "DynamicCache", "StaticCache", "PlanCache, no windows", "PlanCache"
_FLASH = "DynamicCache, FlashAttention 2"
#: Tokens of a window: first and last.
SINK, RECENT = 128, 256
#: What a KV head keeps: action, sink and recent.
Kind = tuple[str, int | None, int | None]
FULL: Kind = ("full", None, None)
#: Largest ratio of bytes, and of a decoding step on a CPU; smallest speed-up on a GPU, compared with `DynamicCache`.
MOST_BYTES, MOST_CPU_TIME, FEWEST_TIMES_FASTER = 0.52, 0.75, 1.5
#: Largest ratio of a decoding step, compared with `StaticCache`.
MOST_STATIC_TIME = 1.0
#: Tokens of one pass that fills a cache.
_CHUNK = 2048
#: Time after which no further round of one setting starts, in seconds, and the largest number of rounds.
_SECONDS, _ROUNDS = 10.0, 11


@dataclass(frozen=True)
class CacheLoad:
    """A model and its context.

    Attributes:
        shape, layers: Shape of the model in `overhead`, and its number of layers.
        tokens: Tokens of context.
        rows: Sequences in the batch.
        steps: Decoding steps in one round.
        dtype: Name of the dtype of weights and cache.
        model: Name or folder of a model that is loaded whole; None for random weights of ``shape``.
    """

    shape: str
    layers: int
    tokens: int
    rows: int
    steps: int
    dtype: str
    model: str | None = None

    def __str__(self) -> str:
        name = self.model or f"{self.shape}, {self.layers} layers"
        return f"{name}, {self.rows} x {self.tokens} tokens, {self.dtype}"

    def loaded(self, device: torch.device) -> LoadedModel:
        """Return the model."""
        if self.model is not None:
            return headscan.load(self.model, dtype=self.dtype, device=str(device))
        return make_model(self.shape, self.tokens, str(device), getattr(torch, self.dtype), self.layers)


def cache_rows(
    load: CacheLoad, device: torch.device, ratios: dict[str, tuple[float, float, float]]
) -> Iterator[tuple[object, ...]]:
    """Yield one row of the table for each cache, and add the ratios of this load.

    Args:
        ratios: By load, the bytes and the time of the plan's cache over those of `DynamicCache` (the faster one of two
            on a GPU), and its time over that of `StaticCache`.
    """
    lm = load.loaded(device)
    most = load.tokens + (_ROUNDS + 1) * load.steps
    flash = device.type == "cuda" and load.dtype in ("bfloat16", "float16")
    caches: dict[str, Cache] = {
        _DYNAMIC: DynamicCache(config=lm.model.config),
        **({_FLASH: DynamicCache(config=lm.model.config)} if flash else {}),
        _STATIC: StaticCache(config=lm.model.config, max_cache_len=most),
        _FULL: PlanCache(half_windows(lm, FULL), max_tokens=most),
        _PLAN: PlanCache(half_windows(lm), max_tokens=most),
    }
    for cache in caches.values():
        fill(cache, lm, load, load.tokens)
    held = {name: held_bytes(cache) for name, cache in caches.items()}
    token = torch.ones(load.rows, 1, dtype=torch.long, device=device)

    def decode(name: str, cache: Cache) -> None:
        model: Any = lm.model
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == _FLASH else nullcontext():
            for _ in range(load.steps):
                model(input_ids=token, past_key_values=cache, use_cache=True)

    ways: Mapping[str, Callable[[], object]] = {name: partial(decode, name, cache) for name, cache in caches.items()}
    took = medians(ways, device, _SECONDS)
    dynamic = min(took[name] for name in (_DYNAMIC, _FLASH) if name in took)
    for name in caches:
        size, time, static = held[name] / held[_DYNAMIC], took[name] / dynamic, took[name] / took[_STATIC]
        ratios[str(load)] = (size, time, static)
        yield (
            load,
            name,
            f"{held[name] / 2**20:.1f}",
            f"{1e3 * took[name] / load.steps:.2f}",
            f"{size:.3f}",
            f"{time:.3f}",
            f"{1 / time:.2f}",
            f"{static:.3f}",
        )
    del caches, ways
    release_memory()


def verdict_on_cache(ratios: Mapping[str, tuple[float, float, float]], device: torch.device) -> str:
    """Return whether the last load reaches the goals, in one line."""
    if not ratios:
        return "The cache was not timed."
    setting, (size, time, static) = list(ratios.items())[-1]
    if device.type == "cpu":
        met, goal = time <= MOST_CPU_TIME, f"{MOST_CPU_TIME} x the time of a step"
    else:
        met, goal = 1 / time >= FEWEST_TIMES_FASTER, f"{FEWEST_TIMES_FASTER} x faster steps"
    met = met and size <= MOST_BYTES and static <= MOST_STATIC_TIME
    return (
        f"Goal of {MOST_BYTES} x the bytes, {goal}, and at most {MOST_STATIC_TIME} x the time of StaticCache:"
        f" {'met' if met else 'not met'} ({size:.3f} x the bytes, {time:.3f} x the time, {1 / time:.2f} x faster than"
        f" DynamicCache, {static:.3f} x the time of StaticCache: {setting})"
    )


def half_windows(lm: LoadedModel, kind: Kind = ("window", SINK, RECENT)) -> PlainPlan:
    """Return a plan in which every second KV head has a window, which is the hardest order for a cache.

    Args:
        kind: Action, sink and recent of these heads.
    """
    heads = [
        PlainHead(site.layer, k, *(kind if k % 2 else FULL))
        for site in lm.grid.sites
        for k in range(site.num_key_value_heads)
    ]
    return PlainPlan(tuple(heads))


def fill(cache: Cache, lm: LoadedModel, load: CacheLoad, tokens: int) -> None:
    """Add random keys and values of ``tokens`` tokens to every layer."""
    for first in range(0, tokens, _CHUNK):
        for site in lm.grid.sites:
            size = (load.rows, site.num_key_value_heads, min(_CHUNK, tokens - first), site.head_dim)
            key, value = (torch.randn(size, device=lm.device, dtype=lm.model.dtype) for _ in range(2))
            cache.update(key, value, site.layer)
            layer = cache.layers[site.layer]
            if isinstance(layer, PlanLayer):  # nothing attends, which would store the pending tokens
                for held in layer.held:
                    if isinstance(held, WindowKeys):
                        held.commit()


def held_bytes(cache: Cache) -> int:
    """Return the bytes of all keys and values."""
    if isinstance(cache, PlanCache):
        return cache.nbytes
    layers: list[Any] = cache.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a model instead of random weights of a shape")
    parser.add_argument("--shape", default="1B", choices=SHAPES)
    tokens = "tokens of context, comma-separated (default: 4096,16384)"
    parser.add_argument("--tokens", type=numbers, default=(4096, 16384), help=tokens)
    rows = "sequences in the batch, comma-separated; the last numbers decide on the goal (default: 1)"
    parser.add_argument("--rows", type=numbers, default=(1,), help=rows)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="decoding steps in one round")
    options = parser.parse_args()
    device = device_of(options)
    ratios: dict[str, tuple[float, float, float]] = {}
    table = Table("## A decoding step with half of the KV heads windowed", COLUMNS)
    with torch.no_grad():
        for tokens, rows in product(options.tokens, options.rows):
            load = CacheLoad(options.shape, options.layers, tokens, rows, options.steps, options.dtype, options.model)
            for cells in cache_rows(load, device, ratios):
                table.row(*cells)
    show(f"\n{verdict_on_cache(ratios, device)}")


if __name__ == "__main__":
    main()
