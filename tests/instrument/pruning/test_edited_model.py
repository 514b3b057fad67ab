"""Edited models compute what a model with other weights computes."""

from __future__ import annotations

import copy

import pytest
import torch

import headscan
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.edited_model import Edits, edited, logits, read_weight
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded


@torch.no_grad()
def predictions(lm: LoadedModel) -> torch.Tensor:
    return torch.cat([logits(lm, batch).log_softmax(-1) for batch in random_texts(lm).batches(lm.device)])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_edits_equal_changed_weights_and_a_mask(name: str) -> None:
    lm = make_loaded(name)
    site = lm.grid.sites[1]
    old = read_weight(lm.module(site.output_projection))
    new = old + 0.1 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    changed = copy.deepcopy(lm)
    changed.module(site.output_projection).weight.data.copy_(new)
    before = predictions(lm)
    with headscan.intervene(changed, headscan.HeadMask([(0, 2), (1, 4)])):
        expected = predictions(changed)
    with edited(lm, Edits(((0, 2), (1, 4)), {f"{site.output_projection}.weight": new})):  # type: ignore[arg-type]
        found = predictions(lm)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - before).abs().max() > 0.01
    torch.testing.assert_close(predictions(lm), before, rtol=0, atol=0)


def test_a_failing_context_leaves_no_hook() -> None:
    lm = make_loaded("llama")
    before = predictions(lm)
    site = lm.grid.sites[0]
    name = f"{site.output_projection}.weight"
    with (
        pytest.raises(RuntimeError, match="inside"),
        edited(lm, Edits((headscan.Head(0, 1),), {name: torch.zeros(48, 48)})),
    ):
        raise RuntimeError("inside")
    torch.testing.assert_close(predictions(lm), before, rtol=0, atol=0)
