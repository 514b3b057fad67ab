"""Passes that skip hooks are errors, passes that leave layers out on purpose are none, and attention that changed after
loading is refused.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

import headscan
from headscan.ablation.intervention import Intervention
from headscan.errors import UnsupportedModelError
from headscan.layers.blocks import find_blocks, resuming_at, running_range
from headscan.models.loaded_model import LoadedModel
from tests.small_models import make_loaded

IDS = torch.arange(5, 17).view(2, 6)
#: A change by the output hook, and one by both hooks.
CHANGES = (headscan.HeadMask([(0, 0)]), headscan.HeadRule("entropy", threshold=0.5))


def assert_refused(lm: LoadedModel, change: Intervention) -> None:
    with (
        pytest.raises(UnsupportedModelError, match=r"ran without its hook .*compiled, traced or replaced"),
        headscan.intervene(lm, change),
    ):
        lm.model(input_ids=IDS, use_cache=False)
    assert not any(module._forward_hooks for module in lm.model.modules())


def replace_attention(module: Any) -> None:
    """Let an attention module multiply by the weight of its output projection, without calling the projection."""
    projection, forward = module.o_proj, module.forward

    class Inlined(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return F.linear(values, projection.weight, projection.bias)

    def inlined(*args: Any, **kwargs: Any) -> Any:
        module._modules["o_proj"] = Inlined().eval()
        try:
            return forward(*args, **kwargs)
        finally:
            module._modules["o_proj"] = projection

    module.forward = inlined


def replace_block(module: Any) -> None:
    module.forward = lambda hidden, *_, **__: hidden


@pytest.mark.slow  # the compiler's import takes seconds; replaced forwards skip hooks in the same way
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", ["", "model.layers.1"])
def test_a_compiled_forward_is_refused(path: str, change: Intervention) -> None:
    """The forward was compiled, and ran, before the hooks were set: compiled code does not look for new ones."""
    lm = make_loaded("llama")
    module: Any = lm.module(path)
    module.forward = torch.compile(module.forward, backend="eager")
    with torch.no_grad():
        whole = lm.model(input_ids=IDS, use_cache=False).logits
        try:
            with headscan.intervene(lm, change):
                changed = lm.model(input_ids=IDS, use_cache=False).logits
        except UnsupportedModelError as problem:
            assert "ran without its hook" in str(problem)
        else:  # this version of torch compiles again, with the hooks
            assert not torch.allclose(changed, whole)
        assert torch.equal(lm.model(input_ids=IDS, use_cache=False).logits, whole)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_wrapper_of_the_model_is_refused() -> None:
    lm = make_loaded("llama")
    wrapper = torch.compile(lm.model, backend="eager")
    with torch.no_grad():
        wrapper(input_ids=IDS, use_cache=False)
        with pytest.raises(UnsupportedModelError, match="ran without its hook"), headscan.intervene(lm, CHANGES[0]):
            wrapper(input_ids=IDS, use_cache=False)
    torch.compiler.reset()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", ["model.layers.2", "model", ""])
def test_a_replaced_forward_is_refused(path: str, change: Intervention) -> None:
    lm = make_loaded("llama")
    module: Any = lm.module(path)
    outputs = lm.model.model(input_ids=IDS)[0] if path.endswith("2") else module(input_ids=IDS)
    module.forward = lambda *_, **__: outputs
    assert_refused(lm, change)


def test_a_projection_that_is_not_called_is_refused() -> None:
    lm = make_loaded("llama")
    replace_attention(lm.module("model.layers.1.self_attn"))
    assert_refused(lm, CHANGES[0])
    assert headscan.collect(lm, IDS, statistics=["entropy"])["entropy"].isfinite().all()
    with pytest.raises(UnsupportedModelError, match="ran without its hook"):
        headscan.collect(lm, IDS, statistics=["output_norm"])


def test_a_wrapped_forward_that_calls_its_modules_has_hooks() -> None:
    lm = make_loaded("llama")
    whole = lm.model(input_ids=IDS).logits
    layer: Any = lm.module("model.layers.0")
    layer.forward = functools.partial(layer.forward)
    with headscan.intervene(lm, CHANGES[0]):
        assert not torch.allclose(lm.model(input_ids=IDS).logits, whole)


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_left_out_on_purpose_need_no_hook(change: Intervention) -> None:
    lm = make_loaded("llama")
    blocks = find_blocks(lm)
    with torch.no_grad(), blocks.keep_inputs([1]) as kept, headscan.intervene(lm, change):
        whole = lm.model(input_ids=IDS, use_cache=False).logits
        with resuming_at(blocks, 1, kept[1].clone()):
            assert torch.equal(lm.model(input_ids=IDS, use_cache=False).logits, whole)
        with running_range(blocks.all, 0, 2):
            lm.model(input_ids=IDS, use_cache=False)
        # `generate` drafts tokens with the first layers like this.
        lm.model.config.num_hidden_layers = 2
        lm.model(input_ids=IDS, use_cache=False)
        lm.model.config.num_hidden_layers = 3
        lm.model(input_ids=IDS, use_cache=False)


def test_a_failed_pass_raises_its_own_error_and_the_next_one_is_checked() -> None:
    lm = make_loaded("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("full")

    with headscan.intervene(lm, CHANGES[0]):
        hook = lm.module("model.layers.1").register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="full"):
            lm.model(input_ids=IDS)
        hook.remove()
        lm.model(input_ids=IDS)
        replace_block(lm.module("model.layers.2"))
        with pytest.raises(UnsupportedModelError, match=r"layers\.2.* \(1 of 3 layers\)"):
            lm.model(input_ids=IDS)


@pytest.mark.parametrize("site", ["encoder", "self", "cross"])
def test_generation_of_an_encoder_decoder_runs_the_encoder_once(site: str) -> None:
    lm = make_loaded("t5")
    options: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True, "decoder_start_token_id": 0}
    whole = lm.model.generate(IDS, **options).logits[0]
    with headscan.intervene(lm.at(site), headscan.HeadMask([(0, head) for head in range(lm.at(site).grid.shape[1])])):
        assert not torch.allclose(lm.model.generate(IDS, **options).logits[0], whole)


def test_a_context_without_a_pass_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A traced, exported or captured copy of the model does not run the model, so its hooks cannot notice."""
    lm = make_loaded("llama")
    with caplog.at_level(logging.WARNING, "headscan"), headscan.intervene(lm, CHANGES[0]):
        pass
    (message,) = caplog.messages
    assert message.startswith("no pass of LlamaForCausalLM ran while a hook was open on it: traced, exported and")
    caplog.clear()
    with headscan.intervene(lm, CHANGES[0]):
        lm.model(input_ids=IDS)
    assert not caplog.messages


def less_first(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Attention that is no softmax over all keys: the first one counts a tenth."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT) * module.scaling
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    scores[..., 0] -= 2.3
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(AttentionInterface._global_mapping, "less_first", less_first)
    return "less_first"


def by_method(lm: LoadedModel, name: str) -> None:
    lm.model.set_attn_implementation(name)


def by_hand(lm: LoadedModel, name: str) -> None:
    lm.model.config._attn_implementation = name


@pytest.mark.parametrize("change", [by_method, by_hand])
def test_attention_that_changed_after_loading_is_refused(change: Any, own_attention: str) -> None:
    lm = make_loaded("llama")
    expected = headscan.collect(lm, IDS)["entropy"]
    for known in ("eager", "sdpa"):
        change(lm, known)
        assert torch.equal(headscan.collect(lm, IDS)["entropy"], expected)
    change(lm, own_attention)
    for measure in (headscan.collect, headscan.importance):
        with pytest.raises(UnsupportedModelError, match="attends by 'less_first' now, and attended by 'sdpa' when"):
            measure(lm, IDS)
    again = headscan.load(lm.model)  # its attention is intercepted
    shown = lm.model(input_ids=IDS, output_attentions=True).attentions
    entropy = torch.stack([torch.special.entr(weights).sum(-1).mean(-1) for weights in shown], 1)
    torch.testing.assert_close(headscan.collect(again, IDS)["entropy"], entropy)
    change(lm, "sdpa")
    assert torch.equal(headscan.collect(lm, IDS)["entropy"], expected)


def test_a_function_that_takes_the_place_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_loaded("llama")
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", less_first)
    with pytest.raises(UnsupportedModelError, match="attends by 'sdpa' now"):
        headscan.collect(lm, IDS)
