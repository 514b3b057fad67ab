"""PlanCache in `generate`: every way to decode, padded batches, chunks, and changes of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache

import headscan
from headscan.attention.cache_attention import PLAIN, ScoreTerms
from headscan.attention.hooks import attention_hook
from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.kv_windows import KvWindows, windowed
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_cache import PlanCache
from headscan.kv.plan_layer import PlanLayer
from headscan.models.loaded_model import LoadedModel
from headscan.windows import Window
from tests.instrument.kv.cache_plans import (
    DROP,
    FULL,
    MIXED,
    NARROW,
    WIDE,
    error,
    explicit_logits,
    greedily,
    in_chunks,
    make_cache,
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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("kinds", [MIXED, (FULL,), (NARROW, WIDE), (DROP, ("window", 1, 1)), (("window", 0, 5), FULL)])
@pytest.mark.parametrize("chunks", [(60,), (1,) * 60, (5, 35, 1, 1, 18), (20, 20, 20), (1, 1, 1, 57)])
def test_any_chunks_equal_the_oracle(kinds: tuple[Any, ...], chunks: tuple[int, ...]) -> None:
    lm, ids = make_loaded("llama-mha"), some_ids(2, 60)
    plan = random_plan(lm, kinds)
    assert error(in_chunks(lm, make_cache(lm, plan), ids, chunks), oracle(lm, plan, ids)) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap", "gpt_oss", "falcon-mqa"])
@pytest.mark.parametrize("chunks", [(60,), (5, 35, 1, 1, 18), (1,) * 60, (20, 1, 1, 38)])
def test_rows_padded_on_the_left_equal_rows_alone(family: str, chunks: tuple[int, ...]) -> None:
    lm, pad = make_loaded(family), (0, 13, 31)
    plan, ids = random_plan(lm, seed=2), some_ids(3, 60)
    mask = torch.ones_like(ids)
    for row, width in enumerate(pad):
        mask[row, :width] = 0
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = make_cache(lm, plan)
    found = in_chunks(lm, cache, ids, chunks, attention_mask=mask, position_ids=position)
    assert found.isfinite().all()
    for row, width in enumerate(pad):
        assert error(found[row, width:], oracle(lm, plan, ids[row : row + 1, width:])[0]) <= 1e-5


def test_position_biases_in_chunks() -> None:
    lm, ids = make_loaded("falcon-alibi"), some_ids(2, 50)
    plan = random_plan(lm, seed=3)
    assert error(in_chunks(lm, make_cache(lm, plan), ids, (20, 1, 1, 28)), oracle(lm, plan, ids)) <= 1e-5


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


def test_contexts_within_the_windows_lose_nothing() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 24)
    plan = random_plan(lm, [WIDE])
    cache, whole = PlanCache(plan), DynamicCache(config=lm.model.config)
    found, expected = in_chunks(lm, cache, ids, (20, 1, 3)), in_chunks(lm, whole, ids, (20, 1, 3))  # type: ignore[arg-type]
    assert error(found, expected) <= 1e-6
    assert cache.nbytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)


@pytest.mark.parametrize("record", [False, True])
def test_crop(record: bool) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 60)
    plan = PLANS["scattered"]
    cache = PlanCache(plan)
    in_chunks(lm, cache, ids, (40,))
    if record:
        cache.activate_past_recording()
    in_chunks(lm, cache, some_ids(2, 7), (6, 1))
    if not record:
        with pytest.raises(PlanMismatchError, match="cannot remove 7 tokens"):
            cache.crop(-7)
        assert cache.get_seq_length() == 47
        return
    cache.crop(-7)
    assert cache.get_seq_length() == 40
    found = in_chunks(lm, cache, ids[:, 40:], (1, 1, 18))
    assert error(found, oracle(lm, plan, ids)[:, 40:]) <= 1e-5
    with pytest.raises(ValueError, match="pass a negative number"):
        cache.crop(3)


def test_crop_within_the_window_needs_no_recording() -> None:
    lm, ids = make_loaded("llama"), some_ids(1, 50)
    plan = plan_of([[FULL, WIDE]] * 3)
    cache = PlanCache(plan)
    in_chunks(lm, cache, some_ids(1, 21), (20, 1))
    cache.crop(-21)
    found = in_chunks(lm, cache, ids, (10, 1, 39))
    assert error(found, oracle(lm, plan, ids)) <= 1e-5


def test_rows_can_be_selected_repeated_and_reordered() -> None:
    lm, ids = make_loaded("llama"), some_ids(3, 60)
    plan = PLANS["scattered"]
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = PlanCache(plan)
        in_chunks(lm, cache, ids, (40,))
        change(cache)
        found = in_chunks(lm, cache, ids[rows, 40:], (1, 19))
        assert error(found, oracle(lm, plan, ids[rows])[:, 40:]) <= 1e-5


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


def test_bfloat16() -> None:
    lm, ids = make_loaded("llama", dtype=torch.bfloat16), some_ids(2, 60)
    plan = PLANS["scattered"]
    cache = PlanCache(plan)
    found, exact = in_chunks(lm, cache, ids, (40, 1, 1, 18)), oracle(make_loaded("llama"), plan, ids)
    masked = oracle(lm, plan, ids)
    assert found.dtype == torch.bfloat16
    # Both round; the cache may not be further from float32 than the oracle is.
    assert (found - exact).abs().mean() <= 1.2 * (masked - exact).abs().mean() + 1e-3


@torch.enable_grad()
def test_gradients_flow_within_one_pass() -> None:
    lm, ids = make_loaded("llama"), some_ids(1, 40)
    plan = PLANS["neighbours"]
    weight = lm.model.model.layers[0].self_attn.k_proj.weight
    loss = lm.model(input_ids=ids, past_key_values=PlanCache(plan)).logits.square().mean()
    (found,) = torch.autograd.grad(loss, [weight])
    with headscan.intervene(lm, KvWindows(plan.kept)):
        loss = lm.model(input_ids=ids, use_cache=False).logits.square().mean()
    (expected,) = torch.autograd.grad(loss, [weight])
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


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


def test_tokens_of_a_greedy_step_match_without_generate() -> None:
    lm = make_loaded("llama")
    ids, _ = greedily(lm, PlanCache(PLANS["scattered"]), some_ids(2, 30), 24)
    assert torch.equal(ids, generate(lm, PlanCache(PLANS["scattered"]), "greedy", eos_token_id=None))


class Operations(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("terms", [PLAIN, ScoreTerms(softcap=2.0)])
def test_a_decoding_step_never_waits_for_the_device(padded: bool, terms: ScoreTerms) -> None:
    groups = (((1, 4), None), ((0, 3), Window(2, 7)), ((2,), Window(0, 0)))
    layer = PlanLayer("layer 0", groups, "window", None, MaskReader())

    def step(tokens: int) -> set[str]:
        new, query = torch.randn(2, 5, tokens, 4), torch.randn(2, 10, tokens, 4)
        total = layer.tokens + tokens
        mask = torch.ones(total, total, dtype=torch.bool).tril()[-tokens:].repeat(2, 1, 1, 1)
        mask[1, ..., :3] = False
        with Operations() as seen:
            key, _ = layer.update(new, new)
            key.source.attend(query, mask if padded else None, None, terms)
        return seen.names

    step(12)
    # Reading a number, and copying a list or a scalar from the host.
    waits = {"_local_scalar_dense", "nonzero", "item", "lift_fresh", "_to_copy"}
    assert not step(1) & waits and not step(1) & waits


@pytest.mark.slow
def test_compiled_models_generate_the_same_tokens() -> None:
    """Without a code generator: the graphs and their breaks are those of every backend."""
    lm = make_loaded("llama")
    expected = generate(lm, PlanCache(PLANS["scattered"]), "greedy", tokens=8)
    lm.model.forward = torch.compile(lm.model.forward, backend="eager")  # type: ignore[method-assign]
    assert torch.equal(generate(lm, PlanCache(PLANS["scattered"]), "greedy", tokens=8), expected)
