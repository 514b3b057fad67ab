"""Models without some heads compute what the original computes with these heads zeroed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import headscan
from headscan import HeadMask, LoadedModel
from headscan.architectures import VOCABULARY
from tests.devices import on
from tests.small_models import make_loaded

#: Families whose layouts differ: separate, fused and interleaved projections, norms, sinks, position biases.
FAST = ("llama", "gpt2", "qwen3", "gpt_neox", "bloom", "phi3", "falcon-mqa")


def prompts(rows: int = 2, tokens: int = 11) -> Tensor:
    return torch.randint(5, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(3))


def heads_of_layer(lm: LoadedModel, layer: int) -> list[tuple[int, int]]:
    return [(layer, head) for head in range(lm.grid.site_of(layer).num_attention_heads)]


def free_choice(lm: LoadedModel, seed: int) -> list[tuple[int, int]]:
    """Heads of several layers, at least one of each layer remains."""
    chosen = random.Random(seed)
    return [
        (site.layer, head)
        for site in lm.grid.sites
        for head in chosen.sample(range(site.num_attention_heads), chosen.randrange(1, site.num_attention_heads))
    ]


def equal_groups(lm: LoadedModel) -> list[tuple[int, int]]:
    """The last query head of each group, or of a layer with one head a group the first two."""
    found = []
    for site in lm.grid.sites:
        sizes = site.group_sizes
        last = [head for head, kv in enumerate(site.kv_head_of) if site.kv_head_of[head + 1 : head + 2] != (kv,)]
        found += [(site.layer, head) for head in (last if min(sizes) > 1 else (0, 1))]
    return found


def whole_group(lm: LoadedModel) -> list[tuple[int, int]]:
    """The query heads of the first KV head, in every layer with several."""
    return [
        (site.layer, head)
        for site in lm.grid.sites
        if site.num_key_value_heads > 1
        for head, kv_head in enumerate(site.kv_head_of)
        if kv_head == 0
    ]


def assert_equals_zeroing(lm: LoadedModel, removed: list[tuple[int, int]]) -> LoadedModel:
    """Compare logits without a cache, and of greedy decoding with a dynamic and, where there is one, a static cache."""
    ids = prompts().to(lm.device)
    sliced = headscan.slice_heads(lm, removed)
    with torch.no_grad(), headscan.intervene(lm, HeadMask(removed)):
        want = lm.model(input_ids=ids, use_cache=False).logits
        decoded = generate(lm, ids)
    with torch.no_grad():
        close(sliced.model(input_ids=ids, use_cache=False).logits, want)
        close(generate(sliced, ids), decoded)
        if has_static_cache(lm):
            close(generate(sliced, ids, past_key_values=static_cache(sliced)), decoded)
    return sliced


def static_cache(lm: LoadedModel) -> StaticCache:
    return StaticCache(config=lm.model.config, max_cache_len=40)


def has_static_cache(lm: LoadedModel) -> bool:
    """True if the original model decodes with a static cache as with a dynamic one."""
    try:
        found = generate(lm, prompts().to(lm.device), past_key_values=static_cache(lm))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return torch.allclose(found, generate(lm, prompts().to(lm.device)), atol=1e-4)


def generate(lm: LoadedModel, ids: Tensor, **more: object) -> Tensor:
    """Logits of greedy decoding (N, B, vocabulary)."""
    found = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        pad_token_id=1,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
        **more,
    )
    return torch.stack(found.logits)


def close(found: Tensor, want: Tensor) -> None:
    assert found.shape == want.shape
    assert float((found - want).abs().max() / want.abs().max()) < (1e-5 if want.device.type == "cpu" else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAST)
def test_a_free_choice_of_heads_and_all_of_a_layer(name: str, device: torch.device) -> None:
    lm = on(device, make_loaded(name))
    assert_equals_zeroing(lm, free_choice(lm, 1))
    for layer in (0, 2) if name == "llama" else (FAST.index(name) % 3,):
        sliced = assert_equals_zeroing(lm, heads_of_layer(lm, layer))
        assert sliced.grid.layers_without_heads == (layer,)


def test_whole_groups_and_equal_groups_need_no_index() -> None:
    lm = make_loaded("llama")
    for removed, heads, kv_heads in ((whole_group(lm), 3, 1), (equal_groups(lm), 4, 2)):
        sliced = assert_equals_zeroing(lm, removed)
        assert {(s.num_attention_heads, s.num_key_value_heads, s.kv_index) for s in sliced.grid.sites} == {
            (heads, kv_heads, None)
        }


def test_slicing_twice_equals_slicing_once() -> None:
    lm = make_loaded("llama")
    once = headscan.slice_heads(lm, [(0, 1), (1, 0), (1, 1), (1, 2), (2, 3), (2, 4)])
    first = headscan.slice_heads(lm, [(0, 1), (1, 0), (1, 2), (2, 3)])
    # Heads count among those that are left: head 1 of layer 1 is the first one now, head 4 of layer 2 the fourth.
    twice = headscan.slice_heads(first, [(1, 0), (2, 3)])
    assert twice.grid == once.grid
    assert twice.model.config.to_dict() == once.model.config.to_dict()
    for name, weight in once.model.state_dict().items():
        assert torch.equal(weight, twice.model.state_dict()[name]), name


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "jamba"])
def test_longer_texts_in_padded_batches_with_beams(name: str) -> None:
    lm = make_loaded(name)
    removed = [*heads_of_layer(lm, 0), *free_choice(lm, 1)]
    ids = prompts(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    with headscan.intervene(lm, HeadMask(removed)):
        want = lm.model.generate(ids, **options)
    assert torch.equal(headscan.slice_heads(lm, removed).model.generate(ids, **options), want)


def test_functions_of_flash_attention_get_gathered_keys_and_their_own_name() -> None:
    seen = []

    def fake(module, query, key, value, attention_mask, **kwargs):  # type: ignore[no-untyped-def]
        seen.append((module.config._attn_implementation, module.num_key_value_groups, query.shape[1] // key.shape[1]))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("flash-of-test", fake)
    lm = make_loaded("llama")
    sliced = headscan.slice_heads(lm, [(0, 0), (0, 1), (1, 3), (1, 4), (1, 5)])
    want = sliced.model(input_ids=prompts()).logits
    sliced.model.config._attn_implementation = "flash-of-test"
    close(sliced.model(input_ids=prompts()).logits, want)
    assert seen == [("flash-of-test", 1, 1), ("flash-of-test", 3, 3), ("flash-of-test", 3, 3)]
