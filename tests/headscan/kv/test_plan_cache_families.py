"""PlanCache equals an oracle that keeps all keys and masks them per head, in every architecture that it supports."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from headscan.errors import HeadscanError, PlanMismatchError, UnsupportedModelError
from headscan.kv.plan_cache import PlanCache
from headscan.testing.decoders import FAMILIES
from headscan.testing.family import VOCABULARY
from tests.headscan.kv.cache_plans import FULL, error, greedily, in_chunks, make_cache, oracle, random_plan
from tests.small_models import make_loaded

#: Largest error of the logits, relative to the largest one.
BOUND = 1e-5
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
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in WORKING if name not in FEW]


def some_ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("family", [*FEW, *SLOW])
def test_greedy_decoding_equals_the_oracle(family: str) -> None:
    lm = make_loaded(family)
    plan = random_plan(lm)
    ids, logits = greedily(lm, make_cache(lm, plan), some_ids(2, 40), 16)
    assert error(logits, oracle(lm, plan, ids[:, :-1])) <= LOOSE.get(family, BOUND)


@pytest.mark.parametrize("family", [*FEW, *SLOW])
def test_chunks_equal_the_oracle(family: str) -> None:
    if family in STEPWISE:
        pytest.skip("its recurrent layers continue token by token only")
    lm, ids = make_loaded(family), some_ids(2, 60)
    plan = random_plan(lm, seed=1)
    logits = in_chunks(lm, make_cache(lm, plan), ids, (3, 30, 1, 1, 17, 8))
    assert error(logits, oracle(lm, plan, ids)) <= LOOSE.get(family, BOUND)


@pytest.mark.parametrize("family", [*FEW, *SLOW])
def test_full_heads_equal_transformers_cache(family: str) -> None:
    lm, ids = make_loaded(family), some_ids(2, 30)
    ours = greedily(lm, make_cache(lm, random_plan(lm, [FULL])), ids, 8)
    theirs = greedily(lm, DynamicCache(config=lm.model.config.get_text_config(decoder=True)), ids, 8)  # type: ignore[arg-type]
    assert torch.equal(ours[0], theirs[0])
    assert error(ours[1], theirs[1]) <= 1e-6


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
