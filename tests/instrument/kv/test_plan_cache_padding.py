"""PlanCache with padding anywhere in a row equals explicit masks; others are refused. Masks are read once per pass."""

from __future__ import annotations

import gc
import random
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import headscan
from headscan.errors import UnsupportedModelError
from headscan.kv.kv_windows import KvWindows
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_cache import PlanCache
from tests.instrument.kv.cache_plans import (
    DROP,
    FULL,
    MIXED,
    NARROW,
    WIDE,
    error,
    explicit_logits,
    in_chunks,
    plan_of,
    random_plan,
    some_ids,
)
from tests.small_models import make_loaded

PLAN = plan_of([[NARROW, FULL], [WIDE, DROP], [NARROW, NARROW]])


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def text_index(real_BN: Tensor) -> Tensor:
    return real_BN.cumsum(1) - 1


def inputs_of(real: Tensor) -> dict[str, Tensor]:
    return {"attention_mask": real.long(), "position_ids": text_index(real).clamp_min(0)}


def random_padding(seed: int, rows: int, tokens: int) -> Tensor:
    """Return which tokens are text: padding on the left, after a prefix, at random places, on the right, or nowhere."""
    draw = random.Random(seed)
    real = torch.ones(rows, tokens, dtype=torch.bool)
    for row in real:
        kind = draw.choice(("none", "left", "gap", "holes", "right", "two gaps"))
        first = draw.randrange(1, tokens - 8)
        if kind == "left":
            row[:first] = False
        elif kind in ("gap", "two gaps"):
            row[first : first + draw.randrange(1, 12)] = False
            if kind == "two gaps":
                row[tokens // 2 : tokens // 2 + 4] = False
        elif kind == "holes":
            row[torch.tensor([draw.random() < 0.3 for _ in range(tokens)])] = False
        elif kind == "right":
            row[tokens - first :] = False
    real[:, 0] |= ~real.any(1)
    return real


def random_chunks(seed: int, tokens: int) -> tuple[int, ...]:
    draw, sizes = random.Random(seed), []
    while sum(sizes) < tokens:
        sizes.append(min(draw.choice((1, 1, 2, 5, 17, 40)), tokens - sum(sizes)))
    return tuple(sizes)


@pytest.mark.parametrize("seed", range(16))
def test_padding_anywhere_equals_explicit_masks(seed: int) -> None:
    lm, ids = make_loaded("llama", dtype=torch.float64), some_ids(3, 60)
    plan, real = random_plan(lm, MIXED if seed % 2 else (NARROW, WIDE), seed), random_padding(seed, 3, 60)
    inputs = inputs_of(real)
    found = in_chunks(lm, PlanCache(plan), ids, random_chunks(seed, 60), **inputs)
    expected = explicit_logits(lm, plan, ids, causal(60) & real[:, None], text_index(real))
    assert found.isfinite().all() and error(found[real], expected[real]) <= 1e-6
    inputs["attention_mask"] = (causal(60) & real[:, None])[:, None]
    with torch.no_grad(), headscan.intervene(lm, KvWindows(plan.kept)):
        found = lm.model(ids, use_cache=False, **inputs).logits
    assert error(found[real], expected[real]) <= 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("change", ["repeat", "reorder", "select", "crop"])
def test_padding_stays_when_rows_change(seed: int, change: str) -> None:
    lm, ids, draw = make_loaded("llama", dtype=torch.float64), some_ids(3, 60), random.Random(seed)
    plan, real = random_plan(lm, (NARROW, WIDE, FULL), seed), random_padding(seed, 3, 60)
    rows, cache = [0, 1, 2], PlanCache(plan)
    in_chunks(lm, cache, ids[:, :40], random_chunks(seed, 40), **inputs_of(real[:, :40]))
    if change == "repeat":
        cache.batch_repeat_interleave(2)
        rows = [0, 0, 1, 1, 2, 2]
    elif change == "reorder":
        rows = draw.choices(range(3), k=3)
        cache.reorder_cache(torch.tensor(rows))
    elif change == "select":
        rows = [2, 0]
        cache.batch_select_indices(torch.tensor(rows))
    else:
        cache.activate_past_recording()
        more = torch.cat([real[:, :40], random_padding(seed + 1, 3, 12)], 1)
        in_chunks(lm, cache, ids, (4, 1, 7) if seed % 2 else (1, 1, 1, 9), first=40, **inputs_of(more))
        cache.crop(-12)
    ids, real = ids[rows], real[rows]
    expected = explicit_logits(lm, plan, ids, causal(60) & real[:, None], text_index(real))
    found = in_chunks(lm, cache, ids, (1, 1, 13, 5), first=40, **inputs_of(real))
    assert error(found[real[:, 40:]], expected[:, 40:][real[:, 40:]]) <= 1e-6


def test_a_prefix_serves_a_batch_of_questions_that_are_padded_on_the_left() -> None:
    lm, prefix, asked = make_loaded("llama", dtype=torch.float64), some_ids(1, 30), some_ids(3, 15)
    cache = PlanCache(PLAN)
    with torch.inference_mode():
        lm.model(prefix, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    real = torch.ones(3, 45, dtype=torch.bool)
    real[1, 30:38] = real[2, 30:42] = False
    ids = torch.cat([prefix.expand(3, -1), asked], 1)
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
    found = lm.model.generate(ids, attention_mask=real.long(), past_key_values=cache, **options)
    for row in range(3):
        alone = ids[row : row + 1, real[row]]
        alone_out = lm.model.generate(
            alone, attention_mask=torch.ones_like(alone), past_key_values=PlanCache(PLAN), **options
        )
        assert torch.equal(found[row, 45:], alone_out[0, alone.shape[1] :])


def documents(*sizes: int) -> Tensor:
    """Return the mask (N, N) of documents in a row."""
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return causal(len(document)) & (document[:, None] == document)


def prefix_lm(*sizes: int) -> Tensor:
    """Return the mask (N, N) of documents in a row whose first half is seen by the whole document."""
    mask, first = documents(*sizes), 0
    for size in sizes:
        mask[first : first + size, first : first + size // 2] = True
        first += size
    return mask


def one_hole() -> Tensor:
    mask = causal(40)
    mask[30, 10] = False
    return mask


def band(width: int) -> Tensor:
    return causal(40) & ~causal(40).tril(-width)


FORMS = {"bool": None, "min": torch.finfo(torch.float32).min, "-inf": float("-inf"), "-1e9": -1e9, "half": -1e38}


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        *((form, [documents(20, 20)]) for form in FORMS),
        *(
            ("min", rows)
            for rows in [
                [documents(2, 38)],
                [documents(39, 1)],
                [documents(10, 10, 10, 10)],
                [documents(1, 1, 38), documents(20, 20)],
                [documents(40), documents(25, 15)],
                [documents(5, 35), documents(12, 28)],
                [torch.block_diag(torch.zeros(6, 6), documents(14, 20)).bool()],
                [prefix_lm(40)],
                [prefix_lm(20, 20)],
                [one_hole()],
                [band(30)],
            ]
        ),
    ],
)
def test_other_masks_are_refused(rows: list[Tensor], form: str) -> None:
    lm, ids = make_loaded("llama"), some_ids(len(rows), 40)
    seen = torch.stack(rows)[:, None]
    mask = seen
    if form != "bool":
        mask = torch.zeros(seen.shape).masked_fill(~seen, FORMS[form])
    positions = {} if form == "bool" else {"position_ids": torch.arange(40)[None] % 20}
    windows = KvWindows(PLAN.kept)
    refused = partial(pytest.raises, UnsupportedModelError, match="not causal with the same hidden tokens")
    with torch.no_grad(), refused():
        lm.model(ids, attention_mask=mask, past_key_values=PlanCache(PLAN), **positions)
    with torch.no_grad(), headscan.intervene(lm, windows), refused():
        lm.model(ids, attention_mask=mask, use_cache=False, **positions)


def test_a_document_may_not_begin_in_a_later_pass() -> None:
    lm, ids, mask = make_loaded("llama"), some_ids(1, 40), documents(20, 20)[None, None]
    cache = PlanCache(PLAN)
    with torch.no_grad():
        lm.model(ids[:, :20], past_key_values=cache)
        with pytest.raises(UnsupportedModelError, match="hides other tokens before token 20 than"):
            lm.model(ids[:, 20:], attention_mask=mask[:, :, 20:], past_key_values=cache)


def test_documents_of_one_token_before_the_text_see_themselves() -> None:
    lm, ids = make_loaded("llama", dtype=torch.float64), some_ids(1, 40)
    mask = documents(1, 1, 38)[None, None]
    position = torch.arange(40)[None] - 2
    with torch.no_grad():
        found = lm.model(
            ids, attention_mask=mask, position_ids=position.clamp_min(0), past_key_values=PlanCache(PLAN)
        ).logits
    expected = explicit_logits(lm, PLAN, ids, mask[:, 0], position)
    assert error(found, expected) <= 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_masks_of_their_own_for_each_head(seed: int) -> None:
    """A single token may see other keys in each head, by a bool mask as by an additive one."""
    lm, ids = make_loaded("llama", dtype=torch.float64), some_ids(2, 30)
    heads = lm.model.config.num_attention_heads
    torch.manual_seed(seed)
    seen = torch.rand(2, heads, 1, 30) > 0.4
    seen[..., -1] = True
    additive = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    logits = []
    for mask in (seen, additive):
        cache = PlanCache(random_plan(lm, (NARROW, FULL, WIDE), seed))
        in_chunks(lm, cache, ids[:, :-1], (29,))
        with torch.no_grad():
            logits.append(lm.model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits)
    assert error(logits[0], logits[1]) <= 1e-6


def padded() -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, ..., :3] = False
    return mask


def test_a_mask_dies_with_the_pass() -> None:
    reader, mask = MaskReader(), padded()
    first = reader.read(mask, place=True)
    assert reader.read(mask, place=True) is first and first.real_BS is not None
    assert first.real_BS.sum(1).tolist() == [6, 3]
    gone = ref(mask)
    del mask, first
    gc.collect()
    assert gone() is None and reader._placed is None


@pytest.mark.parametrize("same", [True, False])
def test_copies_on_other_devices_are_not_read_again(same: bool) -> None:
    reader, mask = MaskReader(same=same), padded()
    reader.read(mask, place=True)
    copy = mask.to("meta")  # reading its numbers fails
    if not same:
        with pytest.raises(RuntimeError):
            reader.read(copy, place=True)
        return
    found = reader.read(copy, place=True)
    assert found.gaps == 0 and found.seen_BNS.device.type == found.real_BS.device.type == "meta"
    assert reader.read(mask, place=True).seen_BNS.device.type == "cpu"
