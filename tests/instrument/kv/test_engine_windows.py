"""Windows in whole blocks and chunks show what a serving engine shows, by the position of a token alone."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headscan
from headscan.errors import PlanMismatchError
from headscan.kv.kv_damage import kv_damages_by_sequence
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.kv.plan_cache import PlanCache
from headscan.kv.window_keys import first_of_last
from headscan.windows import Window
from tests.instrument.kv.cache_plans import DROP, FULL, PlainPlan, error, explicit_logits, in_chunks, plan_of, some_ids
from tests.small_models import make_loaded

#: The rule of the vLLM plugin, which imports nothing else.
SERVED = Path(__file__).parents[3] / "serving/vllm/headscan_vllm/served_plan.py"


def sees(query: int, key: int, sink: int, recent: int, block: int, chunk: int) -> bool:
    """Return whether a query sees a key, by the rule in words."""
    first = math.ceil(sink / block) * block
    start = math.floor((math.floor(query / chunk) * chunk - recent + 1) / block) * block
    return key <= query and (key < first or key >= start)


def engine_mask(tokens: int, sink: int, recent: int, block: int, chunk: int) -> Tensor:
    """Return which keys each query sees (N, N)."""
    at = range(tokens)
    return torch.tensor([[sees(query, key, sink, recent, block, chunk) for key in at] for query in at])


def random_engine_plan(seed: int) -> PlainPlan:
    draw = random.Random(seed)
    kinds = [FULL, DROP, *(("window", draw.randrange(0, 9), draw.randrange(1, 30)) for _ in range(4))]
    plan = plan_of([[draw.choice(kinds), draw.choice(kinds)] for _ in range(3)])
    block = draw.choice((None, 1, 2, 3, 4, 8, 16))
    return replace(plan, block=block, chunk=draw.choice((None, 1, *(times * (block or 1) for times in (1, 2, 5, 40)))))


def random_passes(seed: int, tokens: int) -> tuple[int, ...]:
    """Return sizes of passes, single tokens among them, that read so many tokens together."""
    draw, sizes = random.Random(seed), [0]
    while sum(sizes) < tokens:
        sizes.append(min(draw.choice((1, 1, 2, 7, 20, 31)), tokens - sum(sizes)))
    return tuple(sizes[1:])


def expected_logits(lm: Any, plan: PlainPlan, ids: Tensor, unseen: int = 0) -> Tensor:
    """Return the logits of explicit masks; the first ``unseen`` tokens see all keys."""
    N = ids.shape[1]
    text = torch.arange(N).expand(len(ids), -1)

    def window(sink: int, recent: int) -> Tensor:
        mask = engine_mask(N, sink, recent, plan.block or 1, plan.chunk or 1)
        mask[:unseen] = True
        return mask

    causal = torch.ones(N, N, dtype=torch.bool).tril().expand(len(ids), -1, -1)
    return explicit_logits(lm, plan, ids, causal, text, window)


@pytest.mark.parametrize("seed", range(10))
def test_passes_cut_anywhere_and_window_masks_give_the_same_logits(seed: int) -> None:
    lm, plan = make_loaded("llama", dtype=torch.float64), random_engine_plan(seed)
    N = random.Random(seed).randrange(1, 90)
    ids, prompt = some_ids(2, N), random.Random(seed).randrange(1, N + 1)
    expected = expected_logits(lm, plan, ids)
    for sizes in ((N,), (prompt, *[1] * (N - prompt)), random_passes(seed, N)):
        assert error(in_chunks(lm, PlanCache(plan), ids, sizes), expected) <= 1e-6
    with torch.no_grad(), headscan.intervene(lm, KvWindows(plan.kept)):
        assert error(lm.model(ids, use_cache=False).logits, expected) <= 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_an_evicted_context(seed: int) -> None:
    """Mode decode: the context sees all keys, and every later token the windows of the rule."""
    lm, draw, plan = make_loaded("llama", dtype=torch.float64), random.Random(seed), random_engine_plan(200 + seed)
    ids, context = some_ids(2, 60), draw.randrange(2, 50)
    found = in_chunks(lm, KvEviction(plan).new_cache(lm), ids, (context, *random_passes(seed, 60 - context)))
    assert error(found, expected_logits(lm, plan, ids, context)) <= 1e-6


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("padding", ["left", "inside", "right"])
def test_rows_with_padding_have_the_positions_of_their_own_text(seed: int, padding: str) -> None:
    lm, plan = make_loaded("llama", dtype=torch.float64), random_engine_plan(300 + seed)
    ids, width = some_ids(2, 70), random.Random(seed).randrange(1, 30)
    first = {"left": 0, "inside": random.Random(seed).randrange(1, 30), "right": 70 - width}[padding]
    mask = torch.ones_like(ids)
    mask[1, first : first + width] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    for sizes in ((70,), (40, *[1] * 10, 20), random_passes(seed, 70)):
        found = in_chunks(lm, PlanCache(plan), ids, sizes, **inputs)
        for row, real in enumerate(mask.bool()):
            assert error(found[row, real], expected_logits(lm, plan, ids[row : row + 1, real])[0]) <= 1e-6
    with torch.no_grad(), headscan.intervene(lm, KvWindows(plan.kept)):
        masked = lm.model(ids, use_cache=False, **inputs).logits
    assert error(masked[1, mask[1].bool()], expected_logits(lm, plan, ids[1:, mask[1].bool()])[0]) <= 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_crop_and_changes_of_rows(seed: int) -> None:
    lm, plan = make_loaded("llama", dtype=torch.float64), random_engine_plan(400 + seed)
    ids, cache = some_ids(3, 60), PlanCache(plan)
    in_chunks(lm, cache, ids[:, :40], random_passes(seed, 40))
    cache.activate_past_recording()
    in_chunks(lm, cache, some_ids(3, 9), (5, 1, 3))
    cache.crop(-9)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    ids = ids[[2, 0, 0]]
    found = in_chunks(lm, cache, ids[:, 40:], (1, 12, 1, 6))
    assert error(found, expected_logits(lm, plan, ids)[:, 40:]) <= 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("block", "chunk"), [(4, 8), (1, 1)])
def test_crop_without_recording_removes_tokens_that_freed_none(seed: int, block: int, chunk: int) -> None:
    """Tokens can be removed as long as no slot was used twice."""
    lm = make_loaded("llama", dtype=torch.float64)
    window = Window(3, 5 + seed, block, chunk)
    plan = replace(plan_of([[("window", 3, 5 + seed), FULL]] * 3), block=block, chunk=chunk)
    ids, cache = some_ids(2, 60), PlanCache(plan)
    in_chunks(lm, cache, ids[:, : window.width], (window.width,))
    cache.crop(-6)
    found = in_chunks(lm, cache, ids[:, window.width - 6 :], random_passes(seed, 66 - window.width))
    assert error(found, expected_logits(lm, plan, ids)[:, window.width - 6 :]) <= 1e-6
    with pytest.raises(PlanMismatchError, match="have been freed"):
        cache.crop(-6)
    with pytest.raises(ValueError, match="pass a negative number"):
        cache.crop(3)


@pytest.mark.parametrize("family", ["gemma2-softcap", "gpt_oss", "falcon-alibi"])
def test_models_with_changed_scores(family: str) -> None:
    """A prompt in one pass, in several, and window masks agree."""
    lm, ids = make_loaded(family), some_ids(2, 50)
    sliding = {site.layer for site in lm.grid.sites if site.sliding_window is not None}
    rows = [
        [FULL if site.layer in sliding else ("window", 3, 6 + k) for k in range(site.num_key_value_heads)]
        for site in lm.grid.sites
    ]
    plan = replace(plan_of(rows), block=4, chunk=8)
    config = lm.model.config
    cache = PlanCache(plan, config)
    if config._attn_implementation == "eager":
        lm.model.set_attn_implementation("headscan-cache")
    one = in_chunks(lm, cache, ids, (50,))
    assert error(in_chunks(lm, PlanCache(plan, config), ids, (20, *[1] * 20, 10)), one) <= 1e-5
    with torch.no_grad(), headscan.intervene(lm, KvWindows(plan.kept)):
        assert error(lm.model(ids, use_cache=False).logits, one) <= 1e-5


def test_sizes_of_one_token_are_windows_of_single_tokens() -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 60)
    plan = plan_of([[FULL, ("window", 2, 7)], [DROP, FULL], [("window", 4, 20), ("window", 0, 5)]])
    plain, ones = PlanCache(plan), PlanCache(replace(plan, block=1, chunk=1))
    assert torch.equal(in_chunks(lm, plain, ids, (40, 1, 19)), in_chunks(lm, ones, ids, (40, 1, 19)))
    assert plain.nbytes == ones.nbytes


def test_generate_continues_by_the_rule() -> None:
    lm, ids = make_loaded("llama", dtype=torch.float64), some_ids(1, 40)
    plan = replace(plan_of([[FULL, ("window", 2, 7)]] * 3), block=4, chunk=16)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False, "pad_token_id": 1}
    mask = torch.ones_like(ids)
    found = lm.model.generate(ids, attention_mask=mask, past_key_values=PlanCache(plan), **options)
    expected = expected_logits(lm, plan, found[:, :-1])[:, 39:].argmax(-1)
    assert torch.equal(found[:, 40:], expected)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_count_the_blocks_that_the_last_token_sees(seed: int) -> None:
    lm, plan = make_loaded("llama"), random_engine_plan(500 + seed)
    cache, block = PlanCache(plan), plan.block or 1
    token = 2 * 4 * (lm.model.config.hidden_size // lm.model.config.num_attention_heads)
    for tokens in (1, 9, 40, 41, 64, 77):
        in_chunks(lm, cache, some_ids(1, tokens - cache.get_seq_length()), (tokens - cache.get_seq_length(),))
        kept = 0
        for head in plan.heads:
            sizes = (head.sink or 0, head.recent or 1, block, plan.chunk or 1)
            if head.action == "full":
                kept += -(-tokens // block) * block
            elif head.action == "window":
                kept += len({at // block for at in range(tokens) if sees(tokens - 1, at, *sizes)}) * block
        assert cache.nbytes == token * kept


@pytest.mark.parametrize("seed", range(15))
def test_slots_suffice_for_every_window(seed: int) -> None:
    draw = random.Random(seed)
    block = draw.choice((1, 2, 3, 8, 16))
    chunk = draw.choice((1, block, 3 * block))
    window = Window(draw.randrange(9), draw.randrange(1, 40), block, chunk)
    hidden = []
    for tokens in range(1, 130):
        seen = {at for at in range(tokens) if sees(tokens - 1, at, window.sink, window.recent, block, chunk)}
        blocks = {at // block for at in seen}
        assert window.kept(tokens) == len(blocks) * block <= window.width
        # A ring of `last` slots keeps what the next token sees.
        assert min((at for at in seen if at >= window.first), default=tokens) >= tokens - window.last
        if len(seen) < tokens:
            hidden.append(tokens)
    assert not hidden or min(hidden) == window.covers + 1


@pytest.mark.skipif(not SERVED.exists(), reason="the plugin is not in this tree")
@pytest.mark.parametrize("seed", range(15))
def test_the_plugin_for_vllm_has_the_same_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("served_plan", SERVED)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    draw = random.Random(seed)
    block = draw.choice((1, 2, 3, 8, 16))
    chunk = draw.choice((None, block, 3 * block))
    window = Window(draw.randrange(9), draw.randrange(1, 40), block, chunk or 1)
    served = module.ServedPlan({}, ((window.sink, window.recent),), ((1,),), block, chunk).rule(1, block)
    assert served.sink == window.first
    most = 0
    for at in range(300):
        assert served.start(at) == max(window.first, first_of_last(at, window))
        most = max(most, sum(sees(at, key, window.sink, window.recent, block, chunk or 1) for key in range(at + 1)))
    assert most == served.most_tokens <= window.width


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


@pytest.mark.parametrize(("block", "chunk"), [(16, 500), (16, 8), (3, 2)])
def test_chunks_are_whole_blocks(block: int, chunk: int) -> None:
    plan = replace(plan_of([[("window", 2, 7), FULL]] * 3), block=block, chunk=chunk)
    with pytest.raises(
        PlanMismatchError, match=rf"`chunk={chunk}` of a plan \(limit 1, or a multiple of `block={block}`"
    ):
        PlanCache(plan)
    for sizes in ((block, 1), (block, None), (None, chunk), (block, 4 * block)):
        PlanCache(replace(plan, block=sizes[0], chunk=sizes[1]))
