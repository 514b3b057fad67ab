"""PlanCache holds the bytes that its plan promises, peaks included, and refuses plans of other models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from headscan.attention import cache_attention
from headscan.attention.cache_attention import CachedHeads
from headscan.attention.discovery import discover
from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.plan_cache import PlanCache
from headscan.models.loaded_model import LoadedModel
from headscan.plans.head_plan import layer_bytes
from headscan.plans.plan_records import PlannedLayer, PlannedModel
from tests.benchmarks.overhead import peak_bytes
from tests.instrument.kv.cache_plans import (
    DROP,
    FULL,
    NARROW,
    WIDE,
    PlainHead,
    PlainPlan,
    greedily,
    in_chunks,
    make_cache,
    plan_of,
    random_plan,
    some_ids,
)
from tests.small_models import make_loaded


@pytest.mark.parametrize("tokens", [1, 5, 24, 60, 300])
def test_bytes_are_those_of_the_plan(tokens: int) -> None:
    lm = make_loaded("llama-mha")
    plan = random_plan(lm)
    site = lm.grid.sites[0]
    cache = PlanCache(plan)
    in_chunks(lm, cache, some_ids(2, tokens), (tokens - tokens // 3, *([1] * (tokens // 3))))
    token_bytes = 4 * (site.head_dim + site.value_dim)
    assert cache.nbytes == plan.bytes(2, tokens, token_bytes)
    K = site.num_key_value_heads
    layers = tuple(
        PlannedLayer(at, "full", 6, K, site.head_dim, site.value_dim, None, K * token_bytes, None, token_bytes, None)
        for at in range(3)
    )
    model = PlannedModel("llama", None, None, None, 3, "float32", layers)
    windows = {(head.layer, head.kv_head): None for head in plan.heads}
    windows |= {(layer, kv_head): window for layer, kv_head, window in plan.kept.windows}
    assert cache.nbytes == 2 * sum(layer_bytes(model, windows, tokens).values())


def test_allocated_bytes_are_those_of_the_plan() -> None:
    lm = make_loaded("llama-mha")
    plan, site = random_plan(lm), lm.grid.sites[0]
    cache = PlanCache(plan, max_tokens=500)
    in_chunks(lm, cache, some_ids(1, 500), (100, *([1] * 400)))
    expected = plan.bytes(1, 500, 4 * (site.head_dim + site.value_dim))
    assert cache.nbytes == expected <= cache.allocated_bytes <= 1.01 * expected


@pytest.mark.parametrize("window", [(4, 10**12), (10**12, 4), (700, 10**15)])
@pytest.mark.parametrize("pad", [0, 9])
def test_a_window_wider_than_the_text_costs_what_the_text_needs(window: tuple[int, int], pad: int) -> None:
    lm, ids = make_loaded("llama"), some_ids(2, 600)
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    logits = []
    for kinds in (("window", *window), FULL):
        cache = PlanCache(plan_of([[kinds, FULL]] * 3))
        more = {"attention_mask": mask, "position_ids": position}
        logits.append(in_chunks(lm, cache, ids, (3, 1, 1, 250, 1, 1, 300, *[1] * 43), **more))
        assert cache.allocated_bytes <= 768 * 2 * 6 * 2 * 4 * lm.grid.sites[0].head_dim
    torch.testing.assert_close(logits[0][0], logits[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[0][1, pad:], logits[1][1, pad:], atol=1e-5, rtol=0)


def test_numbers_of_any_size_in_a_plan_cost_no_memory() -> None:
    with pytest.raises(PlanMismatchError, match=r"recent 100000000000000000000 \(limit 9007199254740992 together"):
        PlanCache(plan_of([[("window", 4, 10**20)]]))
    with pytest.raises(PlanMismatchError, match="no entry for layer 0"):
        PlanCache(PlainPlan((PlainHead(10**9, 0, *FULL),)))


def test_layers_that_are_already_bounded_count_as_in_transformers_cache() -> None:
    lm, ids = make_loaded("gemma3"), some_ids(1, 70)
    cache, whole = make_cache(lm, random_plan(lm, [FULL])), DynamicCache(config=lm.model.config)
    for each in (cache, whole):
        in_chunks(lm, each, ids, (40, *([1] * 30)))  # type: ignore[arg-type]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)  # type: ignore[union-attr]
    assert cache.nbytes == held


@torch.no_grad()
def test_the_peak_is_the_plan_and_one_layers_chunk() -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval()
    lm = LoadedModel(model, None, discover(model), "peak")
    steps, chunk, token_bytes = 16, 64, 4 * 2 * 64
    tokens = 15 * chunk + steps
    ids = torch.randint(0, 16, (1, tokens))

    def peak(plan: PlainPlan) -> int:
        cache = PlanCache(plan, max_tokens=tokens)
        sizes = (*[chunk] * 15, *[1] * steps)
        return peak_bytes(lm, lambda: [in_chunks(lm, cache, *pair) for pair in pairs(ids, sizes)])

    def pairs(ids: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, tuple[int]]]:
        first = 0
        for size in sizes:
            yield ids[:, first : first + size], (size,)
            first += size

    plan = plan_of([[FULL, WIDE, DROP, NARROW], [NARROW, FULL, FULL, WIDE], [FULL, WIDE, FULL, NARROW]] * 2)
    expected, one_chunk = plan.bytes(1, tokens, token_bytes), 4 * chunk * token_bytes
    # The same pass with nothing in the cache shows the activations of the rest of the model.
    found = peak(plan) - peak(plan_of([[DROP] * 4] * 6))
    # In one layer at a time: the chunk's keys and values in the order of the groups, as many bytes of queries and
    # outputs, and the keys of a window with the chunk's.
    assert found <= 1.01 * expected + 4 * one_chunk


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([[FULL, NARROW]] * 2, r"the model caches layer 2 \(limit 1"),
        ([[FULL, NARROW, FULL]] * 3, r"layer 0 caches 2 heads \(limit 3"),
        ([[NARROW]] * 3, r"layer 0 caches 2 heads \(limit 1"),
    ],
)
def test_a_plan_of_another_model(rows: list[Any], match: str) -> None:
    lm = make_loaded("llama")
    with pytest.raises(PlanMismatchError, match=match):
        greedily(lm, PlanCache(plan_of(rows)), some_ids(1, 8), 2)


def test_a_plan_of_a_deeper_model() -> None:
    lm = make_loaded("llama")
    with pytest.raises(PlanMismatchError, match="layer 3 of the plan"):
        PlanCache(plan_of([[FULL, NARROW]] * 4), config=lm.model.config)
    with pytest.raises(PlanMismatchError, match="layer 3 of the plan has no keys"):
        greedily(lm, PlanCache(plan_of([[FULL, NARROW]] * 4)), some_ids(1, 8), 2)


def test_windows_in_layers_that_are_already_bounded() -> None:
    lm = make_loaded("gemma3")
    with pytest.raises(PlanMismatchError, match=r"layer 0 of the plan has windows, but the layer has a Dynamic"):
        PlanCache(plan_of([[NARROW, FULL]] * 3), config=lm.model.config)


def test_a_plan_without_all_layers_needs_the_configuration() -> None:
    plan = PlainPlan((PlainHead(0, 0, *FULL), PlainHead(2, 0, *NARROW)))
    with pytest.raises(PlanMismatchError, match=r"no entry for layer 1.* as `config`"):
        PlanCache(plan)


def test_keys_that_other_layers_read_cannot_have_windows() -> None:
    lm = make_loaded("gemma4")
    plan = plan_of([[FULL] * 2, [NARROW] * lm.grid.site_of(1).num_key_value_heads])
    cache = PlanCache(plan, config=lm.model.config)
    with pytest.raises(UnsupportedModelError, match="the keys of layer 1 are read twice"):
        greedily(lm, cache, some_ids(1, 30), 2)


def test_offloading_and_train_mode_are_refused() -> None:
    lm = make_loaded("llama")
    cache = PlanCache(plan_of([[FULL, NARROW]] * 3))
    for call in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(UnsupportedModelError, match="is not offloaded"):
            call()
    lm.model.train()
    for module in lm.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with pytest.raises(UnsupportedModelError, match=r"dropout 0.5 \(limit 0\)"):
        greedily(lm, cache, some_ids(1, 8), 1)


@pytest.mark.parametrize(("dropout", "match"), [(0.5, r"dropout 0.5 \(limit 0\)"), (0.0, "to later tokens")])
def test_learned_sinks_need_causal_attention_without_dropout(dropout: float, match: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match=match):
        cache_attention._forward(torch.nn.Module(), x, x, x, None, dropout, is_causal=False, s_aux=torch.ones(2))


def test_cached_heads_have_no_numbers() -> None:
    class Source:
        queries, tokens = 2, 5

        def attend(self, query: torch.Tensor, *args: Any) -> torch.Tensor:
            return query

    heads = CachedHeads.of(Source(), (1, 2, 5, 4), torch.float32, torch.device("cpu"))
    other = CachedHeads.of(Source(), (1, 2, 5, 4), torch.float32, torch.device("cpu"))
    query = torch.ones(1, 4, 2, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    repeated = heads[:, :, None].expand(1, 2, 2, 5, 4).reshape(1, 4, 5, 4)
    assert repeated.shape == (1, 4, 5, 4) and repeated.dtype == torch.float32
    assert torch.equal(attend(query, repeated, repeated, is_causal=True), query)
    for wrong, match in (
        (lambda: heads + 1, "applies add to cached keys"),
        (lambda: heads.transpose(1, 2), "applies transpose to cached keys"),
        (lambda: attend(query, heads, other, is_causal=True), "come from different caches"),
        (lambda: attend(query, heads, heads), "attention to later tokens"),
        (lambda: heads[:, :, :3], "applies __getitem__ to cached keys"),
        (lambda: heads[0], "applies __getitem__ to cached keys"),
        (lambda: attend(query, heads.expand(3, 2, 5, 4), heads, is_causal=True), "arrive at the attention as"),
        (lambda: attend(query, heads, heads.view(1, 1, 5, 8), is_causal=True), "arrive at the attention as"),
        (lambda: attend(query, heads, heads.view(1, 5, 2, 4), is_causal=True), "arrive at the attention as"),
        (lambda: attend(query, heads.view(1, 2, 10, 2), heads, is_causal=True), "arrive at the attention as"),
    ):
        with pytest.raises(UnsupportedModelError, match=match):
            wrong()
