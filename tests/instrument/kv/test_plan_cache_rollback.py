"""PlanCache after removed tokens, changed rows and `reset`; plans that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_cache import PlanCache
from headscan.kv.plan_layer import PlanMixedLayer
from headscan.models.loaded_model import LoadedModel
from headscan.windows import Window
from tests.instrument.kv.cache_plans import (
    FULL,
    NARROW,
    WIDE,
    error,
    in_chunks,
    make_cache,
    oracle,
    plan_of,
    random_plan,
    some_ids,
)
from tests.small_models import make_loaded

LATE = plan_of([[FULL, FULL], [NARROW, FULL], [FULL, NARROW]])
GROUPS = (((0,), None), ((1,), Window(2, 7)))


def test_a_crop_that_a_later_layer_refuses_leaves_all_layers_as_they_were() -> None:
    lm, ids = make_loaded("llama"), some_ids(1, 60)
    cache = PlanCache(LATE)
    in_chunks(lm, cache, ids, (40,))
    with pytest.raises(PlanMismatchError, match="cannot remove 7 tokens"):
        cache.crop(-7)
    assert {layer.get_seq_length() for layer in cache.layers} == {40}
    assert error(in_chunks(lm, cache, ids[:, 40:], (1, 19)), oracle(lm, LATE, ids)[:, 40:]) <= 1e-5


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_crop_that_a_layer_of_transformers_refuses_leaves_all_layers_as_they_were(family: str) -> None:
    lm, ids = make_loaded(family), some_ids(1, 60)
    cache = make_cache(lm, random_plan(lm, [FULL]))
    in_chunks(lm, cache, ids, (60,))
    held = cache.nbytes
    with pytest.raises(PlanMismatchError, match="has freed earlier states"):
        cache.crop(-7)
    assert cache.nbytes == held


def assisted(lm: LoadedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
    ones = torch.ones_like(ids)
    return lm.model.generate(ids, attention_mask=ones, past_key_values=cache, prompt_lookup_num_tokens=4, **options)


def test_reset_ends_the_recording_of_assisted_decoding() -> None:
    lm, plan = make_loaded("llama"), plan_of([[NARROW, FULL]] * 3)
    ids, fresh, cache = some_ids(1, 10).repeat(1, 3), PlanCache(plan), PlanCache(plan)
    in_chunks(lm, fresh, ids, (20, 1, 9))
    assisted(lm, cache, ids)
    cache.reset()
    in_chunks(lm, cache, ids, (20, 1, 9))
    assert cache.nbytes == fresh.nbytes


def test_a_first_pass_with_full_keys_refuses_candidates() -> None:
    lm, ids = make_loaded("llama"), some_ids(1, 10).repeat(1, 3)
    with pytest.raises(UnsupportedModelError, match="assisted decoding with `prefill='full'`"):
        assisted(lm, PlanCache(plan_of([[NARROW, FULL]] * 3), prefill="full"), ids)
    full = assisted(lm, PlanCache(plan_of([[FULL, FULL]] * 3), prefill="full"), ids)
    assert torch.equal(full, assisted(lm, DynamicCache(config=lm.model.config), ids))


@pytest.mark.parametrize("left", [0, 5])
def test_padding_of_removed_tokens_is_forgotten(left: int) -> None:
    lm, ids, plan = make_loaded("llama"), some_ids(2, 50), plan_of([[FULL, WIDE]] * 3)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = {"attention_mask": mask, "position_ids": position}
    cache = PlanCache(plan)
    in_chunks(lm, cache, ids[:, :20], (20,), **padded)
    cache.crop(left - 20)
    if left:  # the second row is padding until token 13
        found = []
        for at in range(left, 50):
            one = {"input_ids": ids[:, at : at + 1], "position_ids": position[:, at : at + 1]}
            found.append(lm.model(**one, past_key_values=cache, attention_mask=mask[:, : at + 1]).logits)
        logits = torch.cat(found, 1)
        assert error(logits[0], oracle(lm, plan, ids[:1])[0, left:]) <= 1e-5
        assert error(logits[1, 13 - left :], oracle(lm, plan, ids[1:, 13:])[0]) <= 1e-5
    else:  # the new text has no padding
        found = in_chunks(lm, cache, ids, (1,) * 50)
        assert error(found, oracle(lm, plan, ids)) <= 1e-5


def mixed_layer() -> PlanMixedLayer:
    return PlanMixedLayer(4, "layer 0", GROUPS, "window", None, MaskReader())


def test_a_layer_with_linear_attention_has_all_its_states() -> None:
    layer = mixed_layer()
    assert layer.number_of_states == len(layer.conv_states) == len(layer.recurrent_states) == 4


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    ],
)
def test_rows_of_recurrent_states_change_with_the_keys(change: Any, rows: list[int]) -> None:
    layer, keys = mixed_layer(), torch.randn(2, 2, 3, 4)
    conv, recurrent = torch.randn(2, 5, 4), torch.randn(2, 3, 3)
    layer.update(keys, keys)
    layer.update_conv_state(conv, 3)
    layer.update_recurrent_state(recurrent, 3)
    change(layer)
    assert torch.equal(layer.conv_states[3], conv[rows])
    assert torch.equal(layer.recurrent_states[3], recurrent[rows])
    assert torch.equal(layer.held[0].keys, keys[rows, :1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "Full"}, r"`prefill='Full'` \(limit window or full\)"),
        ({"prefill": None}, r"`prefill=None` \(limit window or full\)"),
        ({"max_tokens": -1}, r"`max_tokens=-1` \(limit a whole number from 1 on, or None\)"),
        ({"max_tokens": 0}, r"`max_tokens=0` "),
        ({"max_tokens": 4.0}, r"`max_tokens=4.0` "),
        ({"max_tokens": True}, r"`max_tokens=True` "),
        ({"config": "a path"}, r"`config` is a str .* Pass `model.config`"),
        ({"config": {"hidden_size": 4}}, r"`config` is a dict "),
        ({"plan": "head_plan.json"}, r"`plan='head_plan.json'` is a str, no plan. Read its file with"),
        ({"plan": Path("head_plan.json")}, r"is a \w*Path, no plan"),
        ({"plan": {"heads": []}}, r"is a dict, no plan"),
        ({"plan": None}, r"is a NoneType, no plan"),
        ({"plan": [(0, 1)]}, r"is a list, no plan"),
        ({"plan": SimpleNamespace(kept="full")}, r"is a SimpleNamespace, no plan"),
    ],
)
def test_arguments_of_a_wrong_kind(options: dict[str, Any], message: str) -> None:
    arguments = {"plan": plan_of([[NARROW, FULL]] * 3), **options}
    with pytest.raises(PlanMismatchError, match=message) as caught:
        PlanCache(**arguments)
    assert "\n" not in str(caught.value)
