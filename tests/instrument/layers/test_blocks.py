"""Forward passes that begin at a layer: they end as whole ones, in every family or not at all, and leave nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

import headscan
from headscan.architectures import FAMILIES, VOCABULARY
from headscan.errors import HeadIndexError, InterventionError, UnsupportedModelError
from headscan.layers.blocks import Blocks, cannot_resume, find_blocks, resuming_at
from headscan.models.loaded_model import LoadedModel
from tests.devices import on
from tests.small_models import distinct_first, make_loaded

#: Layers that a pass cannot begin at, since they or others above them borrow keys and values of a lower one.
BORROWERS = {"gemma3n": {1, 2}, "gemma4": {2}}
#: Layers whose attention does more than project its heads' outputs: others borrow its keys, or it adds the residual.
WHOLE_LAYERS = {"gemma3n": {0, 1}, "gemma4": {1}, "bloom": {0, 1, 2}}
LENGTHS = torch.tensor([11, 6, 9])
#: Longer, with what follows it, than the families' sliding windows.
PREFIX = 15


def ids_of(sequences: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(5, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def ragged() -> tuple[Tensor, Tensor]:
    """Three sequences, padded on the right, and which of their tokens are real."""
    real = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
    return ids_of(3, real.shape[1]).where(real, 1), real


def llama() -> tuple[LoadedModel, Blocks]:
    lm = make_loaded("llama")
    return lm, find_blocks(lm)


def check_resuming(blocks: Blocks, layers: set[int], **kwargs: Any) -> None:
    """A pass that enters at a layer gives the real tokens the logits of a whole pass, bit for bit."""

    def logits() -> Tensor:
        return blocks.lm.model(input_ids=ids, attention_mask=mask.long(), **copy.deepcopy(kwargs)).logits[real]

    ids, real = (x.to(blocks.lm.device) for x in ragged())
    past = PREFIX if "past_key_values" in kwargs else 0
    mask = torch.cat([real.new_ones(len(ids), past), real], 1)
    with blocks.keep_inputs(layers) as hidden:
        whole = logits()
    for layer in layers:
        with resuming_at(blocks, layer, hidden[layer]):
            same(logits(), whole, layer)


def same(found: Tensor, expected: Tensor, layer: int) -> None:
    """Compare numbers bit for bit on a CPU; some kernels of a GPU sum in a changing order."""
    if found.device.type == "cpu":
        assert torch.equal(found, expected), layer
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_a_pass_enters_at_a_layer_and_ends_as_a_whole_one(family: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family))
    blocks = find_blocks(lm)
    assert len(blocks.all) == lm.grid.num_layers
    refused = cannot_resume(blocks)
    assert refused.keys() == BORROWERS.get(family, set()), refused
    layers = set(range(len(blocks.all))) - refused.keys()
    check_resuming(blocks, layers, use_cache=False)
    prefix = lm.model(input_ids=ids_of(3, PREFIX, seed=4).to(device), use_cache=True)
    check_resuming(blocks, layers, use_cache=True, past_key_values=prefix.past_key_values)


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_a_pass_goes_on_behind_the_attention_of_a_layer_as_a_whole_one(family: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family))
    blocks = find_blocks(lm)
    layers = {site.layer for site in lm.grid.sites}
    refused = cannot_resume(blocks, layers, behind_attention=True)
    assert refused.keys() == WHOLE_LAYERS.get(family, set()), refused
    ids, before = ids_of(3, 9).to(device), ids_of(3, PREFIX, seed=4).to(device)
    prefix = lm.model(input_ids=before, use_cache=True).past_key_values
    for cached in (False, True):

        def logits(cached: bool = cached) -> Tensor:
            past = {"past_key_values": copy.deepcopy(prefix), "use_cache": True} if cached else {"use_cache": False}
            return lm.model(input_ids=ids, **past).logits

        with blocks.keep_inputs(layers) as hidden, blocks.keep_heads(layers) as heads:
            logits()
        for layer in layers - refused.keys():
            with headscan.intervene(lm, headscan.HeadMask([(layer, 1)])):
                expected = logits()
                with resuming_at(blocks, layer, hidden[layer]), blocks.with_heads(layer, heads[layer]):
                    same(logits(), expected, layer)


def test_attention_does_not_run_where_its_heads_are_known() -> None:
    lm, blocks = llama()
    with blocks.keep_heads({1}) as heads:
        lm.model(input_ids=ids_of(2, 5))
    assert heads.keys() == {1}
    ran: list[nn.Module] = []
    for module in lm.model.modules():
        module.register_forward_hook(lambda module, *_: ran.append(module))
    attention = lm.module("model.layers.1.self_attn")
    with blocks.with_heads(1, heads[1]):
        lm.model(input_ids=ids_of(2, 5))
    assert set(ran) & set(attention.modules()) == {attention, lm.module("model.layers.1.self_attn.o_proj")}
    assert "forward" not in vars(attention)


def test_attention_that_adds_the_residual_is_detected() -> None:
    lm, blocks = llama()
    attention = lm.module("model.layers.1.self_attn")
    attention.register_forward_hook(lambda _, args, out: (out[0] + 0.1, *out[1:]))
    assert cannot_resume(blocks, behind_attention=True) == {}  # a hook on the module runs in both
    own = attention.forward
    attention.forward = lambda *args, **kwargs: (own(*args, **kwargs)[0] + kwargs["hidden_states"], None)
    assert cannot_resume(blocks) == {}
    assert cannot_resume(blocks, behind_attention=True).keys() == {1}
    with pytest.raises(UnsupportedModelError, match="the attention of layer 7 does not take"):
        blocks.with_heads(7, torch.zeros(1, 1, 1, 1))


def test_blocks_below_do_not_run_and_masks_above_work() -> None:
    lm, blocks = llama()
    ids, mask = ids_of(3, 12), headscan.HeadMask([(2, 1), (2, 4)])
    with headscan.intervene(lm, mask):
        expected = lm.model(input_ids=ids).logits
    with blocks.keep_inputs([2]) as hidden:
        lm.model(input_ids=ids)
    ran: list[nn.Module] = []
    for module in lm.model.modules():
        module.register_forward_hook(lambda module, *_: ran.append(module))
    with headscan.intervene(lm, mask) as record, resuming_at(blocks, 2, hidden[2]) as resumed:
        assert torch.equal(lm.model(input_ids=ids).logits, expected)
        resumed.hidden_in = hidden[2][:2]
        assert torch.equal(lm.model(input_ids=ids[:2]).logits, expected[:2])
        assert record.ablated is not None and record.ablated.nonzero().tolist() == [
            [row, layer, head] for row in range(2) for layer, head in mask.heads
        ]
    assert not set(ran) & {*blocks.all[0].module.children(), *blocks.all[1].module.children()}


def test_a_cache_grows_in_the_layers_that_run() -> None:
    lm, blocks = llama()
    cache = lm.model(input_ids=ids_of(1, 6), use_cache=True).past_key_values
    more = ids_of(1, 3, seed=4)
    with blocks.keep_inputs([1]) as hidden:
        lm.model(input_ids=more, past_key_values=copy.deepcopy(cache))
    with resuming_at(blocks, 1, hidden[1]):
        lm.model(input_ids=more, past_key_values=cache)
        assert [cache.get_seq_length(layer) for layer in range(3)] == [6, 9, 9]
        with pytest.raises(InterventionError, match="6 tokens in some layers and 9 in others"):
            lm.model(input_ids=more, past_key_values=cache)


def test_kept_hidden_states_have_no_gradient() -> None:
    lm, blocks = llama()
    with torch.enable_grad(), blocks.keep_inputs([1]) as hidden:
        lm.model(input_ids=ids_of(1, 4))
    assert not hidden[1].requires_grad


def test_hidden_state_between_blocks_is_detected() -> None:
    _, blocks = llama()
    told: dict[str, Tensor] = {}
    lower, upper = (blocks.all[layer].module.get_submodule("mlp") for layer in (1, 2))
    lower.register_forward_hook(lambda _, args, out: told.update(secret=out))
    upper.register_forward_hook(lambda _, args, out: out + 0.1 * told["secret"][:, -args[0].shape[1] :])
    reasons = cannot_resume(blocks)
    assert reasons.keys() == {2}
    assert reasons[2].startswith("a pass without a KV cache differs by")
    assert cannot_resume(blocks, [0]) == {}


def test_a_model_that_cannot_continue_from_a_cache_is_detected() -> None:
    lm, blocks = llama()

    def refuse(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not None:
            raise ValueError("no caches here")

    lm.model.register_forward_pre_hook(refuse, with_kwargs=True)
    expected = "a pass with a KV cache fails: ValueError: no caches here"
    assert cannot_resume(blocks) == dict.fromkeys(range(3), expected)
    with pytest.raises(HeadIndexError, match=r"no layer 5 in llama \(limit 2\)"):
        cannot_resume(blocks, [5])


def test_running_out_of_memory_is_not_a_reason() -> None:
    lm, blocks = llama()

    def run_out(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    lm.model.register_forward_pre_hook(run_out, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        cannot_resume(blocks)


def test_blocks_are_found_in_one_forward_pass() -> None:
    lm, blocks = llama()
    passes: list[nn.Module] = []
    lm.model.base_model.register_forward_pre_hook(lambda module, _: passes.append(module))
    assert find_blocks(lm).all is blocks.all
    assert find_blocks(lm.at("self")).all is blocks.all
    assert not passes


def state_of(model: nn.Module) -> list[Any]:
    """Return the state that hooks and replaced forwards would change."""
    return [
        (name, id(module), dict(module._forward_pre_hooks), dict(module._forward_hooks), vars(module).get("forward"))
        for name, module in model.named_modules()
    ] + list(model.state_dict())


class Loading(ModelHook):
    """Counts how often accelerate would load a block's weights."""

    loads = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.loads += 1
        return args, kwargs


def test_nothing_is_left_behind_and_skipped_weights_are_not_loaded() -> None:
    lm, blocks = llama()
    hook = Loading()
    add_hook_to_module(blocks.all[0].module, hook)
    before, ids = state_of(lm.model), ids_of(2, 5)
    with blocks.keep_inputs([1, 2]) as hidden:
        logits = lm.model(input_ids=ids).logits
    assert hook.loads == 1
    with resuming_at(blocks, 1, hidden[1]), resuming_at(blocks, 2, hidden[2]):
        assert list(lm.model.state_dict()) == [name for name in before if isinstance(name, str)]
        assert torch.equal(lm.model(input_ids=ids).logits, logits)
    with (
        pytest.raises(InterventionError, match=r"hidden states for layer 2 .*: \(2, 5, 48\) instead of \(1, 5, 48\)"),
        blocks.keep_inputs([0]),
        resuming_at(blocks, 2, hidden[2]),
    ):
        lm.model(input_ids=ids[:1])
    assert hook.loads == 1
    assert state_of(lm.model) == before
    assert torch.equal(lm.model(input_ids=ids).logits, logits)


def test_models_without_separable_blocks_are_refused() -> None:
    lm, blocks = llama()
    with pytest.raises(HeadIndexError, match=r"no layer 3 in llama \(limit 2\)"):
        resuming_at(blocks, 3, torch.zeros(1, 1, 48)).__enter__()
    with pytest.raises(HeadIndexError, match="layer -1"), blocks.keep_inputs([-1]):
        pass
    with pytest.raises(UnsupportedModelError, match="not a decoder"):
        find_blocks(make_loaded("bart"))
    layers = lm.module("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[2] = layers[1]
    with pytest.raises(UnsupportedModelError, match=r"model\.layers run in the order 0, 1, 2, 1, 2"):
        find_blocks(lm)
    layers[0].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="is compiled"):
        find_blocks(lm)
