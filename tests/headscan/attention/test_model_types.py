"""Hooks that change nothing leave the logits of every model type as they are, on a long padded text and at every site.

A model may attend otherwise under another attention name, without a mask, beyond a window, or at a site that is not
measured. What cannot be measured is refused. Types that cannot be built small are printed.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import headscan
from headscan.attention import discovery
from headscan.attention.calls import ScoredCall
from headscan.attention.discovery import discover
from headscan.attention.hooks import IMPLEMENTATION, attention_hook
from headscan.attention.small_copy import names_windows, small_copy
from headscan.errors import HeadscanError, ModelLoadError, UnsupportedModelError
from headscan.models.forward_inputs import real_tokens
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import MODEL_ERRORS
from tests.headscan.attention.model_types import MODEL_TYPES, make_small
from tests.small_models import make_model

#: Tokens of the padded text, beyond every window of the small models, and of its two sequences.
TOKENS, LENGTHS = 80, (80, 51)
#: Types with an attention of their own kind: chosen keys, masks of one form, experts that read the mask, chunks, keys of
#: two sequences in one softmax, and the plain one.
FAST = frozenset("deepseek_v32 nllb-moe t5gemma2 llama4_text gpt_oss llama bert minimax_m3_vl".split())

IN_PARTS = "cannot be seen"
NO_ATTENTION = "has no softmax attention heads"
#: Types that are refused, and why.
REFUSED = {
    **dict.fromkeys(("falcon_mamba", "fnet", "mamba", "mra", "reformer", "rwkv", "xlstm", "yoso"), NO_ATTENTION),
}
#: Types that cannot be built small, or not without other packages.
NOT_BUILT: frozenset[str] = frozenset()


def padded_text(model: PreTrainedModel, *, masks: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of a pass, and which predictions are of real tokens (2, N)."""
    generator = torch.Generator().manual_seed(3)
    words = min(model.get_input_embeddings().weight.shape[0], 150)
    real = real_tokens(torch.tensor(LENGTHS), TOKENS)
    sides = {"": TOKENS} if not model.config.is_encoder_decoder else {"": TOKENS, "decoder_": TOKENS - 5}
    inputs: dict[str, Tensor] = {}
    for side, tokens in sides.items():
        inputs[f"{side}input_ids"] = torch.randint(10, words, (2, tokens), generator=generator)
        if masks:
            inputs[f"{side}attention_mask"] = real[:, :tokens].long()
    counted = real[:, : list(sides.values())[-1]]
    return inputs, counted if masks else torch.ones_like(counted)


@torch.no_grad()
def logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs, use_cache=False)
    return output[0] if getattr(output, "logits", None) is None else output.logits


def differences(lm: LoadedModel, own: dict[bool, Tensor]) -> dict[str, float]:
    """Return how much logits change under hooks that change nothing, relative to the largest of ``own`` logits, with and
    without masks, by sites.
    """
    kinds = lm.grid.kinds
    changed: dict[str, float] = {}
    for sites in [(kind,) for kind in kinds] + [kinds] * (len(kinds) > 1):
        for masks in (False, True):
            inputs, counted = padded_text(lm.model, masks=masks)
            with ExitStack() as hooks:
                for site in map(lm.at, sites):
                    hooks.enter_context(headscan.intervene(site, headscan.HeadMask([])))
                    hooks.enter_context(attention_hook(site, lambda *_: None))
                    if not site.grid.reads_encoder:
                        rule = headscan.HeadRule("entropy", -1.0)
                        hooks.enter_context(headscan.intervene(site, rule))
                found = logits(lm.model, inputs)
            error = (found - own[masks])[counted].abs().max() / own[masks][counted].abs().max()
            changed[f"{'+'.join(sites)}{', masked' * masks}"] = float(error)
    return changed


@pytest.mark.parametrize(
    "model_type", [t if t in FAST else pytest.param(t, marks=pytest.mark.slow) for t in MODEL_TYPES]
)
def test_hooks_that_change_nothing_leave_the_logits(model_type: str) -> None:
    try:
        model = make_small(model_type)
    except ModelLoadError as problem:
        assert "does not predict text tokens" in str(problem)  # as `load` says
        return
    except (*MODEL_ERRORS, ImportError) as problem:
        print(f"{model_type} cannot be built small: {type(problem).__name__}: {str(problem).splitlines()[0]}")
        assert model_type in NOT_BUILT
        return
    if model_type in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[model_type]) as refusal:
            headscan.load(model)
        assert "\n" not in str(refusal.value)
        return
    own = {masks: logits(model, padded_text(model, masks=masks)[0]) for masks in (False, True)}
    changed = differences(headscan.load(model), own)
    # An error of the attention changes logits by more than a hundredth. Rounding of two paths reaches 2e-4 without norms.
    assert max(changed.values()) < 1e-3, changed
