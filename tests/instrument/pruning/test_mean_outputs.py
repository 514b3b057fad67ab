"""Mean outputs of removed heads as biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headscan
from headscan.errors import PruningError
from headscan.grid import Head
from headscan.models.forward_inputs import before_last
from headscan.models.loaded_model import LoadedModel, Sharding
from headscan.pruning.edited_model import Edits, edited
from headscan.pruning.repair import mean_outputs
from headscan.pruning.save_model import stock_config
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded

NAMES = ["llama", "gpt2", "qwen3", "gpt_oss", "gemma2-softcap"]
REMOVED = (Head(0, 1), Head(1, 0), Head(1, 2))


@torch.no_grad()
def with_means(lm: LoadedModel, removed: tuple[Head, ...], ids: Tensor) -> Tensor:
    """Return logits with the inputs of output projections replaced by means, text by text without padding."""
    texts = random_texts(lm)
    projections = {site.layer: lm.module(site.output_projection) for site in lm.grid.sites}
    sums: dict[int, Any] = dict.fromkeys(projections, 0.0)
    handles = []
    for layer, module in projections.items():

        def add(_: Any, args: Any, layer: int = layer) -> None:
            sums[layer] = sums[layer] + args[0].reshape(-1, args[0].shape[-1]).double().sum(0)

        handles.append(module.register_forward_pre_hook(add))
    for row, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
        lm.model(input_ids=row[None, :length])
    for handle in handles:
        handle.remove()
    for head in removed:
        width = lm.grid.site_of(head.layer).value_dim
        part = slice(head.head * width, (head.head + 1) * width)
        mean = (sums[head.layer][part] / texts.tokens).float()

        def fill(_: Any, args: Any, part: slice = part, mean: Tensor = mean) -> Any:
            changed = args[0].clone()
            changed[..., part] = mean.to(changed)
            return (changed, *args[1:])

        handles.append(projections[head.layer].register_forward_pre_hook(fill))
    logits: Tensor = lm.model(input_ids=ids).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_with_means_computes_mean_ablation(name: str, tmp_path: Path) -> None:
    lm = make_loaded(name)
    ids = random_texts(lm, seed=3).ids[:2]
    expected = with_means(lm, REMOVED, ids)
    biases = mean_outputs(lm, random_texts(lm), REMOVED)
    with edited(lm, Edits(REMOVED, biases)):
        torch.testing.assert_close(lm.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    smaller = headscan.slice_heads(lm, REMOVED, biases)
    found = smaller.model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - lm.model(input_ids=ids).logits).abs().max() > 1e-4
    headscan.save_pruned(smaller, tmp_path / "smaller")
    again = headscan.load(str(tmp_path / "smaller"), dtype="float32", device="cpu")
    assert torch.equal(again.model(input_ids=ids).logits, found)


@torch.no_grad()
def test_tokens_of_recall_prompts_have_the_weights_of_the_least_squares() -> None:
    lm = make_loaded("llama")
    prompts = random_texts(lm, sequences=3, seed=1)
    answers = before_last(prompts.lengths, torch.full_like(prompts.lengths, 2), prompts.ids.shape[1])
    both = random_texts(lm).with_prompts([replace(prompts, scoring_BN=answers)], 0.3)
    site, head = lm.grid.site_of(1), Head(1, 2)
    module = lm.module(site.output_projection)
    inputs, weights = list[Tensor](), list[Tensor]()
    with module.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])):
        for batch in replace(both, batch_tokens=1).batches(lm.device):
            lm.model(input_ids=batch.ids)
            weights.append(batch.weights_BN[0])
    assert len(set(torch.cat(weights).tolist())) == 2
    mean = torch.cat(weights).double() @ torch.cat(inputs).double() / torch.cat(weights).sum()
    part = slice(head.head * site.value_dim, (head.head + 1) * site.value_dim)
    expected = module.weight[:, part].double() @ mean[part]
    (found,) = mean_outputs(lm, both, [head]).values()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_layer_without_heads_keeps_their_means() -> None:
    lm = make_loaded("llama")
    removed = tuple(Head(1, head) for head in range(lm.grid.sites[1].num_attention_heads))
    ids = random_texts(lm, seed=3).ids[:2]
    smaller = headscan.slice_heads(lm, removed, mean_outputs(lm, random_texts(lm), removed))
    expected = with_means(lm, removed, ids)
    torch.testing.assert_close(smaller.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_model_with_means_can_lose_further_heads() -> None:
    lm = make_loaded("llama")
    ids = random_texts(lm, seed=3).ids[:2]
    biases = mean_outputs(lm, random_texts(lm), REMOVED)
    smaller = headscan.slice_heads(lm, REMOVED, biases)
    # Head (1, 3) is the second that remains in layer 1.
    found = headscan.slice_heads(smaller, [(1, 1)]).model(input_ids=ids).logits
    with edited(lm, Edits((*REMOVED, Head(1, 3)), biases)):
        torch.testing.assert_close(found, lm.model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_equal_numbers_of_heads_with_means_are_no_stock_model() -> None:
    lm = make_loaded("llama-mha")
    removed = tuple(Head(site.layer, 0) for site in lm.grid.sites)
    assert stock_config(headscan.slice_heads(lm, removed).model) is not None
    assert stock_config(headscan.slice_heads(lm, removed, mean_outputs(lm, random_texts(lm), removed)).model) is None


@torch.no_grad()
def test_offloaded_models_get_means(tmp_path: Path) -> None:
    lm = make_loaded("llama")
    lm.model.save_pretrained(tmp_path / "model")
    offloaded = headscan.load(tmp_path / "model", device=Sharding(("cpu",), ((0, 0),), "disk"))
    assert any(weight.is_meta for weight in offloaded.model.parameters())
    ids = random_texts(lm, seed=3).ids[:2]
    smaller = headscan.slice_heads(offloaded, REMOVED, mean_outputs(offloaded, random_texts(lm), REMOVED))
    expected = with_means(lm, REMOVED, ids)
    torch.testing.assert_close(smaller.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    headscan.save_pruned(smaller, tmp_path / "smaller")
    again = headscan.load(str(tmp_path / "smaller"), dtype="float32", device="cpu")
    torch.testing.assert_close(again.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_biases_of_layers_that_lose_no_head_are_refused() -> None:
    lm = make_loaded("llama")
    biases = mean_outputs(lm, random_texts(lm), REMOVED)
    with pytest.raises(PruningError, match=r"o_proj\.bias: .*\(no such parameter\)"):
        headscan.slice_heads(lm, [(0, 1)], biases)
