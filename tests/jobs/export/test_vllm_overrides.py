"""Plans by KV head as fields of a configuration, read back by the plugin that serves them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from headscan_vllm.served_plan import ARCHITECTURES, PREFIX, VERSION, ServedPlan

import headscan
from headscan.cli.main import main
from headscan.errors import ExportError
from headscan.export import vllm_overrides as module
from headscan.export.decilm_folder import write_decilm
from headscan.export.vllm_overrides import vllm_overrides
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import (
    HeadPlan,
    PlanError,
    WindowHeads,
    allocate,
    imported_scores,
    own_budget,
    planned_model,
    random_scores,
    read_pattern,
)
from headscan.plans.head_plan import Granularity
from headscan.runs.model_identity import identify, model_facts
from headscan.windows import Window
from tests.small_models import make_loaded
from tests.sources import SHARED

SAMPLES = SHARED / "reference/duo-attention"


def loaded(name: str) -> LoadedModel:
    """Return a small model whose configuration names its architecture, as that of a checkpoint does."""
    lm = make_loaded(name)
    lm.model.config.architectures = [type(lm.model).__name__]
    return lm


def scores_of(sites: Any, layers: int, granularity: Granularity = "kv_head") -> Any:
    row = {"run_id": "r0", "model": "small", "dtype": "float32", "grid": sites, "num_layers": layers}
    row |= dict.fromkeys(("model_revision", "model_config_hash", "weights_hash"))
    return random_scores(planned_model(row, equal_groups=False)[0], 0, granularity=granularity)


def plan_of(
    lm: LoadedModel,
    heads: Collection[tuple[int, int]],
    *,
    sink: int = 4,
    recent: int = 16,
    granularity: Granularity = "kv_head",
) -> HeadPlan:
    """Return a plan with windows on some (layer, KV head)."""
    drawn = scores_of(model_facts(lm, None).sites, lm.grid.num_layers, granularity)
    order = tuple(sorted(drawn.order, key=lambda place: (place not in heads, place)))
    scores = replace(drawn, scores={place: float(place not in heads) for place in order}, order=order)
    return allocate(scores, WindowHeads(len(heads)), sink=sink, recent=recent)


def read_back(fields: dict[str, Any], config: Any) -> ServedPlan:
    plan = ServedPlan.read(json.loads(json.dumps(fields))["head_plan"])
    plan.check_model(config)
    return plan


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_plugin_reads_what_each_head_keeps(name: str) -> None:
    lm = loaded(name)
    kv_heads = lm.grid.sites[0].num_key_value_heads
    heads = {(0, 0), (1, kv_heads - 1), (2, 0)}
    config = lm.model.config
    fields, is_decilm = vllm_overrides(plan_of(lm, heads), config, lm.source)
    assert fields["architectures"] == [PREFIX + type(lm.model).__name__] and not is_decilm
    plan = read_back(fields, config)
    assert plan.windows == ((4, 16),) and plan.block is plan.chunk is None
    assert {(layer, head) for layer, row in enumerate(plan.heads) for head, kept in enumerate(row) if kept} == heads
    assert [len(row) for row in plan.heads] == [kv_heads] * lm.grid.num_layers


def test_both_sides_know_the_same_architectures_and_version() -> None:
    assert {*module._ARCHITECTURES, module.ARCHITECTURE} == set(ARCHITECTURES)
    assert (module._PREFIX, module._VERSION) == (PREFIX, VERSION)


def test_windows_of_several_widths() -> None:
    lm = loaded("llama")
    plan = plan_of(lm, {(0, 0), (1, 1)})
    wide = tuple(
        replace(head, window=Window(4, 24)) if (head.layer, head.kv_head) == (1, 1) else head for head in plan.heads
    )
    served = read_back(vllm_overrides(replace(plan, heads=wide), lm.model.config, "small")[0], lm.model.config)
    assert served.windows == ((4, 16), (4, 24))
    assert served.heads[0] == (1, 0) and served.heads[1] == (0, 2)


@pytest.mark.parametrize(
    "removed", [[(1, 0), (1, 1), (1, 2)], [(0, 0), (2, 1), (2, 2), (2, 5)], [(1, head) for head in range(6)]]
)
def test_a_pruned_model_is_served_from_its_decilm_folder(removed: list[tuple[int, int]], tmp_path: Path) -> None:
    headscan.save_pruned(headscan.slice_heads(make_loaded("llama"), removed), tmp_path / "smaller")
    lm = headscan.load(tmp_path / "smaller", device="cpu")
    fields, is_decilm = vllm_overrides(plan_of(lm, {(0, 0), (2, 1)}), lm.model.config, lm.source)
    assert is_decilm and fields["architectures"] == ["HeadPlanDeciLMForCausalLM"]
    folder = write_decilm(lm, tmp_path / "served").folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plan = read_back(fields, SimpleNamespace(**config))
    for layer, (row, block) in enumerate(zip(plan.heads, config["block_configs"], strict=True)):
        group, own = block["attention"]["n_heads_in_group"], lm.grid.at("self").sites
        assert len(row) == (config["num_attention_heads"] // group if group else 0)
        kept = sum(site.num_key_value_heads for site in own if site.layer == layer)
        assert all(row[kept:]), "heads of zeros keep a window"
        assert row[:kept] == tuple(int((layer, head) in {(0, 0), (2, 1)}) for head in range(kept))


def test_what_cannot_be_served_is_one_line() -> None:
    lm = loaded("llama")
    plan, config = plan_of(lm, {(0, 0)}), lm.model.config
    for action, error, words in (
        (lambda: vllm_overrides(plan_of(lm, ()), config, "x"), PlanError, "has no windows"),
        (lambda: vllm_overrides(plan, loaded("llama-mha").model.config, "x"), PlanError, "other KV heads"),
        (lambda: vllm_overrides(plan, loaded("gpt2").model.config, "x"), ExportError, "architecture GPT2LMHead"),
    ):
        with pytest.raises(error, match=words) as caught:
            action()
        assert "\n" not in str(caught.value)


def test_a_large_plan_is_a_small_file() -> None:
    site = model_facts(make_loaded("llama"), None).sites[0]
    sites = [site | {"layer": layer, "num_attention_heads": 64, "num_key_value_heads": 8} for layer in range(80)]
    plan = allocate(scores_of([each | {"cache_heads": 8} for each in sites], 80), WindowHeads(320))
    config = SimpleNamespace(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=80,
        num_key_value_heads=8,
        hidden_size=8192,
        intermediate_size=28672,
        vocab_size=128256,
    )
    text = json.dumps(vllm_overrides(plan, config, "x")[0], separators=(",", ":"))
    assert len(text) < 2048 and "'" not in text and sum(map(sum, json.loads(text)["head_plan"]["heads"])) == 320


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no published patterns here")
@pytest.mark.parametrize("name", ["Meta-Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.2", "Llama-2-7B-32K-Instruct"])
def test_published_patterns_are_served(name: str) -> None:
    pattern = read_pattern(SAMPLES / name)
    layers, kv_heads = pattern.keep.shape
    site = model_facts(make_loaded("llama"), None).sites[0]
    site |= {"num_attention_heads": 32, "num_key_value_heads": kv_heads, "cache_heads": kv_heads}
    scores = imported_scores(scores_of([site | {"layer": layer} for layer in range(layers)], layers).model, pattern)
    plan = allocate(scores, own_budget(pattern, scores), sink=pattern.sink_size, recent=pattern.recent_size)
    architecture = "MistralForCausalLM" if name.startswith("Mistral") else "LlamaForCausalLM"
    config = SimpleNamespace(
        model_type="llama",
        architectures=[architecture],
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=32000,
    )
    served = read_back(vllm_overrides(plan, config, name)[0], config)
    assert served.windows == ((128, 256),)
    assert sum(map(sum, served.heads)) == len(plan.window_heads) > 0


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = make_loaded("llama")
    lm.model.save_pretrained(tmp_path / "model")
    plan = plan_of(headscan.load(tmp_path / "model", device="cpu"), {(0, 0), (2, 1)})
    identity = identify(ModelSpec(str(tmp_path / "model")), need_tokenizer=False)
    replace(plan, model=replace(plan.model, config_hash=identity.config_hash)).save(tmp_path / "plan.json")
    words = ["--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "served.json")]
    assert main(["export", "vllm", str(tmp_path / "model"), *words]) == 0
    shown = capsys.readouterr().out
    assert "2 of 6 KV heads keep 4 first and 16 last tokens" in shown
    assert f'vllm serve {tmp_path / "model"} --hf-overrides "$(cat {tmp_path / "served.json"})"' in shown
    read_back(json.loads((tmp_path / "served.json").read_text(encoding="utf-8")), lm.model.config)
    (tmp_path / "served.json").unlink()
    assert main(["export", "vllm", *words]) == 2 and "goes with a format of models" in capsys.readouterr().err
