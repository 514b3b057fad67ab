"""PlanCache equals an oracle that keeps all keys and masks them per head, in every architecture that it supports."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from headscan.architectures import FAMILIES
from headscan.errors import HeadscanError, PlanMismatchError, UnsupportedModelError
from headscan.kv.plan_cache import PlanCache
from tests.benchmarks.bench_cache import CacheLoad, fill, half_windows, held_bytes
from tests.benchmarks.overhead import make_model
from tests.devices import assert_near, on
from tests.instrument.kv.cache_plans import FULL, error, greedily, in_chunks, make_cache, oracle, random_plan, some_ids
from tests.small_models import make_loaded, slow

#: Largest error of the logits, relative to the largest one.
BOUND = 1e-5
#: The same on a GPU, and the mean error of bfloat16 in units of its epsilon: both ways round differently.
GPU_BOUND, HALF_BOUND = 3e-5, 4
#: Decoding with transformers' own cache differs from one pass by this much in these models.
LOOSE = {"nemotron_h": 2e-3, "qwen3_next": 1e-4, "qwen3_5": 1e-4}
#: Why a family takes no windows.
REFUSED = {
    "deepseek_v2": "caches 1 heads",
    "deepseek_v3": "caches 1 heads",
    "minicpm3": "caches 1 heads",
    "falcon-gqa": "caches 6 heads",
    "gpt_neo": "applies",
    "gptj": "applies",
    "codegen": "applies",
    "bloom": "applies",
    "mpt": "applies",
    "xglm": "applies",
}
#: Recurrent layers that continue from a state only token by token.
STEPWISE = {"jamba", "bamba", "nemotron_h"}
#: transformers' own cache does not reproduce one pass of these.
BROKEN = {"bamba"}
WORKING = [name for name in FAMILIES if name not in REFUSED and name not in BROKEN]
#: GQA, MHA, MQA, q/k norms, biases, partial rotary, gates, several value widths, linear attention, Mamba, sliding
#: layers, learned sinks, soft caps, ALiBi, shared keys, both kinds in one layer, and a model inside another.
FEW = (
    "llama llama-mha llama-mqa-wide qwen2 qwen3 stablelm gpt2 qwen3_next jamba falcon_h1 gemma3 gemma2-softcap gpt_oss"
    " mimo_v2_flash falcon-alibi gemma3n llava"
).split()
SLOW = slow(*(name for name in WORKING if name not in FEW))


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FEW, *SLOW])
def test_greedy_decoding_and_chunks_equal_the_oracle(family: str, device: torch.device) -> None:
    lm, plan = on(device, make_loaded(family)), random_plan(make_loaded(family))
    bound = max(BOUND if device.type == "cpu" else GPU_BOUND, LOOSE.get(family, 0.0))
    ids, logits = greedily(lm, make_cache(lm, plan), some_ids(2, 40).to(device), 8)
    assert error(logits, oracle(lm, plan, ids[:, :-1])) <= bound
    if family not in STEPWISE:
        ids, plan = some_ids(2, 60).to(device), random_plan(lm, seed=1)
        logits = in_chunks(lm, make_cache(lm, plan), ids, (3, 30, 1, 1, 17, 8))
        assert error(logits, oracle(lm, plan, ids)) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", "llama gpt_oss llama-mha llama-mqa-wide gemma2-softcap gemma3 mimo_v2_flash qwen3 falcon-mqa".split()
)
def test_padded_chunks_equal_the_oracle(family: str, dtype: torch.dtype, device: torch.device) -> None:
    """The second sequence starts later, and must not notice."""
    lm, ids, pad = on(device, make_loaded(family, dtype=dtype)), some_ids(2, 50).to(device), 9
    plan, mask = random_plan(lm, seed=1), torch.ones_like(ids)
    expected = oracle(lm, plan, ids)
    mask[1, :pad] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    shifted = torch.cat([ids[:1], ids[1:].roll(pad, 1)])
    found = in_chunks(lm, make_cache(lm, plan), shifted, (30, 1, 1, 17, 1), **inputs)
    half = dtype == torch.bfloat16
    bound = HALF_BOUND * torch.finfo(dtype).eps if half else GPU_BOUND
    assert_near(found[0], expected[0], bound, "whole row", mean=half)
    assert_near(found[1, pad:], expected[1, :-pad], bound, "padded row", mean=half)


@pytest.mark.gpu
def test_a_device_allocates_the_bytes_of_the_plan(device: torch.device) -> None:
    """Half of the KV heads are windows; on a GPU its allocator counts the bytes."""
    gpu = device.type == "cuda"
    load = CacheLoad("8B", 4, 32768, 1, 32, "bfloat16") if gpu else CacheLoad("1B", 1, 1024, 1, 2, "float32")
    lm = make_model(load.shape, load.tokens, str(device), getattr(torch, load.dtype), load.layers)
    plan, site = half_windows(lm), lm.grid.sites[0]
    expected = plan.bytes(load.rows, load.tokens, (site.head_dim + site.value_dim) * lm.model.dtype.itemsize)
    before = torch.cuda.memory_allocated(device) if gpu else 0
    cache = PlanCache(plan, max_tokens=load.tokens)
    fill(cache, lm, load, load.tokens)
    allocated = torch.cuda.memory_allocated(device) - before if gpu else cache.allocated_bytes
    assert held_bytes(cache) == pytest.approx(expected, rel=0.01)
    assert allocated == pytest.approx(expected, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FEW, *SLOW])
def test_full_heads_equal_transformers_cache(family: str, device: torch.device) -> None:
    lm, ids = on(device, make_loaded(family)), some_ids(2, 30).to(device)
    ours = greedily(lm, make_cache(lm, random_plan(lm, [FULL])), ids, 8)
    theirs = greedily(lm, DynamicCache(config=lm.model.config.get_text_config(decoder=True)), ids, 8)  # type: ignore[arg-type]
    assert torch.equal(ours[0], theirs[0])
    assert error(ours[1], theirs[1]) <= (1e-6 if device.type == "cpu" else GPU_BOUND)


@pytest.mark.parametrize("family", REFUSED)
def test_other_models_are_refused(family: str) -> None:
    lm = make_loaded(family)
    with pytest.raises(HeadscanError, match=REFUSED[family]) as caught:
        greedily(lm, PlanCache(random_plan(lm)), some_ids(1, 30), 2)
    assert isinstance(caught.value, PlanMismatchError if "caches" in REFUSED[family] else UnsupportedModelError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["gemma2-softcap", "gpt_oss"])
def test_a_model_without_sdpa_learns_the_remedy(family: str) -> None:
    lm = make_loaded(family)
    config = lm.model.config
    with pytest.raises(UnsupportedModelError, match=r"set_attn_implementation\('headscan-cache'\)"):
        greedily(lm, PlanCache(random_plan(lm), config=config), some_ids(1, 30), 2)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2-softcap", "gpt_oss", "qwen3_next"])
def test_the_attention_function_of_caches_equals_the_models_own(family: str) -> None:
    lm, ids = make_loaded(family), some_ids(2, 40)
    with torch.no_grad():
        expected = lm.model(input_ids=ids, use_cache=False).logits
        PlanCache(random_plan(lm), config=lm.model.config)  # registers the function
        lm.model.set_attn_implementation("headscan-cache")
        found = lm.model(input_ids=ids, use_cache=False).logits
    assert error(found, expected) <= BOUND
