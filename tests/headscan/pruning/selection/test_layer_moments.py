"""Moments against one graph of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import headscan
from headscan.pruning.edited_model import Edits
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.layer_moments import layer_moments
from tests.headscan.pruning.texts import random_texts
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


@torch.no_grad()
def test_the_divergence_is_that_of_whole_passes() -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm, sequences=5)
    below, removed = Edits((headscan.Head(0, 1),)), (headscan.Head(0, 1), headscan.Head(2, 0))
    found = Divergence(lm, texts).of_layers({1: [lambda: below, lambda: Edits(removed)]}, below)[1]
    for value, heads in zip(found, ([(0, 1)], removed), strict=True):
        total, tokens = 0.0, 0
        for ids, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
            original = lm.model(input_ids=ids[None, :length]).logits[0].log_softmax(-1)
            with headscan.intervene(lm, headscan.HeadMask(heads)):
                other = lm.model(input_ids=ids[None, :length]).logits[0].log_softmax(-1)
            total += float((original.exp() * (original - other)).sum())
            tokens += length
        assert value == pytest.approx(total / tokens, rel=1e-3)
