"""Checks of caches with windows: decoding against masks per head in one pass, and bytes against the plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import headscan
from headscan.attention.discovery import discover
from headscan.gpu_proof.cache_speed import CacheLoad, fill, half_windows, held_bytes
from headscan.gpu_proof.checks import Check, Comparer, Difference
from headscan.kv.kept_keys import KeptKeys
from headscan.kv.kv_windows import KvWindows
from headscan.kv.plan_cache import PlanCache
from headscan.models.loaded_model import LoadedModel
from headscan.testing.families import make_model
from headscan.testing.family import VOCABULARY
from headscan.testing.overhead import make_model as make_shape
from headscan.testing.plain_plans import PlainHead, PlainPlan

GROUP = "cache"
#: GQA, MHA, one KV head, soft caps, learned sinks, sliding layers, values of another width.
_FAMILIES = ("llama", "gpt_oss", "llama-mha", "llama-mqa-wide", "gemma2-softcap", "gemma3", "mimo_v2_flash", "qwen3")
_FEW = 2
#: Largest error of float32 logits relative to the largest one.
_SINGLE = 3e-5
#: Mean error of bfloat16 logits relative to the largest one, in units of its epsilon: both ways round differently.
_HALF = 4
#: Largest difference of measured and planned bytes, relative to the plan.
_BYTES = 0.01
#: Sizes of the passes; a prompt, single tokens, and a continuation.
_CHUNKS = (30, 1, 1, 17, 1)
_KINDS: tuple[tuple[str, int | None, int | None], ...] = (
    ("window", 2, 7),
    ("full", None, None),
    ("drop", None, None),
    ("window", 4, 20),
)


def cache_checks(device: torch.device, *, small: bool) -> list[Check]:
    """Return one check a family, and one of bytes."""
    families = _FAMILIES[:_FEW] if small else _FAMILIES
    checks = [Check(GROUP, f"{name}: decoding", partial(_check_family, name, device)) for name in families]
    return [*checks, Check(GROUP, "bytes", partial(_check_bytes, device, small))]


def _check_family(name: str, device: torch.device, compare: Comparer) -> Iterator[Difference]:
    for dtype, bound in ((torch.float32, _SINGLE), (torch.bfloat16, _HALF * torch.finfo(torch.bfloat16).eps)):
        model: Any = make_model(name, dtype=dtype)
        model.set_experts_implementation("eager")
        model.to(device)
        lm = LoadedModel(model, None, discover(model), name)
        plan = _plan(lm)
        config = model.config.get_text_config(decoder=True)
        ids = torch.randint(2, VOCABULARY, (2, sum(_CHUNKS)), generator=torch.Generator().manual_seed(0)).to(device)
        with headscan.intervene(lm, KvWindows(KeptKeys.of_plan(plan))):
            expected = model(input_ids=ids, use_cache=False).logits
        cache, padded = (PlanCache(plan, config=config) for _ in range(2))
        model.set_attn_implementation("headscan-cache")
        found = _in_chunks(model, cache, ids, torch.ones_like(ids))
        half = dtype == torch.bfloat16
        yield compare.close(f"{dtype} logits", found, expected, bound, mean=half)
        # The second row starts later, and must not notice.
        pad = 9
        shifted = torch.cat([ids[:1], ids[1:].roll(pad, 1)])
        mask = torch.ones_like(ids)
        mask[1, :pad] = 0
        found = _in_chunks(model, padded, shifted, mask)
        yield compare.close(f"{dtype} logits, padded", found[1, pad:], expected[1, :-pad], bound, mean=half)


def _plan(lm: LoadedModel) -> PlainPlan:
    """Return a plan with every kind of KV head in the layers that can have windows."""
    kinds, heads = list(_KINDS), []
    for site in lm.grid.sites:
        for kv_head in range(site.num_key_value_heads):
            kind = kinds[(site.layer + kv_head) % len(kinds)] if site.sliding_window is None else _KINDS[1]
            heads.append(PlainHead(site.layer, kv_head, *kind))
    return PlainPlan(tuple(heads))


def _in_chunks(model: torch.nn.Module, cache: PlanCache, ids: Tensor, mask: Tensor) -> Tensor:
    logits, first = [], 0
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    for size in _CHUNKS:
        part = slice(first, first + size)
        out = model(
            input_ids=ids[:, part],
            attention_mask=mask[:, : part.stop],
            position_ids=position[:, part],
            past_key_values=cache,
        )
        logits.append(out.logits)
        first += size
    return torch.cat(logits, 1)


def _check_bytes(device: torch.device, small: bool, compare: Comparer) -> Iterator[Difference]:
    load = CacheLoad.of(device, small=small)[0]
    lm = make_shape(load.shape, load.tokens, str(device), getattr(torch, load.dtype), load.layers)
    plan = half_windows(lm)
    site = lm.grid.sites[0]
    promised = plan.bytes(load.rows, load.tokens, (site.head_dim + site.value_dim) * lm.model.dtype.itemsize)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    cache = PlanCache(plan, max_tokens=load.tokens)
    fill(cache, lm, load, load.tokens)
    allocated = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else cache.allocated_bytes
    for what, found in (("nbytes", held_bytes(cache)), ("allocated bytes", allocated)):
        yield compare.close(f"{what} in units of the plan", torch.tensor([found / promised]), torch.ones(1), _BYTES)
