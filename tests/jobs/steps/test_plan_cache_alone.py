"""A cache from a plan alone equals one that also gets the configuration of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

import headscan
from headscan.errors import PlanMismatchError
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, load_plan
from tests.instrument.kv.cache_plans import greedily, some_ids
from tests.jobs.conftest import make_tokenizer
from tests.jobs.steps.kv_plans import model_of, plan_for
from tests.small_models import make_model


def model_and_plan(family: str, folder: Path) -> tuple[LoadedModel, HeadPlan]:
    make_model(family, vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    spec = ModelSpec(str(folder), "float32")
    lm = headscan.load(folder, device="cpu", dtype="float32")
    return lm, load_plan(plan_for(model_of(spec, lm), 2, recent=7).save(folder / "plan.json"))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mimo_v2_flash"])
def test_a_plan_knows_the_layers_of_its_model(family: str, tmp_path: Path) -> None:
    lm, plan = model_and_plan(family, tmp_path)
    ids = some_ids(2, 40)
    config = lm.model.config.get_text_config(decoder=True)
    alone, both = headscan.PlanCache(plan), headscan.PlanCache(plan, config)
    if lm.model.config._attn_implementation == "eager":
        lm.model.set_attn_implementation("headscan-cache")
    assert [type(layer) for layer in alone.layers] == [type(layer) for layer in both.layers]
    assert any(isinstance(layer, DynamicSlidingWindowLayer) for layer in alone.layers) == (family != "llama")
    found, expected = greedily(lm, alone, ids, 6), greedily(lm, both, ids, 6)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert alone.nbytes == both.nbytes


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3n"])
def test_layers_that_a_plan_does_not_describe_need_the_configuration(family: str, tmp_path: Path) -> None:
    lm, plan = model_and_plan(family, tmp_path)
    with pytest.raises(PlanMismatchError, match=r"no entry for layer \d+, .* Pass its configuration as `config`"):
        headscan.PlanCache(plan)
    config = lm.model.config.get_text_config(decoder=True)
    assert greedily(lm, headscan.PlanCache(plan, config), some_ids(1, 20), 2)[0].shape == (1, 22)


def test_windows_without_the_numbers_of_kv_heads_make_no_cache() -> None:
    kept = headscan.KeptKeys.of([(0, 0, headscan.Window(1, 3))])
    for counts in (None, {}, {1: 2}, {0: 0, 1: 2}):
        with pytest.raises(PlanMismatchError, match="number of KV heads of layer 0 is unknown"):
            headscan.PlanCache(headscan.KeptKeys.of(kept.windows, counts))
    for wrong in (-1, "2", 2.0):
        with pytest.raises(PlanMismatchError, match=r"`kv_heads` of layer 0 is .* \(limit a whole number"):
            headscan.PlanCache(headscan.KeptKeys.of(kept.windows, {0: wrong}))  # type: ignore[dict-item]
    assert len(headscan.PlanCache(headscan.KeptKeys.of(kept.windows, {0: 2, 1: 2})).layers) == 2
