"""Sizes and times of a model before and after pruning."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headscan.errors import UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.kv.plan_cache import cache_bytes
from headscan.layers.blocks import find_blocks
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.edited_model import find_writers
from headscan.sizing.model_sizes import LayerCache, find_caches
from headscan.steps.prune.prune_step import Timing

#: Tokens of the prompt that shows the bytes of a real cache.
_FEW = 16


@dataclass(frozen=True)
class ModelCost:
    """Sizes and times of one model; None marks unknown and unmeasured ones.

    Attributes:
        query_heads, kv_heads: Heads of all layers.
        attention_layers: Layers with attention.
        cache_bytes: Bytes of the KV cache by token, by arithmetic.
        measured_cache_bytes: The same of a real cache of 16 tokens.
        prefill_seconds: Median time to read the prompt.
        token_seconds: Median time of a generated token.
    """

    parameters: int
    weight_bytes: int
    query_heads: int
    kv_heads: int
    attention_layers: int
    cache_bytes: int | None = None
    measured_cache_bytes: int | None = None
    prefill_seconds: float | None = None
    token_seconds: float | None = None


@dataclass(frozen=True)
class CostComparison:
    """Costs of a model before and after the removal of heads."""

    before: ModelCost
    after: ModelCost

    @property
    def weights_left(self) -> float:
        """Share of the bytes of the weights, 0 to 1."""
        return self.after.weight_bytes / self.before.weight_bytes

    @property
    def cache_left(self) -> float | None:
        """Share of the bytes of the KV cache, 0 to 1; None if unknown."""
        before, after = self.before.cache_bytes, self.after.cache_bytes
        return None if not before or after is None else after / before

    @property
    def prefill_ratio(self) -> float | None:
        """Times that the prompt is read faster; None if not measured."""
        return _ratio(self.before.prefill_seconds, self.after.prefill_seconds)

    @property
    def token_ratio(self) -> float | None:
        """Times that a token is generated faster; None if not measured."""
        return _ratio(self.before.token_seconds, self.after.token_seconds)


def compare_costs(
    before: LoadedModel, after: LoadedModel, removed: Sequence[tuple[int, int]], timing: Timing | None
) -> CostComparison:
    """Return the costs of a model and of the same model without some heads; ``timing`` None measures no times."""
    caches = find_layer_caches(before)
    times: list[dict[str, Any]] = [{}, {}]
    if timing is not None and not any(weight.is_meta for weight in before.model.parameters()):  # not offloaded
        times = _times([before, after], timing)
    costs = []
    for lm, gone, seconds in zip((before, after), ((), removed), times, strict=True):
        promised = None if caches is None else promised_cache(caches, before.grid, gone)
        measured = None if timing is None else _measured_cache(lm)
        costs.append(replace(model_cost(lm), cache_bytes=promised, measured_cache_bytes=measured, **seconds))
    return CostComparison(*costs)


def model_cost(lm: LoadedModel) -> ModelCost:
    weights = {id(weight): weight for weight in lm.model.parameters()}.values()
    sites = lm.grid.sites
    return ModelCost(
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        query_heads=sum(site.num_attention_heads for site in sites),
        kv_heads=sum(site.num_key_value_heads for site in sites),
        attention_layers=sum(site.num_attention_heads > 0 for site in sites),
    )


def promised_cache(
    caches: Sequence[LayerCache], grid: HeadGrid, removed: Iterable[tuple[int, int]], tokens: int = 1
) -> int:
    """Return the bytes of the KV cache after ``tokens`` tokens without some heads, by arithmetic from the original
    model's caches by layer. A KV head goes with the last of its query heads.
    """
    gone = {(layer, head) for layer, head in removed}
    total = 0
    for site in grid.sites:
        cache = caches[site.layer] if site.layer < len(caches) else None
        if cache is None or not cache.heads:
            continue
        kept = [head for head in range(site.num_attention_heads) if (site.layer, head) not in gone]
        # Some caches hold keys for every query head.
        by_group = cache.heads == site.num_key_value_heads
        heads = len({site.kv_head_of[head] for head in kept}) if by_group else len(kept)
        total += cache.bytes(tokens) // cache.heads * heads
    return total


def find_layer_caches(lm: LoadedModel) -> Sequence[LayerCache] | None:
    """Return the KV cache of each layer; None if it cannot be sized."""
    try:
        return find_caches(lm.model).get("self", ())
    except UnsupportedModelError:
        return None


def columns_to_solve(lm: LoadedModel, targets: Iterable[str]) -> int:
    """Return the columns of the widest projection among ``targets``, named as in `RepairConfig`; 0 without any."""
    widths = [0]
    chosen = set(targets)
    for site in lm.grid.sites if chosen & {"o", "v"} else ():
        widths.append(site.num_attention_heads * site.value_dim)
    if "down" in chosen:
        blocks, sites = find_blocks(lm), {site.layer: site for site in lm.grid.sites}
        for layer in range(len(blocks.all)):
            mlp = find_writers(blocks, layer, sites.get(layer)).mlp
            widths.append(0 if mlp is None else mlp.old.shape[1])
    return max(widths)


def _prompt(lm: LoadedModel, tokens: int) -> Tensor:
    """Return a prompt (1, N tokens) of pseudo-random tokens."""
    vocabulary = int(lm.model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids.to(lm.device)


@torch.no_grad()
def _measured_cache(lm: LoadedModel) -> int:
    out: Any = lm.model(input_ids=_prompt(lm, _FEW), use_cache=True)
    return cache_bytes(out.past_key_values) // _FEW


@torch.no_grad()
def _times(models: Sequence[LoadedModel], timing: Timing) -> list[dict[str, float]]:
    """Return medians of models that run in turn, so that a slow moment of the machine hits all."""
    limit = min((lm.max_tokens for lm in models if lm.max_tokens is not None), default=timing.prompt_tokens)
    tokens = max(1, min(timing.prompt_tokens, limit - timing.new_tokens))
    prompts = [_prompt(lm, tokens) for lm in models]
    of_models: list[Mapping[str, list[float]]] = [{"prefill_seconds": [], "token_seconds": []} for _ in models]
    for round_ in range(timing.rounds + 1):
        for lm, prompt, times in zip(models, prompts, of_models, strict=True):
            cache, prefill = _timed_step(lm, prompt, None)
            steps = []
            for _ in range(timing.new_tokens):
                cache, seconds = _timed_step(lm, prompt[:, :1], cache)
                steps.append(seconds)
            if round_:  # the first round warms up
                times["prefill_seconds"].append(prefill)
                times["token_seconds"].append(median(steps))
    return [{name: median(values) for name, values in times.items()} for times in of_models]


def _timed_step(lm: LoadedModel, ids: Tensor, cache: Any) -> tuple[Any, float]:
    """Read tokens; return the KV cache and the time in seconds."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(lm.model.forward).parameters else {}
    wait_for(lm.device)
    started = time.perf_counter()
    out: Any = lm.model(input_ids=ids, past_key_values=cache, use_cache=True, **last)
    wait_for(lm.device)
    return out.past_key_values, time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    """Wait for a GPU, which computes after the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ratio(before: float | None, after: float | None) -> float | None:
    return None if before is None or not after else before / after
