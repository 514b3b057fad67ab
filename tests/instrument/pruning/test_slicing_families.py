"""Every decoder loses heads, layers and groups, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headscan
from headscan import LoadedModel
from headscan.architectures import ENCODER_DECODERS, ENCODERS, FAMILIES
from headscan.errors import PruningError, UnsupportedModelError
from tests.instrument.pruning.test_slicing import (
    assert_equals_zeroing,
    equal_groups,
    free_choice,
    heads_of_layer,
    prompts,
    whole_group,
)
from tests.small_models import load_saved, make_loaded

#: Why no heads of a family can be removed.
REFUSED = {
    "deepseek_v2": "latent KV cache",
    "deepseek_v3": "latent KV cache",
    "minicpm3": "latent KV cache",
    "gemma3n": "keys of other layers",
    "gemma4": "keys of other layers",
    "gemma3-wrapper": "several kinds of input",
    "llava": "several kinds of input",
    "qwen2_5_vl": "several kinds of input",
    **dict.fromkeys([*ENCODERS, *ENCODER_DECODERS], "not a decoder"),
}
SLICED = tuple(name for name in FAMILIES if name not in REFUSED)
#: Families that lose whole layers only, since a norm spans all heads.
LAYERS_ONLY = ("olmo2", "olmo3", "olmoe", "minimax_m2")
NOT_FREE = {"falcon-gqa": "limit: one size", "codegen": "multiple of 4"} | dict.fromkeys(LAYERS_ONLY, "normalises")


def choices(name: str, lm: LoadedModel) -> list[list[tuple[int, int]]]:
    """Removals that a family supports: free, by groups, by layers, and several of them together."""
    layers = [heads_of_layer(lm, 0), heads_of_layer(lm, 2)]
    if name in LAYERS_ONLY:
        return layers
    if name == "codegen":
        four = [(layer, head) for layer in range(3) for head in (0, 2, 3, 6)]
        return [four, [*layers[0], *four[4:]]]
    by_groups = [equal_groups(lm), whole_group(lm)] if whole_group(lm) else [equal_groups(lm)]
    if name == "falcon-gqa":
        return [*layers, *by_groups]
    mixed = [*layers[0], *(head for head in free_choice(lm, 2) if head[0] == 2)]
    return [*layers, *by_groups, mixed, free_choice(lm, 1), free_choice(lm, 2)]


def reloaded(lm: LoadedModel, folder: Path) -> LoadedModel:
    headscan.save_pruned(lm, folder)
    return headscan.load(folder)


def logits(lm: LoadedModel) -> torch.Tensor:
    """Logits with weights at addresses of one alignment, on which grouped products of experts depend."""
    for weight in lm.model.parameters():
        weight.data = weight.data.clone()
    with torch.no_grad():
        return lm.model(input_ids=prompts(2, 30)).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICED)
def test_every_decoder(name: str, tmp_path: Path) -> None:
    lm = load_saved(name, tmp_path / "whole")
    for number, removed in enumerate(choices(name, lm)):
        sliced = assert_equals_zeroing(lm, removed)
        assert sliced.grid.total_heads == lm.grid.total_heads - len(removed)
        back = reloaded(sliced, tmp_path / str(number))
        assert back.grid == sliced.grid
        assert torch.equal(logits(back), logits(sliced))


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]) as caught:
        headscan.slice_heads(make_loaded(name), [(0, 0)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NOT_FREE)
def test_a_single_head_is_refused_where_heads_depend_on_each_other(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=NOT_FREE[name]) as caught:
        headscan.slice_heads(make_loaded(name), [(0, 0)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "bloom", "phi3", "falcon-mqa", "persimmon"])
def test_the_number_of_weights_falls_by_those_of_the_heads(name: str) -> None:
    lm = make_loaded(name)
    removed = free_choice(lm, 2)
    sliced = headscan.slice_heads(lm, removed)
    E, biased = lm.model.config.hidden_size, any(name in key for key in _biases(lm) for name in ("q", "c_attn"))
    fell = 0
    for site, left in zip(lm.grid.sites, sliced.grid.sites, strict=True):
        D = lm.module(site.output_projection).weight.numel() // E // site.num_attention_heads
        queries = site.num_attention_heads - left.num_attention_heads
        keys = site.num_key_value_heads - left.num_key_value_heads
        fell += queries * (2 * D * E + D * biased) + keys * 2 * (D * E + D * biased)
    assert fell > 0
    counts = [sum(weight.numel() for weight in each.model.parameters()) for each in (lm, sliced)]
    assert counts[0] - counts[1] == fell


def _biases(lm: LoadedModel) -> list[str]:
    attention = lm.module(lm.grid.sites[0].path)
    return [key for key, _ in attention.named_parameters() if key.endswith("bias") and "norm" not in key]


def test_new_values_are_used_and_the_original_stays() -> None:
    lm = make_loaded("gpt2")
    before = {name: weight.clone() for name, weight in lm.model.state_dict().items()}
    name = "transformer.h.1.attn.c_proj.weight"
    new = torch.randn_like(before[name])
    found = headscan.slice_heads(lm, [(1, 2), (2, 0)], {name: new}).model.state_dict()
    kept = [at for at in range(48) if at // 8 != 2]
    assert torch.equal(found[name], new[kept])
    for key, weight in lm.model.state_dict().items():
        assert torch.equal(weight, before[key])
    shared = "transformer.h.1.mlp.c_fc.weight"
    assert found[shared].data_ptr() == lm.model.state_dict()[shared].data_ptr()


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"model.nothing.weight": torch.zeros(2)}, "no such parameter"),
        ({"model.layers.0.self_attn.o_proj.weight": torch.zeros(2, 2)}, r"limit \(48, 48\)"),
    ],
)
def test_new_values_that_do_not_fit_are_refused(weights: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(PruningError, match=match):
        headscan.slice_heads(make_loaded("llama"), [(0, 0)], weights)


def test_a_model_keeps_at_least_one_head() -> None:
    lm = make_loaded("llama")
    with pytest.raises(PruningError, match="limit 17"):
        headscan.slice_heads(lm, lm.grid.heads())
    left = headscan.slice_heads(lm, [head for head in lm.grid.heads() if head != (1, 4)])
    assert [(site.layer, site.num_attention_heads) for site in left.grid.sites] == [(1, 1)]


def test_quantised_models_are_refused() -> None:
    lm = make_loaded("llama")
    lm.model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="quantised"):
        headscan.slice_heads(lm, [(0, 0)])


def test_attention_that_shares_weights_is_refused() -> None:
    lm = make_loaded("llama")
    lm.module("model.layers.0.self_attn").q_proj = lm.module("model.layers.1.self_attn").q_proj
    with pytest.raises(UnsupportedModelError, match="share weights"):
        headscan.slice_heads(lm, [(0, 0)])


def test_an_unknown_part_of_the_attention_is_refused() -> None:
    lm = make_loaded("llama")
    lm.module("model.layers.0.self_attn").r_proj = torch.nn.Linear(48, 48)
    with pytest.raises(UnsupportedModelError, match=r"r_proj.*Load another"):
        headscan.slice_heads(lm, [(0, 0)])


def test_weights_in_another_order_than_their_names_promise_are_refused() -> None:
    lm = make_loaded("llama")
    reverse = lm.module("model.layers.0.self_attn.q_proj").register_forward_hook
    reverse(lambda _, args, out: out.unflatten(-1, (-1, 8)).flip(-2).flatten(-2))
    with pytest.raises(UnsupportedModelError, match="attention of layer 0 differs"):
        headscan.slice_heads(lm, [(0, 0)])
    assert headscan.slice_heads(lm, [(1, 0)]).grid.total_heads == 17


def test_no_removed_head_leaves_the_architecture_as_it_is() -> None:
    lm = make_loaded("llama")
    found = headscan.slice_heads(lm, [], {"model.norm.weight": torch.ones(48)})
    assert type(found.model) is type(lm.model) and found.grid == lm.grid
    assert found.model.model.norm.weight.unique().tolist() == [1.0]
    assert lm.model.model.norm.weight.unique().tolist() != [1.0]
