"""PlanCache in `generate`: every way to decode, padded batches, and passes of any mode in any order."""

from __future__ import annotations

import copy
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
from headscan.attention.hooks import attention_hook
from headscan.errors import UnsupportedModelError
from headscan.kv.kv_windows import KvWindows, windowed
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_cache import PlanCache
from headscan.models.loaded_model import LoadedModel
from tests.instrument.kv.cache_plans import (
    DROP,
    FULL,
    NARROW,
    WIDE,
    error,
    explicit_logits,
    in_chunks,
    oracle,
    plan_of,
    random_plan,
    some_ids,
)
from tests.small_models import make_loaded

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": "another model"},
}
PLANS = {
    "neighbours": plan_of([[FULL, NARROW], [FULL, FULL], [WIDE, WIDE]]),
    "scattered": plan_of([[NARROW, FULL], [DROP, FULL], [DROP, DROP]]),
}


def generate(lm: LoadedModel, cache: Cache | None, way: str, tokens: int = 24, **more: Any) -> torch.Tensor:
    options = dict(WAYS[way])
    if way == "assistant":  # a little wrong, so that some of its tokens are rejected
        assistant = copy.deepcopy(lm.model)
        torch.manual_seed(3)
        with torch.no_grad():
            assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight) * 0.1)
        options["assistant_model"] = assistant
    ids = some_ids(1 if way in ("assistant", "prompt lookup") else 2, 30)
    if way == "prompt lookup":
        ids = ids[:, :10].repeat(1, 3)
    torch.manual_seed(0)
    out: torch.Tensor = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        **{
            "min_new_tokens": tokens,
            "max_new_tokens": tokens,
            "do_sample": False,
            "pad_token_id": 1,
            **options,
            **more,
        },
    )
    return out


@pytest.mark.parametrize("way", WAYS)
def test_full_heads_decode_as_transformers_cache(way: str) -> None:
    lm = make_loaded("llama")
    expected = generate(lm, DynamicCache(config=lm.model.config), way)
    assert torch.equal(generate(lm, PlanCache(random_plan(lm, [FULL])), way), expected)


@pytest.mark.parametrize(("way", "plan"), [("greedy", "neighbours"), *((way, "scattered") for way in WAYS)])
def test_windows_decode_as_the_oracle(way: str, plan: str) -> None:
    lm = make_loaded("llama")
    found = generate(lm, PlanCache(PLANS[plan]), way)
    if way == "assistant":
        with headscan.intervene(lm, KvWindows(PLANS[plan].kept)):
            expected = generate(lm, None, "greedy", use_cache=False)[:1]
    elif way == "prompt lookup":
        expected = generate(lm, PlanCache(PLANS[plan]), way, prompt_lookup_num_tokens=None)
    else:
        with headscan.intervene(lm, KvWindows(PLANS[plan].kept)):
            everything = DynamicCache(config=lm.model.config) if "beam" in way else None
            options = {"use_cache": everything is not None, "prefill_chunk_size": None}
            expected = generate(lm, everything, way, **options)
    assert torch.equal(found, expected)


def test_rejected_tokens_leave_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[int] = []
    crop = PlanCache.crop

    def counting(cache: PlanCache, tokens: int) -> None:
        removed.append(-tokens)
        crop(cache, tokens)

    monkeypatch.setattr(PlanCache, "crop", counting)
    lm = make_loaded("llama")
    cache = PlanCache(PLANS["scattered"])
    ids = generate(lm, cache, "assistant")
    assert sum(removed) > 0 and cache.get_seq_length() == ids.shape[1] - 1
    monkeypatch.undo()
    plain = PlanCache(PLANS["scattered"])
    in_chunks(lm, plain, ids, (ids.shape[1] - 1,))
    assert cache.nbytes == plain.nbytes


def test_rows_that_are_padded_decode_in_every_way() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    for way in ("greedy", "beams", "chunks"):
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 1, **WAYS[way]}
        plan = PLANS["scattered"]
        both = lm.model.generate(ids, attention_mask=mask, past_key_values=PlanCache(plan), **options)
        for row, width in enumerate((0, 11)):
            part = ids[row : row + 1, width:]
            ones = torch.ones_like(part)
            alone = lm.model.generate(part, attention_mask=ones, past_key_values=PlanCache(plan), **options)
            assert torch.equal(both[row, width:], alone[0])


def explicit_full_prefill(lm: LoadedModel, plan: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits of the tokens after a prompt whose own queries saw all keys: one pass, masked by hand."""
    kept = plan.kept

    def on_attention(site: Any, call: Any) -> torch.Tensor:
        groups = kept.groups(site.layer, site.num_key_value_heads)
        out = windowed(call, groups, MaskReader())
        whole = call.output()
        for kv_heads, window in groups:
            if window is not None and window.width:
                for k in kv_heads:
                    heads = [head for head, kv_head in enumerate(site.kv_head_of) if kv_head == k]
                    out[:, heads, :prompt] = whole[:, heads, :prompt]
        return out

    with torch.no_grad(), attention_hook(lm, on_attention):
        return lm.model(input_ids=ids, use_cache=False).logits


def test_the_first_pass_can_see_all_keys() -> None:
    lm, ids = make_loaded("llama-mha"), some_ids(2, 60)
    plan = random_plan(lm, seed=4)
    found = in_chunks(lm, PlanCache(plan, prefill="full"), ids, (40, 1, 1, 18))
    assert error(found, explicit_full_prefill(lm, plan, ids, 40)) <= 1e-5


def test_a_cache_can_be_used_again_and_copied() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 50)
    plan = PLANS["scattered"]
    cache = PlanCache(plan)
    in_chunks(lm, cache, some_ids(3, 45), (45,))
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    in_chunks(lm, cache, ids, (30,))
    twin = copy.deepcopy(cache)
    for each in (cache, twin):
        assert error(in_chunks(lm, each, ids[:, 30:], (1, 19)), oracle(lm, plan, ids)[:, 30:]) <= 1e-5


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("pad", "tokens"), [((0, 0), 31), ((0, 5), 31), ((2, 0), 6), ((7, 5), 31)])
def test_a_single_token_does_not_see_a_hole_in_its_mask(pad: tuple[int, int], tokens: int, additive: bool) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, tokens)
    plan = plan_of([[NARROW, FULL], [WIDE, DROP], [NARROW, NARROW]])
    mask = torch.ones_like(ids)
    for row, width in enumerate(pad):
        mask[row, :width] = 0
    text = mask.cumsum(1) - 1
    position = text.clamp_min(0)
    cache = PlanCache(plan)
    in_chunks(lm, cache, ids[:, :-1], (tokens - 1,), attention_mask=mask[:, :-1], position_ids=position[:, :-1])
    mask[0, -3] = mask[1, -2] = 0
    seen = mask.bool()[:, None, None]
    if additive:
        seen = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    new = {"input_ids": ids[:, -1:], "position_ids": position[:, -1:], "attention_mask": seen}
    with torch.no_grad():
        found = lm.model(**new, past_key_values=cache).logits[:, 0]
        whole = torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril()
        for row, width in enumerate(pad):
            whole[row, 0, :, :width] = torch.eye(tokens, dtype=torch.bool)[:, :width]  # padding sees itself
        whole[:, :, -1] = mask.bool()[:, None]
    expected = explicit_logits(lm, plan, ids, whole[:, 0], text)
    assert error(found, expected[:, -1]) <= 1e-5


def test_a_mask_may_not_move_the_start_of_a_row() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 30)
    plan, mask = PLANS["scattered"], torch.ones_like(ids)
    mask[1, :11] = 0
    for other, size in (({"attention_mask": torch.ones_like(ids)}, 6), ({}, 1), ({"attention_mask": mask[[1, 0]]}, 6)):
        cache = PlanCache(plan)
        in_chunks(lm, cache, ids[:, :-size], (30 - size,), attention_mask=mask)
        with pytest.raises(UnsupportedModelError, match=rf"hides other tokens before token {30 - size} "):
            lm.model(ids[:, -size:], past_key_values=cache, **other)


@pytest.mark.slow
def test_compiled_models_generate_the_same_tokens() -> None:
    """Without a code generator: the graphs and their breaks are those of every backend."""
    lm = make_loaded("llama")
    expected = generate(lm, PlanCache(PLANS["scattered"]), "greedy", tokens=8)
    lm.model.forward = torch.compile(lm.model.forward, backend="eager")  # type: ignore[method-assign]
    assert torch.equal(generate(lm, PlanCache(PLANS["scattered"]), "greedy", tokens=8), expected)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
}
SHARED_PLANS = {"windows": plan_of([[NARROW, FULL], [DROP, FULL], [WIDE, NARROW]]), "full": plan_of([[FULL, FULL]] * 3)}


def passes(lm: LoadedModel, cache: Cache, ids: Tensor, modes: list[str], sizes: list[int]) -> list[Tensor]:
    logits, first = [], 0
    for mode, size in zip(modes, sizes, strict=True):
        with MODES[mode]():
            logits.append(lm.model(ids[:, first : first + size], past_key_values=cache).logits)
        first += size
    return logits


@torch.enable_grad()
@pytest.mark.parametrize("plan", SHARED_PLANS)
@pytest.mark.parametrize("sizes", [[30, 1, 9], [1, 1, 38]])
def test_passes_in_any_order_of_modes(plan: str, sizes: list[int]) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 40)
    expected = oracle(lm, SHARED_PLANS[plan], ids)
    for modes in product(["grad", "no_grad", "inference"], repeat=3):
        found = passes(lm, PlanCache(SHARED_PLANS[plan]), ids, list(modes), sizes)
        assert error(torch.cat([each.detach() for each in found], 1), expected) <= 1e-5
        if modes[-1] == "grad":
            found[-1].sum().backward()


@torch.enable_grad()
@pytest.mark.parametrize("sizes", [[40], [20, 1, 19], [39, 1], [1, 1, 1, 37]])
@pytest.mark.parametrize("frozen", ["nothing", "all but queries"])
@pytest.mark.parametrize("plan", SHARED_PLANS)
def test_gradients_through_several_passes(plan: str, frozen: str, sizes: list[int]) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 40)
    weights = [block.self_attn.q_proj.weight for block in lm.model.model.layers]
    if frozen == "nothing":
        weights += [block.self_attn.k_proj.weight for block in lm.model.model.layers[:2]]
    else:
        lm.model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
    with headscan.intervene(lm, KvWindows(SHARED_PLANS[plan].kept)):
        loss = lm.model(ids, use_cache=False).logits.square().mean()
    expected = torch.autograd.grad(loss, weights, allow_unused=True)
    found_logits = passes(lm, PlanCache(SHARED_PLANS[plan]), ids, ["grad"] * len(sizes), sizes)
    found = torch.autograd.grad(torch.cat(found_logits, 1).square().mean(), weights, allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or error(ours, theirs) <= 1e-4


@torch.enable_grad()
@pytest.mark.parametrize("later", ["no_grad", "inference"])
def test_passes_without_gradients_leave_earlier_graphs_as_they_are(later: str) -> None:
    lm, ids = make_loaded("llama"), some_ids(1, 40)
    weight = lm.model.model.layers[0].self_attn.k_proj.weight
    for plan in SHARED_PLANS.values():
        gradients = []
        for sizes in ([30], [30, 1, 1, 8]):
            modes = ["grad", *[later] * (len(sizes) - 1)]
            first = passes(lm, PlanCache(plan), ids, modes, sizes)[0]
            gradients.append(torch.autograd.grad(first.square().mean(), [weight])[0])
        assert torch.equal(*gradients)


@pytest.mark.parametrize("plan", SHARED_PLANS)
@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "bfloat16"])
def test_generate_continues_a_prompt_read_in_any_mode(plan: str, mode: str) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 30)
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    mask = torch.ones_like(ids)
    cache = PlanCache(SHARED_PLANS[plan])
    passes(lm, cache, ids[:, :20], [mode], [20])
    found = lm.model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    if mode == "bfloat16":  # rounded keys may change a token
        assert found.shape == (2, 38)
        return
    assert torch.equal(
        found, lm.model.generate(ids, attention_mask=mask, past_key_values=PlanCache(SHARED_PLANS[plan]), **options)
    )


@pytest.mark.parametrize(("family", "sizes"), [("llama", [30, 1, 9]), ("gpt_oss", [1, 1, 38])])
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


@pytest.mark.parametrize("seed", range(5))
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
