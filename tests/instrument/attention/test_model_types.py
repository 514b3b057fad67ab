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
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

import headscan
from headscan.attention.cache_attention import IMPLEMENTATION as CACHE_IMPLEMENTATION
from headscan.attention.cache_attention import register
from headscan.attention.discovery import discover
from headscan.attention.hooks import attention_hook
from headscan.attention.small_copy import names_windows, small_copy
from headscan.errors import InterventionError, ModelLoadError, UnsupportedModelError
from headscan.models.forward_inputs import real_tokens
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import MODEL_ERRORS
from tests.instrument.attention.model_types import MODEL_TYPES, make_small
from tests.small_models import distinct_first, make_loaded, make_model, slow

#: Tokens of the padded text, beyond every window of the small models, and of its two sequences.
TOKENS, LENGTHS = 80, (80, 51)
#: Types with attention of different kinds: chosen keys, masks of one form, chunks, two sequences in one softmax,
#: learned sinks, and the plain one.
FAST = frozenset("deepseek_v32 nllb-moe t5gemma2 llama4_text gpt_oss llama bert minimax_m3_vl".split())

#: Types that are refused, by a part of the message.
_REFUSALS = {
    "has no softmax attention heads": "falcon_mamba fnet mamba mamba2 mra reformer rwkv xlstm yoso",
    "cannot be seen": "cpmant funnel led longformer longt5 pegasus_x prophetnet xlnet",
    "attends otherwise after": "big_bird bigbird_pegasus",
    "no projection takes": "convbert deepseek_v4 diffllama fsmt jetmoe nystromformer squeezebert",
    "something mixes": "bitnet",
    "serves several layers": "albert hrm_text",
    "has two attentions": "blt longcat_flash",
    "unsupported kind of attention": "paligemma",
    "fails on a short text": "blip blip-2 hunyuan_vl idefics instructblip instructblipvideo kosmos-2",
    "embeds no token ids": "perceiver pi0",
}
REFUSED = {model_type: reason for reason, types in _REFUSALS.items() for model_type in types.split()}
#: Types that cannot be built small, or not without other packages.
NOT_BUILT = (
    "chameleon deepseek_ocr2 diffusion_gemma dots3_note ernie4_5_vl_moe fast_vlm gemma3n gemma4_assistant "
    "gemma4_unified_assistant granite4_vision molmo2 nemo_speechlm perception_lm"
).split()


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
    """Return how much logits change under hooks that change nothing, by sites and masks, relative to the largest of
    ``own``.
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


@pytest.mark.parametrize("model_type", distinct_first([n for n in MODEL_TYPES if n not in NOT_BUILT], FAST))
def test_hooks_that_change_nothing_leave_the_logits(model_type: str) -> None:
    try:
        model = make_small(model_type)
    except ModelLoadError as problem:
        assert "does not predict text tokens" in str(problem)  # as `load` says
        return
    if model_type in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[model_type]) as refusal:
            headscan.load(model)
        assert "\n" not in str(refusal.value)
        return
    own = {masks: logits(model, padded_text(model, masks=masks)[0]) for masks in (False, True)}
    changed = differences(headscan.load(model), own)
    # Another attention changes logits by a hundredth and more. Rounding changes those of models without norms by 2e-4.
    assert max(changed.values()) < 1e-3, changed


@pytest.mark.slow
def test_types_that_cannot_be_built_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    reasons: dict[str, str] = {}
    for model_type in NOT_BUILT:
        with pytest.raises((*MODEL_ERRORS, ImportError, StrictDataclassError)) as problem:
            make_small(model_type)
        reasons[model_type] = f"{problem.typename}: {' '.join(str(problem.value).split())[:100]}"
    with capsys.disabled():
        print("\nmodel types that cannot be built small:", *(f"{k}: {v}" for k, v in reasons.items()), sep="\n  ")


def entropies(weights: tuple[Tensor, ...]) -> Tensor:
    """Return the mean entropy (B, L, H) of explicit weights."""
    return torch.stack([torch.special.entr(layer.double()).sum(-1).mean(-1) for layer in weights], 1)


@torch.no_grad()
def eager_output(model: PreTrainedModel, **inputs: Tensor) -> Any:
    """Return what eager attention in float64 gives, with its weights."""
    oracle = copy.deepcopy(model).double()
    oracle.set_attn_implementation("eager")
    return oracle(**inputs, output_attentions=True, use_cache=False)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v32", "minimax_m3_vl", *slow("axk2", "glm_moe_dsa", "hy_v4", "mistral_large4")]
)
def test_chosen_keys_are_measured(model_type: str) -> None:
    """The indexer chooses 8 keys, or 2 blocks of keys, for each of 80 queries."""
    model = make_small(model_type)
    inputs, _ = padded_text(model, masks=False)
    expected = entropies(eager_output(model, **inputs).attentions)
    lm = headscan.load(model)
    found = headscan.collect(lm, inputs["input_ids"], statistics=["entropy"])["entropy"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert not any(site.by_interface for site in lm.grid.sites)


@pytest.mark.parametrize("site", ["encoder", "self", "cross"])
def test_models_with_eager_masks_see_no_padding_and_no_future(site: str) -> None:
    """The masks of NLLB-MoE also reach its experts, and its decoder is causal by its mask alone."""
    model = make_small("nllb-moe", encoder_sparse_step=1, decoder_sparse_step=1)
    lm = headscan.load(model).at(site)
    inputs, _ = padded_text(model, masks=False)
    ids, decoder_ids = inputs["input_ids"], inputs["decoder_input_ids"]
    output = eager_output(model, **inputs)
    weights = {
        "encoder": output.encoder_attentions,
        "self": output.decoder_attentions,
        "cross": output.cross_attentions,
    }
    batch = headscan.collect(lm, ids, decoder_input_ids=decoder_ids, statistics=["entropy"])["entropy"]
    torch.testing.assert_close(batch.double(), entropies(weights[site]), rtol=1e-4, atol=1e-5)
    ragged = headscan.collect(lm, ids, [80, 20], decoder_input_ids=decoder_ids, statistics=["entropy"])["entropy"][1]
    alone = headscan.collect(lm, ids[1:, :20], decoder_input_ids=decoder_ids[1:], statistics=["entropy"])["entropy"][0]
    torch.testing.assert_close(ragged, alone, rtol=1e-4, atol=1e-5)


def test_own_and_encoder_tokens_in_one_softmax_are_a_site_of_their_own() -> None:
    model = make_small("t5gemma2")
    inputs, _ = padded_text(model, masks=False)
    output = eager_output(model, **inputs)
    weights = tuple(
        torch.cat(parts, -1) for parts in zip(output.decoder_attentions, output.cross_attentions, strict=True)
    )
    lm = headscan.load(model)
    assert lm.grid.kinds == ("merged", "encoder")
    ids, decoder_ids = inputs["input_ids"], inputs["decoder_input_ids"]
    found = headscan.collect(lm, ids, decoder_input_ids=decoder_ids)
    torch.testing.assert_close(found["entropy"].double(), entropies(weights), rtol=1e-4, atol=1e-5)
    first = torch.stack([layer[..., 0].mean(-1) for layer in weights], 1)
    torch.testing.assert_close(found["first_token_weight"].double(), first, rtol=1e-4, atol=1e-5)
    assert found["self_weight"].isnan().all()
    ragged = headscan.collect(lm, ids, [80, 30], decoder_input_ids=decoder_ids, decoder_lengths=[75, 20])
    alone = headscan.collect(lm, ids[1:, :30], decoder_input_ids=decoder_ids[1:, :20])
    for name, values in alone.items():
        torch.testing.assert_close(ragged[name][1], values[0], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
    with pytest.raises(InterventionError, match="cannot score merged attention"):
        headscan.intervene(lm, headscan.HeadRule("entropy", 0.0)).__enter__()


@pytest.mark.parametrize("model_type", ["longformer", "prophetnet"])
def test_attention_that_cannot_be_seen_is_no_missing_attention(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be seen as one weight for each pair of tokens"):
        headscan.load(make_small(model_type))


def test_a_model_that_a_short_text_changes_is_refused_before_it_reads_one() -> None:
    """BigBird uses full attention from its first short text on."""
    model = make_small("big_bird")
    with pytest.raises(UnsupportedModelError, match="attends otherwise after it has read a short text"):
        headscan.load(model)
    assert model.bert.attention_type == "block_sparse"
    headscan.load(make_small("big_bird", attention_type="original_full"))


class _WindowedAttention(LlamaAttention):
    """An attention with a window under the names that transformers has, and without one under others."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, *_: Any, **kwargs: Any) -> Any:
        position = torch.arange(hidden_states.shape[1])
        is_seen = position <= position[:, None]
        if self.config._attn_implementation in ("eager", "sdpa"):
            is_seen &= position > position[:, None] - self.config.sliding_window
        return super().forward(hidden_states, position_embeddings, attention_mask=is_seen[None, None])


class _WindowedLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = _WindowedAttention(config, index)


@pytest.mark.parametrize("window", [2, 4096])
def test_attention_beyond_a_window_is_checked_at_load(window: int) -> None:
    config = LlamaConfig(**make_model("llama").config.to_diff_dict() | {"num_hidden_layers": 2}, sliding_window=window)
    model = _WindowedLlama(config).eval()
    random_state = torch.get_rng_state()
    grid = discover(model)
    assert torch.equal(random_state, torch.get_rng_state())
    assert not any(site.by_interface for site in grid.sites)
    ids = torch.randint(2, 97, (1, 40))
    own = logits(model, {"input_ids": ids})
    with attention_hook(LoadedModel(model, None, grid, "windowed"), lambda *_: None):
        torch.testing.assert_close(logits(model, {"input_ids": ids}), own)


def test_small_copies_have_short_windows() -> None:
    for family, window in (("gemma3", True), ("llama4", True), ("llama", False)):
        model = make_model(family)
        assert names_windows(model.config.to_dict()) == window
        small = small_copy(model)
        assert small is not None and type(small) is type(model)
        assert small.num_parameters() < 200_000
        kinds = getattr(model.config, "layer_types", None) or ()
        assert set(kinds) == set(getattr(small.config, "layer_types", None) or ())
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(model.config, name, None):
                assert getattr(small.config, name) == 8


def test_tensors_that_headscan_does_not_read_are_refused() -> None:
    lm = make_loaded("llama")
    ids = torch.arange(5, 15)[None]
    with attention_hook(lm, lambda *_: None):
        lm.model(ids, position_ids=torch.arange(10)[None])
        with pytest.raises(UnsupportedModelError, match="passes chosen_keys to its attention"):
            lm.model(ids, chosen_keys=torch.ones(1, 10, 4))
    register()
    lm.model.set_attn_implementation(CACHE_IMPLEMENTATION)
    with pytest.raises(UnsupportedModelError, match="passes chosen_keys to its attention"):
        lm.model(ids, chosen_keys=torch.ones(1, 10, 4))
