"""Plans by KV head in vLLM against explicit masks in transformers, under all that a server does.

The folder of the engines' environments (``make engines``) is ``.engines``, or that of the variable HEADSCAN_ENGINES.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

import headscan
from headscan.export.decilm_folder import write_decilm
from headscan.export.vllm_overrides import vllm_overrides
from headscan.models.loaded_model import LoadedModel
from tests.engines.check_plans import ask, ask_each
from tests.engines.plan_masks import MaskedModel, difference
from tests.jobs.export.test_vllm_overrides import plan_of

_ENGINES = Path(os.environ.get("HEADSCAN_ENGINES", ".engines"))
_PYTHON = _ENGINES / "vllm/bin/python"
pytestmark = pytest.mark.skipif(not _PYTHON.exists(), reason=f"no environment of vLLM in {_ENGINES}")
_NEW = 48
#: Limit of the difference of a log-probability.
_LIMIT = 1e-4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_plan_is_exact_under_every_schedule(tmp_path: Path) -> None:
    lm = headscan.load("demo", device="cpu", dtype="float32")
    lm.model.save_pretrained(tmp_path / "model")
    lm.require_tokenizer().save_pretrained(tmp_path / "model")
    heads = set(random.Random(5).sample([(layer, head) for layer in range(6) for head in range(4)], 12))
    fields = vllm_overrides(plan_of(lm, heads, sink=4, recent=40), lm.model.config, "demo")[0]
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
        "compiled": ({"enforce_eager": False}, [together]),
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


def _small(config: PreTrainedConfig, folder: Path) -> LoadedModel:
    """Return a random model in a folder, with the tokenizer of the demo model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    headscan.load("demo", device="cpu").require_tokenizer().save_pretrained(folder)
    return headscan.load(folder, device="cpu", dtype="float32")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_architecture_is_exact(tmp_path: Path) -> None:
    """Plans on models whose attention differs, several windows, heads that are no neighbours, and a pruned model."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
    }
    configs = {
        "mistral": MistralConfig(**sizes, sliding_window=None),
        "qwen2": Qwen2Config(**{**sizes, "num_attention_heads": 4}),
        "qwen3": Qwen3Config(**sizes),
    }
    cases: dict[str, tuple[Path, dict[str, Any]]] = {}
    for name, config in configs.items():
        lm = _small(config, tmp_path / name)
        # Two heads of a kind in each layer share a module; those of layer 0 are neighbours of the other kind.
        heads = {(0, 0), (0, 2), (1, 0), (1, 1)}
        cases[name] = (tmp_path / name, vllm_overrides(plan_of(lm, heads), lm.model.config, name)[0])
    twice = json.loads(json.dumps(cases["qwen3"][1]))
    twice["head_plan"] |= {"windows": [[0, 7], [40, 33]], "heads": [[1, 0, 2, 2], [0, 0, 1, 2]], "chunk": 64}
    cases["two widths and a chunk"] = (tmp_path / "qwen3", twice)

    removed = [(1, 0), (1, 1), *((4, head) for head in range(8))]
    headscan.save_pruned(
        headscan.slice_heads(headscan.load("demo", device="cpu", dtype="float32"), removed), tmp_path / "smaller"
    )
    smaller = headscan.load(tmp_path / "smaller", device="cpu", dtype="float32")
    plan = plan_of(smaller, {(0, 0), (1, 1), (2, 3), (5, 0)}, recent=24)
    pruned = vllm_overrides(plan, smaller.model.config, "smaller")[0]
    cases["pruned"] = (write_decilm(smaller, tmp_path / "served").folder, pruned)

    text = headscan.load("demo", device="cpu").require_tokenizer()(inspect.getsource(ArgumentParser)).input_ids
    asks = [{"prompts": [text[:300], text[500:590]], "sampling": {"max_tokens": 24, "logprobs": 20}}]
    engines = [
        {
            "model": str(folder),
            "settings": {"hf_overrides": fields, "max_model_len": 512, "trust_remote_code": name == "pruned"},
            "asks": asks,
        }
        for name, (folder, fields) in cases.items()
    ]
    for (name, (folder, fields)), answer in zip(cases.items(), ask(_ENGINES, engines), strict=True):
        masked = MaskedModel(tmp_path / "smaller" if name == "pruned" else folder, fields)
        whole = MaskedModel(tmp_path / "smaller" if name == "pruned" else folder, None)
        for prompt, found in zip(asks[0]["prompts"], answer["asks"][0]["answers"], strict=True):
            largest, other = difference(masked, prompt, found)
            assert largest < _LIMIT and other == 0, (name, largest, other)
            assert difference(whole, prompt, found)[0] > 10 * _LIMIT, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_windows_and_fp8_save_together_and_bad_settings_are_one_line(tmp_path: Path) -> None:
    lm = headscan.load("demo", device="cpu", dtype="float32")
    lm.model.save_pretrained(tmp_path / "model")
    lm.require_tokenizer().save_pretrained(tmp_path / "model")
    heads = {(layer, head) for layer in range(6) for head in (0, 2)}
    fields = vllm_overrides(plan_of(lm, heads, recent=40), lm.model.config, "demo")[0]
    prompt = lm.require_tokenizer()(inspect.getsource(ArgumentParser)).input_ids[:400]
    settings = {"max_model_len": 512, "max_num_batched_tokens": 64}
    plan, fp8 = settings | {"hf_overrides": fields}, {"kv_cache_dtype": "fp8_e4m3"}
    sampled = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
    other = json.loads(json.dumps(fields))
    other["head_plan"]["model"]["hidden_size"] = 64
    engines = {
        "full": settings,
        "plan": plan,
        "full, fp8": settings | fp8,
        "plan, fp8": plan | fp8,
        "seed 3": plan | {"seed": 3},
        "seed 3 again": plan | {"seed": 3},
        "another model": plan | {"hf_overrides": other},
        "one table": plan | {"disable_hybrid_kv_cache_manager": True},
    }
    asks = [{"prompts": [prompt], "sampling": sampled}]
    answers = ask_each(
        _ENGINES, [{"model": str(tmp_path / "model"), "settings": each, "asks": asks} for each in engines.values()]
    )
    found = dict(zip(engines, answers, strict=True))
    fits = {name: found[name]["tokens_that_fit"] for name in list(engines)[:4]}
    assert fits["plan"] > 1.25 * fits["full"]
    assert fits["plan, fp8"] > 3.9 * fits["plan"] and fits["full, fp8"] > 3.9 * fits["full"]
    same = [found[name]["asks"][0]["answers"][0]["tokens"] for name in ("seed 3", "seed 3 again")]
    assert same[0] == same[1]
    assert "hidden_size 64; this one has 256" in found["another model"]["error"]
    assert "Serve without --disable-hybrid-kv-cache-manager" in found["one table"]["error"]
    assert "\n" not in found["another model"]["error"] + found["one table"]["error"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_plugin_fits_the_classes_of_vllm() -> None:
    words = [str(_PYTHON), str(Path(__file__).with_name("check_plugin.py"))]
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0 and "402 checks passed" in ended.stdout, ended.stdout[-3000:]
