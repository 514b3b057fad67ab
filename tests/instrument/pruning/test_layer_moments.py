"""Moments against one graph of the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import headscan
from headscan.grid import Head
from headscan.pruning.damage_curve import layer_moments
from headscan.pruning.edited_model import Divergence, Edits, LayerEdits
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2-softcap"])
def test_moments_equal_those_of_single_sequences(name: str) -> None:
    lm = make_loaded(name)
    texts = random_texts(lm, sequences=7)
    found = layer_moments(lm, texts)
    tokens = int(texts.lengths.sum())
    for site in lm.grid.sites:
        gram, fisher = torch.zeros(48, 48), torch.zeros(48, 48)
        kept: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            kept[:] = [args[0].detach(), out.detach().requires_grad_()]  # noqa: B023 - called before it changes
            return kept[1]  # noqa: B023

        if site.num_attention_heads * site.value_dim != 48:
            gram = torch.zeros(2 * [site.num_attention_heads * site.value_dim])
        handle = lm.module(site.output_projection).register_forward_hook(keep)
        for ids, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
            with torch.enable_grad():
                logits = lm.model(input_ids=ids[None, :length], use_cache=False).logits[0]
                loss = F.cross_entropy(logits[:-1], ids[1:length], reduction="sum")
            (gradient,) = torch.autograd.grad(loss, kept[1])
            inputs, errors = kept[0].reshape(length, -1), gradient.reshape(length, -1)
            gram += inputs.T @ inputs
            fisher += errors.T @ errors
        handle.remove()
        torch.testing.assert_close(found[site.layer].gram, gram / tokens, rtol=1e-4, atol=1e-6)
        expected = fisher / tokens
        torch.testing.assert_close(found[site.layer].fisher, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])  # the attention of bloom cannot be shared
@torch.no_grad()
def test_the_divergence_is_that_of_whole_passes(family: str) -> None:
    lm = make_loaded(family)
    texts = random_texts(lm, sequences=5)
    name = f"{lm.grid.site_of(1).output_projection}.weight"
    weight = lm.model.get_parameter(name)
    changed = weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    # What one model lacks in layer 1, the others have.
    below = Edits((Head(0, 1), Head(1, 2)))
    models = [
        (below, weight.clone()),
        (Edits((Head(0, 1), Head(1, 0), Head(2, 0))), weight.clone()),
        (Edits((Head(0, 1), Head(1, 3)), {name: changed}), changed),
    ]
    candidates = [LayerEdits(edits.removed, partial(replace, edits)) for edits, _ in models]
    found = Divergence(lm, texts).of_layers({1: candidates}, below)[1]
    for value, (edits, replaced) in zip(found, models, strict=True):
        original_weight = weight.clone()
        total, tokens = 0.0, 0
        for ids, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
            original = lm.model(input_ids=ids[None, :length]).logits[0, :-1].log_softmax(-1)
            weight.copy_(replaced)
            with headscan.intervene(lm, headscan.HeadMask(edits.removed)):
                other = lm.model(input_ids=ids[None, :length]).logits[0, :-1].log_softmax(-1)
            weight.copy_(original_weight)
            total += float((original.exp() * (original - other)).sum())
            tokens += length - 1
        assert value == pytest.approx(total / tokens, rel=1e-3)
        assert Divergence(lm, texts).of(edits) == pytest.approx(value, rel=1e-4)
