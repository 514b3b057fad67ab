"""Windows in whole blocks and prompts in chunks show what a serving engine does, by its own tables of blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headscan
from headscan.catalog import kept_by_window
from headscan.errors import PlanMismatchError
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import kv_damages_by_sequence
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.kv.plan_cache import PlanCache
from headscan.kv.window_keys import first_of_last
from tests.headscan.kv.cache_plans import DROP, FULL, PlainPlan, error, explicit_logits, in_chunks, plan_of, some_ids
from tests.small_models import make_loaded


def engine_mask(steps: list[int], sink: int, recent: int, block: int) -> Tensor:
    """Return which keys each query sees (N, N) in an engine that computes ``steps`` tokens one step after another, with
    a table of the blocks that it has not freed.
    """
    seen, computed = torch.zeros(sum(steps), sum(steps), dtype=torch.bool), 0
    for new in steps:
        first_blocks = -(-sink // block)
        table = [at for at in range(sum(steps)) if at < first_blocks or at >= (computed - recent + 1) // block]
        for query in range(computed, computed + new):
            for at in table:
                seen[query, at * block : min((at + 1) * block, query + 1)] = True
        computed += new
    return seen


def in_steps(tokens: int, most: int) -> list[int]:
    """Return the steps that read ``tokens`` tokens, at most ``most`` at a time."""
    return [min(most, tokens - at) for at in range(0, tokens, most)]


def random_engine_plan(seed: int) -> PlainPlan:
    draw = random.Random(seed)
    kinds = [FULL, DROP, *(("window", draw.randrange(0, 9), draw.randrange(1, 30)) for _ in range(4))]
    plan = plan_of([[draw.choice(kinds), draw.choice(kinds)] for _ in range(3)])
    block, chunk = draw.choice((None, 1, 2, 3, 4, 8, 16)), draw.choice((None, 1, 5, 8, 16, 33, 500))
    return replace(plan, block=block, chunk=chunk)


def expected_logits(lm: Any, plan: PlainPlan, ids: Tensor, steps: list[int]) -> Tensor:
    N = ids.shape[1]
    text = torch.arange(N).expand(len(ids), -1)

    def window(sink: int, recent: int) -> Tensor:
        return engine_mask(steps, sink, recent, plan.block or 1)

    causal = torch.ones(N, N, dtype=torch.bool).tril().expand(len(ids), -1, -1)
    return explicit_logits(lm, plan, ids, causal, text, window)


@pytest.mark.parametrize("seed", range(24))
def test_a_prompt_in_chunks_and_decoded_tokens(seed: int) -> None:
    lm, draw, plan = make_loaded("llama", dtype=torch.float64), random.Random(seed), random_engine_plan(seed)
    prompt, decoded = draw.randrange(1, 70), draw.randrange(1, 30)
    ids = some_ids(2, prompt + decoded)
    steps = in_steps(prompt, plan.chunk or 1) + [1] * decoded
    found = in_chunks(lm, PlanCache(plan), ids, (prompt, *[1] * decoded))
    assert error(found, expected_logits(lm, plan, ids, steps)) <= 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_passes_are_steps_of_their_own(seed: int) -> None:
    lm, draw, plan = make_loaded("llama", dtype=torch.float64), random.Random(seed), random_engine_plan(100 + seed)
    sizes: list[int] = []
    while sum(sizes) < 70:
        sizes.append(draw.choice((1, 1, 2, 7, 20, 31)))
    ids = some_ids(2, sum(sizes))
    steps = [step for size in sizes for step in in_steps(size, plan.chunk or 1)]
    found = in_chunks(lm, PlanCache(plan), ids, tuple(sizes))
    assert error(found, expected_logits(lm, plan, ids, steps)) <= 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_modes_of_an_arm(seed: int) -> None:
    """Forward reads the whole text in chunks; decode the context, and then every token as a step of its own."""
    lm, draw, plan = make_loaded("llama", dtype=torch.float64), random.Random(seed), random_engine_plan(200 + seed)
    ids, context = some_ids(2, 60), draw.randrange(2, 50)
    with torch.no_grad(), headscan.intervene(lm, KvWindows(KeptKeys.of_plan(plan))):
        forward = lm.model(ids, use_cache=False).logits
    assert error(forward, expected_logits(lm, plan, ids, in_steps(60, plan.chunk or 1))) <= 1e-6
    found = in_chunks(lm, KvEviction(plan).new_cache(lm), ids, (context, 60 - context))
    steps = in_steps(context, plan.chunk or context) + [1] * (60 - context)
    assert error(found, expected_logits(lm, plan, ids, steps)) <= 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_rows_with_padding_have_the_blocks_of_their_own_text(seed: int) -> None:
    lm, draw, plan = make_loaded("llama", dtype=torch.float64), random.Random(seed), random_engine_plan(300 + seed)
    ids, left = some_ids(2, 70), draw.randrange(1, 30)
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    found = in_chunks(lm, PlanCache(plan), ids, (40, *[1] * 10, 20), **inputs)
    for row, width in enumerate((0, left)):
        steps = [step for size in (40 - width, *[1] * 10, 20) for step in in_steps(size, plan.chunk or 1)]
        assert error(found[row, width:], expected_logits(lm, plan, ids[row : row + 1, width:], steps)[0]) <= 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_crop_and_changes_of_rows(seed: int) -> None:
    lm, plan = make_loaded("llama", dtype=torch.float64), random_engine_plan(400 + seed)
    ids, cache = some_ids(3, 60), PlanCache(plan)
    in_chunks(lm, cache, ids[:, :40], (40,))
    cache.activate_past_recording()
    in_chunks(lm, cache, some_ids(3, 9), (5, 1, 3))
    cache.crop(-9)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    ids = ids[[2, 0, 0]]
    found = in_chunks(lm, cache, ids[:, 40:], (1, 12, 1, 6))
    steps = [step for size in (40, 1, 12, 1, 6) for step in in_steps(size, plan.chunk or 1)]
    assert error(found, expected_logits(lm, plan, ids, steps)[:, 40:]) <= 1e-6


@pytest.mark.parametrize("family", ["gemma2-softcap", "gpt_oss", "falcon-alibi"])
def test_models_with_changed_scores(family: str) -> None:
    """A prompt in one pass and token by token agree where both are the same steps."""
    lm, ids = make_loaded(family), some_ids(2, 50)
    sliding = {site.layer for site in lm.grid.sites if site.sliding_window is not None}
    rows = [
        [FULL if site.layer in sliding else ("window", 3, 6 + k) for k in range(site.num_key_value_heads)]
        for site in lm.grid.sites
    ]
    plan = replace(plan_of(rows), block=4)
    config = lm.model.config
    cache = PlanCache(plan, config)
    if config._attn_implementation == "eager":
        lm.model.set_attn_implementation("headscan-cache")
    one = in_chunks(lm, cache, ids, (50,))
    assert error(in_chunks(lm, PlanCache(plan, config), ids, (20, *[1] * 30)), one) <= 1e-5
    with torch.no_grad(), headscan.intervene(lm, KvWindows(KeptKeys.of_plan(plan))):
        assert error(lm.model(ids, use_cache=False).logits, one) <= 1e-5


def test_sizes_of_one_token_are_todays_windows() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 60)
    plan = plan_of([[FULL, ("window", 2, 7)], [DROP, FULL], [("window", 4, 20), ("window", 0, 5)]])
    plain, ones = PlanCache(plan), PlanCache(replace(plan, block=1, chunk=1))
    assert torch.equal(in_chunks(lm, plain, ids, (40, 1, 19)), in_chunks(lm, ones, ids, (40, 1, 19)))
    assert plain.nbytes == ones.nbytes


def test_generate_reads_its_prompt_in_chunks() -> None:
    lm, ids = make_loaded("llama", dtype=torch.float64), some_ids(1, 40)
    plan = replace(plan_of([[FULL, ("window", 2, 7)]] * 3), block=4, chunk=16)
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None, "do_sample": False, "pad_token_id": 1}
    mask = torch.ones_like(ids)
    found = lm.model.generate(ids, attention_mask=mask, past_key_values=PlanCache(plan), **options)
    tokens = ids
    for step in range(10):
        logits = expected_logits(lm, plan, tokens, in_steps(40, 16) + [1] * step)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_count_whole_blocks(seed: int) -> None:
    lm, plan = make_loaded("llama"), random_engine_plan(500 + seed)
    cache, block = PlanCache(plan), plan.block or 1
    token = 2 * 4 * (lm.model.config.hidden_size // lm.model.config.num_attention_heads)
    for tokens in (1, 9, 40, 41, 64, 77):
        in_chunks(lm, cache, some_ids(1, tokens - cache.get_seq_length()), (tokens - cache.get_seq_length(),))
        kept = 0
        for head in plan.heads:
            if head.action == "full":
                kept += -(-tokens // block) * block
            elif head.action == "window":
                seen = engine_mask([1] * tokens, head.sink or 0, head.recent or 1, block)[-1]
                kept += len({at // block for at in range(tokens) if seen[at]}) * block
        assert cache.nbytes == token * kept


@pytest.mark.parametrize("seed", range(40))
def test_slots_suffice_for_every_window(seed: int) -> None:
    draw = random.Random(seed)
    window = Window(draw.randrange(9), draw.randrange(1, 40), draw.choice((1, 2, 3, 8, 16)))
    for tokens in range(1, 120):
        kept = kept_by_window(tokens, window.sink, window.recent, window.block)
        seen = engine_mask([1] * tokens, window.sink, window.recent, window.block)[-1]
        assert int(seen.sum()) <= kept <= window.width
        low = int(first_of_last(torch.tensor(tokens - 1), window))
        assert seen.tolist() == [at < window.first or at >= low for at in range(tokens)]


def test_damage_is_that_of_whole_blocks() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 60)
    wide = kv_damages_by_sequence(lm, ids, sink=3, recent=8, block=1)
    rounded = kv_damages_by_sequence(lm, ids, sink=3, recent=8, block=8)
    assert not torch.allclose(wide, rounded, equal_nan=True)


@pytest.mark.parametrize("sizes", [{"block": 0}, {"chunk": -1}, {"block": 1.5}, {"chunk": True}, {"block": "16"}])
def test_wrong_sizes(sizes: dict[str, Any]) -> None:
    plan = replace(plan_of([[("window", 2, 7), FULL]] * 3), **sizes)
    with pytest.raises(PlanMismatchError, match=r"`(block|chunk)=.*of a plan \(limit a whole number from 1 on\)"):
        PlanCache(plan)
