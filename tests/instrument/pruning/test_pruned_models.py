"""What works on any model works on one without some heads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import headscan
from headscan import HeadMask, LoadedModel
from headscan.kv.kv_damage import window_candidates
from headscan.layers.layer_ranges import open_layers
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import Sharding
from headscan.sizing.model_sizes import find_caches, model_sizes
from tests.instrument.kv.cache_plans import error, greedily, in_chunks, make_cache, oracle, random_plan
from tests.instrument.pruning.test_slicing import free_choice, heads_of_layer, prompts
from tests.small_models import load_saved, make_loaded

#: Groups of different sizes with plain attention, q/k norms, sliding layers, soft caps and learned sinks.
UNEVEN = ("llama", "qwen3", "gemma3", "gemma2-softcap", "gpt_oss")
SHARDINGS = {
    "two devices": Sharding(("cpu", "cpu"), ((0, 1), (1, 3))),
    "disk": Sharding(("cpu",), ((0, 1),), "disk"),
    "all blocks on disk": Sharding(("cpu",), ((0, 0),), "disk"),
}
LENGTHS = torch.tensor([24, 17])


def pruned(name: str, *, without_layer: int | None = None) -> tuple[LoadedModel, list[tuple[int, int]], LoadedModel]:
    """Return a model, some of its heads, and the model without them."""
    lm = make_loaded(name)
    removed = [head for head in free_choice(lm, 2) if head[0] != without_layer]
    removed += [] if without_layer is None else heads_of_layer(lm, without_layer)
    sliced = headscan.slice_heads(lm, removed)
    assert any(site.kv_index is not None for site in sliced.grid.sites)
    return lm, removed, sliced


@pytest.mark.parametrize(("name", "without_layer"), [*((name, None) for name in UNEVEN), ("llama", 0), ("gpt_oss", 0)])
def test_statistics_are_those_of_the_same_heads(name: str, without_layer: int | None) -> None:
    lm, removed, sliced = pruned(name, without_layer=without_layer)
    ids = prompts(2, 24)
    with headscan.intervene(lm, HeadMask(removed)):
        want = headscan.collect(lm, ids, LENGTHS)
    found = headscan.collect(sliced, ids, LENGTHS)
    for site in sliced.grid.sites:
        heads = range(lm.grid.site_of(site.layer).num_attention_heads)
        original = [head for head in heads if (site.layer, head) not in removed]
        for statistic, numbers in found.items():
            ours, theirs = numbers[:, site.layer, : len(original)], want[statistic][:, site.layer, original]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True, msg=statistic)
    assert headscan.score(found, "output_norm_ln").shape == (2, *sliced.grid.shape)


@pytest.mark.parametrize("name", UNEVEN)
def test_plans_for_the_cache(name: str) -> None:
    _, _, sliced = pruned(name)
    plan = random_plan(sliced)
    ids, logits = greedily(sliced, make_cache(sliced, plan), prompts(2, 40), 12)
    assert error(logits, oracle(sliced, plan, ids[:, :-1])) <= 1e-5
    ids = prompts(2, 60)
    chunks = in_chunks(sliced, make_cache(sliced, plan), ids, (3, 30, 1, 1, 17, 8))
    assert error(chunks, oracle(sliced, plan, ids)) <= 1e-5


def test_plans_for_a_model_with_a_layer_without_heads() -> None:
    _, _, sliced = pruned("llama", without_layer=0)
    plan = random_plan(sliced)
    cache = make_cache(sliced, plan)
    ids, logits = greedily(sliced, cache, prompts(2, 40), 12)
    assert error(logits, oracle(sliced, plan, ids[:, :-1])) <= 1e-5
    assert cache.nbytes == plan.bytes(2, 51, 2 * 8 * 4)


def test_damages_of_windows_are_per_remaining_kv_head() -> None:
    _, _, sliced = pruned("llama")
    heads = [(site.layer, kv_head) for site in sliced.grid.sites for kv_head in range(site.num_key_value_heads)]
    assert window_candidates(sliced) == tuple(heads)
    damages = headscan.kv_damage(sliced, prompts(2, 40), sink=2, recent=8)
    assert {tuple(at) for at in damages.nonzero().tolist()} == set(heads)


@pytest.mark.parametrize("name", UNEVEN)
def test_the_cache_holds_the_remaining_kv_heads_once(name: str) -> None:
    lm, _, sliced = pruned(name, without_layer=2)
    held = []
    for each in (lm, sliced):
        cache = DynamicCache(config=each.model.config)
        each.model(input_ids=prompts(2, 30), past_key_values=cache)
        held.append([layer.keys.nbytes + layer.values.nbytes for layer in cache.layers])
        assert cache.get_seq_length() == 30
        sizes = find_caches(each.model)["self"]
        assert [2 * size.bytes(29 if size.tokens else 30) for size in sizes] == held[-1]
    for site in lm.grid.sites:
        left = [other.num_key_value_heads for other in sliced.grid.sites if other.layer == site.layer]
        assert held[1][site.layer] * site.num_key_value_heads == held[0][site.layer] * sum(left)


def test_ablation_and_probes_run() -> None:
    _, _, sliced = pruned("llama", without_layer=1)
    twice = headscan.slice_heads(sliced, [(0, 0)])
    with torch.no_grad(), headscan.intervene(sliced, HeadMask([(0, 0)])):
        want = sliced.model(input_ids=prompts()).logits
    torch.testing.assert_close(twice.model(input_ids=prompts()).logits, want, rtol=1e-5, atol=1e-5)
    assert headscan.probe(sliced)["induction_score"].shape == sliced.grid.shape


def test_a_mask_of_another_model_is_refused() -> None:
    lm, _, sliced = pruned("llama")
    for heads in ([(0, 5)], [(3, 0)], [(0, -1)]):
        with pytest.raises(headscan.HeadscanError):
            headscan.slice_heads(sliced, heads)
    assert lm.grid.total_heads == 18


def test_sizes_come_from_the_folder(tmp_path: Path) -> None:
    _, _, sliced = pruned("llama", without_layer=2)
    headscan.save_pruned(sliced, tmp_path / "model")
    sizes = model_sizes(ModelSpec(str(tmp_path / "model")), 30)
    assert sizes.parameters == sum(weight.numel() for weight in sliced.model.parameters())
    assert sum(sizes.blocks) == sum(weight.nbytes for weight in sliced.model.model.layers.parameters())
    kv_heads = {site.layer: site.num_key_value_heads for site in sliced.grid.sites}
    assert sizes.cache == tuple(kv_heads.get(layer, 0) * 30 * 2 * 8 * 4 for layer in range(3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mixtral"])
def test_ranges_of_layers_run_alone(name: str, tmp_path: Path) -> None:
    lm = load_saved(name, tmp_path / "whole")
    sliced = headscan.slice_heads(lm, [(0, 0), (0, 1), *heads_of_layer(lm, 1), (2, 5)])
    headscan.save_pruned(sliced, tmp_path / "model")
    layers = open_layers(ModelSpec(str(tmp_path / "model")), "cpu")
    assert layers.inspection.grid == sliced.grid
    hidden = None
    ids = prompts()
    with torch.no_grad():
        for first, last in ((0, 1), (1, 3)):
            with layers.at(first, last) as stage, stage.running_range(hidden) as range_pass:
                logits = stage.lm.model(input_ids=ids, use_cache=False)
            hidden = range_pass.hidden_out
        assert torch.equal(logits.logits, sliced.model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("name", "sharding"),
    [*(("llama", sharding) for sharding in SHARDINGS), ("gpt2", "disk"), ("gpt_oss", "disk"), ("mixtral", "disk")],
)
def test_sharded_and_offloaded_models_lose_the_same_heads(name: str, sharding: str, tmp_path: Path) -> None:
    lm = make_loaded(name)
    lm.model.save_pretrained(tmp_path / "whole")
    removed = [*free_choice(lm, 3), *heads_of_layer(lm, 2)]
    sharded = headscan.load(tmp_path / "whole", device=SHARDINGS[sharding])
    on_disk = any(weight.is_meta for weight in sharded.model.parameters())
    assert on_disk is ("disk" in sharding)
    names = [f"{site.output_projection}.weight" for site in lm.grid.sites]
    weights = {name: lm.model.get_parameter(name) * 2 for name in names}
    with torch.no_grad():
        before = sharded.model(input_ids=prompts()).logits
        for changed in (None, weights):
            want = headscan.slice_heads(lm, removed, changed).model(input_ids=prompts()).logits
            found = headscan.slice_heads(sharded, removed, changed)
            torch.testing.assert_close(found.model(input_ids=prompts()).logits, want)
        assert torch.equal(sharded.model(input_ids=prompts()).logits, before)
    del sharded
    headscan.save_pruned(found, tmp_path / "pruned")
    torch.testing.assert_close(headscan.load(tmp_path / "pruned").model(input_ids=prompts()).logits, want)


@pytest.mark.slow
def test_a_pruned_model_compiles_whole() -> None:
    _, _, sliced = pruned("qwen3", without_layer=2)
    want = sliced.model(input_ids=prompts(), use_cache=False).logits
    compiled = torch.compile(sliced.model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=prompts(), use_cache=False).logits, want)


def test_the_configuration_names_original_and_remaining_heads(caplog: pytest.LogCaptureFixture) -> None:
    sliced = headscan.slice_heads(make_loaded("llama"), [(0, 0), (0, 1), *[(2, head) for head in range(6)]])
    config = sliced.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 8)
    counts = [(each.num_attention_heads, each.num_key_value_heads) for each in config.per_layer_config]
    assert counts == [(4, 2), (6, 2), (0, 0)]
    assert config.to_dict()["per_layer_config"]["2"]["skip"] == ["attention"]
    assert not caplog.records


def test_copies_do_not_share_their_configuration() -> None:
    _, _, sliced = pruned("llama")
    other = copy.deepcopy(sliced.model)
    other.set_attn_implementation("eager")
    assert sliced.model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=prompts()).logits, sliced.model(input_ids=prompts()).logits)
        assert other(input_ids=prompts(), output_attentions=True).attentions[0].shape[1] < 6
