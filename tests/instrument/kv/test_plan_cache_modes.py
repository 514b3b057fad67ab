"""PlanCache takes passes with and without gradients, in inference mode and in autocast, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

import headscan
from headscan.kv.kv_windows import KvWindows
from headscan.kv.plan_cache import PlanCache
from headscan.models.loaded_model import LoadedModel
from tests.instrument.kv.cache_plans import DROP, FULL, NARROW, WIDE, error, oracle, plan_of, random_plan, some_ids
from tests.small_models import make_loaded

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
}
PLANS = {"windows": plan_of([[NARROW, FULL], [DROP, FULL], [WIDE, NARROW]]), "full": plan_of([[FULL, FULL]] * 3)}


def passes(lm: LoadedModel, cache: Cache, ids: Tensor, modes: list[str], sizes: list[int]) -> list[Tensor]:
    logits, first = [], 0
    for mode, size in zip(modes, sizes, strict=True):
        with MODES[mode]():
            logits.append(lm.model(ids[:, first : first + size], past_key_values=cache).logits)
        first += size
    return logits


@torch.enable_grad()
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sizes", [[30, 1, 9], [1, 1, 38], [20, 19, 1], [38, 1, 1]])
def test_passes_in_any_order_of_modes(plan: str, sizes: list[int]) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 40)
    expected = oracle(lm, PLANS[plan], ids)
    for modes in product(["grad", "no_grad", "inference"], repeat=3):
        found = passes(lm, PlanCache(PLANS[plan]), ids, list(modes), sizes)
        assert error(torch.cat([each.detach() for each in found], 1), expected) <= 1e-5
        if modes[-1] == "grad":
            found[-1].sum().backward()


@torch.enable_grad()
@pytest.mark.parametrize("sizes", [[20, 20], [20, 1, 19], [39, 1], [1, 1, 1, 37], [10, 1, 1, 28]])
@pytest.mark.parametrize("frozen", ["nothing", "all but queries"])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_through_several_passes(plan: str, frozen: str, sizes: list[int]) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 40)
    weights = [block.self_attn.q_proj.weight for block in lm.model.model.layers]
    if frozen == "nothing":
        weights += [block.self_attn.k_proj.weight for block in lm.model.model.layers[:2]]
    else:
        lm.model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
    with headscan.intervene(lm, KvWindows(PLANS[plan].kept)):
        loss = lm.model(ids, use_cache=False).logits.square().mean()
    expected = torch.autograd.grad(loss, weights, allow_unused=True)
    found_logits = passes(lm, PlanCache(PLANS[plan]), ids, ["grad"] * len(sizes), sizes)
    found = torch.autograd.grad(torch.cat(found_logits, 1).square().mean(), weights, allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or error(ours, theirs) <= 1e-4


@torch.enable_grad()
@pytest.mark.parametrize("later", ["no_grad", "inference"])
def test_passes_without_gradients_leave_earlier_graphs_as_they_are(later: str) -> None:
    lm, ids = make_loaded("llama"), some_ids(1, 40)
    weight = lm.model.model.layers[0].self_attn.k_proj.weight
    for plan in PLANS.values():
        gradients = []
        for sizes in ([30], [30, 1, 1, 8]):
            modes = ["grad", *[later] * (len(sizes) - 1)]
            first = passes(lm, PlanCache(plan), ids, modes, sizes)[0]
            gradients.append(torch.autograd.grad(first.square().mean(), [weight])[0])
        assert torch.equal(*gradients)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "bfloat16"])
def test_generate_continues_a_prompt_read_in_any_mode(plan: str, mode: str) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 30)
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    mask = torch.ones_like(ids)
    cache = PlanCache(PLANS[plan])
    passes(lm, cache, ids[:, :20], [mode], [20])
    found = lm.model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    if mode == "bfloat16":  # rounded keys may change a token
        assert found.shape == (2, 38)
        return
    assert torch.equal(
        found, lm.model.generate(ids, attention_mask=mask, past_key_values=PlanCache(PLANS[plan]), **options)
    )


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap", "gpt_oss"])
@pytest.mark.parametrize("sizes", [[30, 1, 9], [1, 1, 38]])
def test_autocast_in_any_pass(family: str, sizes: list[int]) -> None:
    """Rounding in some passes costs no more than with DynamicCache."""
    lm, ids = make_loaded(family), some_ids(2, 40)
    plans = [random_plan(lm, [FULL]), random_plan(lm, (NARROW, FULL, WIDE), seed=1)]
    exact = [oracle(lm, plan, ids) for plan in plans]
    orders = [list(modes) for modes in product(["no_grad", "bfloat16"], repeat=3)]
    rounded = [
        error(torch.cat(passes(lm, DynamicCache(config=lm.model.config), ids, modes, sizes), 1), exact[0])
        for modes in orders
    ]
    if lm.model.config._attn_implementation == "eager":
        PlanCache(plans[0], lm.model.config)
        lm.model.set_attn_implementation("headscan-cache")
    for modes, bound in zip(orders, rounded, strict=True):
        for plan, expected in zip(plans, exact, strict=True):
            cache = PlanCache(plan, lm.model.config)
            assert error(torch.cat(passes(lm, cache, ids, modes, sizes), 1), expected) <= 3 * bound + 1e-5


@pytest.mark.parametrize("seed", range(8))
@torch.enable_grad()
def test_rows_and_lengths_change_between_modes(seed: int) -> None:
    lm, ids, draw = make_loaded("llama"), some_ids(3, 60), random.Random(seed)
    plan = random_plan(lm, (NARROW, WIDE, FULL, DROP), seed)
    cache, rows, at = PlanCache(plan), [0, 1, 2], 0
    modes = [draw.choice(["grad", "no_grad", "inference"]) for _ in range(6)]
    for mode, size in zip(modes, (25, 1, 6, 1, 1, 9), strict=True):
        with MODES[mode]():
            found = lm.model(ids[rows, at : at + size], past_key_values=cache).logits
        at += size
        assert error(found.detach(), oracle(lm, plan, ids[rows, :at])[:, -size:]) <= 1e-5
        with MODES[draw.choice(["grad", "no_grad", "inference"])]():
            change = draw.choice(("none", "reorder", "repeat and select", "crop"))
            if change == "reorder":
                chosen = draw.choices(range(len(rows)), k=len(rows))
                cache.reorder_cache(torch.tensor(chosen))
                rows = [rows[each] for each in chosen]
            elif change == "repeat and select":
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.arange(0, 2 * len(rows), 2))
            elif change == "crop":
                cache.activate_past_recording()
                lm.model(ids[rows, :4], past_key_values=cache)
                cache.crop(-4)
                for layer in cache.layers:
                    layer.record_past = False
