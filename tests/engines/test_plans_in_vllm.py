"""Plans by KV head in vLLM against explicit masks in transformers, under all that a server does.

The folder of the engines' environments (``make engines``) is ``.engines``, or that of the variable HEADSCAN_ENGINES.
"""

from __future__ import annotations

import inspect
import os
import random
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

import headscan
from headscan.pipelines.export.vllm_overrides import vllm_overrides
from tests.engines.check_plans import ask
from tests.engines.plan_masks import MaskedModel, difference
from tests.pipelines.export.test_vllm_overrides import plan_of

_ENGINES = Path(os.environ.get("HEADSCAN_ENGINES", ".engines"))
_NEW = 48
#: Limit of the difference of a log-probability.
_LIMIT = 1e-4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_plan_is_exact_under_every_schedule(tmp_path: Path) -> None:
    if not (_ENGINES / "vllm/bin/python").exists():
        pytest.skip(f"no environment of vLLM in {_ENGINES}")
    lm = headscan.load("demo", device="cpu", dtype="float32")
    lm.model.save_pretrained(tmp_path / "model")
    lm.require_tokenizer().save_pretrained(tmp_path / "model")
    heads = set(random.Random(5).sample([(layer, head) for layer in range(6) for head in range(4)], 12))
    fields = vllm_overrides(plan_of(lm, heads, sink=4, recent=40), lm.model.config, "demo").fields
    ids = lm.require_tokenizer()(inspect.getsource(ArgumentParser)).input_ids
    prompts = [ids[:400], ids[1000:1150], ids[2000:2060], ids[:330] + ids[3000:3050]]
    sampling = {"max_tokens": _NEW, "logprobs": 20}
    one_by_one = {"prompts": prompts, "sampling": sampling, "together": False}
    together = {"prompts": prompts, "sampling": sampling}
    repeated = {"prompts": prompts + prompts, "sampling": sampling | {"max_tokens": _NEW}}
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    of_engine: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
        "plain": ({}, [one_by_one, together]),
        "chunks of 64 tokens": ({"max_num_batched_tokens": 64}, [together]),
        "preemption": ({"num_gpu_blocks_override": 42}, [repeated]),
        "prefix cache": ({"enable_prefix_caching": True}, [one_by_one, together]),
        "speculation": ({"speculative_config": ngram}, [together]),
    }
    shared = {"hf_overrides": fields, "max_model_len": 512}
    engines = [
        {"model": str(tmp_path / "model"), "settings": shared | settings, "asks": asks}
        for settings, asks in of_engine.values()
    ]
    answered = dict(zip(of_engine, ask(_ENGINES, engines), strict=True))
    masked, whole = MaskedModel(tmp_path / "model", fields), MaskedModel(tmp_path / "model", None)
    first = answered["plain"]["asks"][0]["answers"]
    assert difference(whole, prompts[0], first[0])[0] > 0.01, "the plan changes what the model computes"
    for name, answer in answered.items():
        for asked, answers in zip(of_engine[name][1], answer["asks"], strict=True):
            for prompt, found in zip(asked["prompts"], answers["answers"], strict=True):
                assert len(found["tokens"]) == _NEW
                largest, other = difference(masked, prompt, found)
                assert largest < _LIMIT and other == 0, (name, largest, other)
                assert found["tokens"] == first[prompts.index(prompt)]["tokens"], name
    counters = {name: answer["counters"] for name, answer in answered.items()}
    assert counters["preemption"]["vllm:num_preemptions"] > 0
    hits = [each["cached"] for answers in answered["prefix cache"]["asks"] for each in answers["answers"]]
    assert hits == [0, 0, 0, 320, 384, 128, 32, 352]
    assert counters["speculation"]["vllm:spec_decode_num_accepted_tokens"] > 0
