"""Backward passes equal those of single sequences, release their tensors, and leave the model as it was."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

import headscan
from headscan.ablation.intervention import intervene
from headscan.ablation.masks import HeadMask
from headscan.architectures import VOCABULARY
from headscan.errors import UnsupportedModelError
from headscan.gradients.backward import backward
from headscan.gradients.losses import NextTokenLoss
from headscan.layers.blocks import find_blocks
from headscan.models.loaded_model import LoadedModel
from tests.devices import on
from tests.instrument.gradients.gradient_oracle import next_token_loss, traced
from tests.small_models import make_loaded

LENGTHS = [40, 33, 21]
#: Grouped heads, biases, parallel blocks, sliding layers, soft caps, learned sinks, own attention weights, recurrent
#: layers, layers that share keys.
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2-softcap", "gemma3", "bloom", "opt", "falcon-alibi")
SINGLE = ("gpt_oss", "qwen3_next", "gemma3n", "gemma4", "mixtral", "deepseek_v3")

Found = dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]]


def some_ids(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)


def visited(lm: LoadedModel, *, summed: bool = False, on: tuple[str, ...] = ("heads", "outputs")) -> Found:
    """Return values and derivatives by place and layer."""
    found: Found = {name: {} for name in on}

    def keep(name):
        def visit(site, values, gradient) -> None:
            assert site.layer not in found[name]
            assert not values.requires_grad and not gradient.requires_grad
            found[name][site.layer] = values, gradient

        return visit

    loss = NextTokenLoss.of(some_ids().to(lm.device), LENGTHS, summed=summed)
    backward(lm, loss, **{f"on_{name}": keep(name) for name in on})
    return found


def check(lm: LoadedModel, found: Found, bound: float, *, reduction: str = "mean") -> None:
    for row, length in enumerate(LENGTHS):
        expected = traced(
            lm, lambda row=row, length=length: next_token_loss(lm, some_ids()[row, :length].to(lm.device), reduction)
        )
        assert found["heads"].keys() == found["outputs"].keys() == expected.keys()
        for layer, each in expected.items():
            heads, gradient = (x[row, :length] for x in found["heads"][layer])
            assert (heads - each.heads_NHD).norm() <= bound * each.heads_NHD.norm()
            assert (gradient - each.heads_gradient_NHD).norm() <= bound * each.heads_gradient_NHD.norm()
            by_output = found["outputs"][layer][1][row, :length]
            assert (by_output - each.output_gradient_NE).norm() <= bound * each.output_gradient_NE.norm()
            assert not found["heads"][layer][1][row, length:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES + SINGLE)
def test_derivatives_are_those_of_single_sequences(family: str, device: torch.device) -> None:
    dtype = torch.float32 if family in SINGLE else torch.float64
    lm = on(device, make_loaded(family, dtype=dtype))
    check(lm, visited(lm), 2e-4 if family in SINGLE else 1e-6)


def test_summed_losses_have_summed_derivatives() -> None:
    lm = make_loaded("llama", dtype=torch.float64)
    check(lm, visited(lm, summed=True), 1e-6, reduction="sum")


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_blocks_that_do_not_repeat_are_differentiated_whole(monkeypatch, fails_at: int) -> None:
    """Every layer is still visited once: `visited` checks it."""
    lm = make_loaded("qwen2", dtype=torch.float64)
    answers = iter([True] * fails_at + [False])
    monkeypatch.setattr("headscan.gradients.backward.same_output", lambda *_: next(answers))
    check(lm, visited(lm), 1e-6)


def test_half_precision_gives_float32_derivatives() -> None:
    exact, half = (visited(make_loaded("llama", dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    for layer, (heads, gradient) in half["heads"].items():
        assert heads.dtype == torch.bfloat16 and gradient.dtype == torch.float32
        expected = exact["heads"][layer][1]
        assert (gradient - expected).norm() < 0.1 * expected.norm()


def test_one_place_alone_gives_the_same() -> None:
    lm = make_loaded("llama", dtype=torch.float64)
    both = visited(lm)
    for name in ("heads", "outputs"):
        alone = visited(lm, on=(name,))[name]
        assert list(alone) == [2, 1, 0]
        for layer, (values, gradient) in alone.items():
            assert torch.equal(values, both[name][layer][0])
            torch.testing.assert_close(gradient, both[name][layer][1])


def test_tensors_of_a_layer_are_released_before_the_next() -> None:
    lm, alive = make_loaded("llama"), []

    def visit(site, values, gradient) -> None:
        assert [each() for each in alive] == [None] * len(alive)
        alive.extend([weakref.ref(values), weakref.ref(gradient)])

    backward(lm, NextTokenLoss.of(some_ids(), LENGTHS), on_heads=visit)
    assert [each() for each in alive] == [None] * 2 * 3


def test_ablated_heads_are_visited_as_zeros() -> None:
    lm = make_loaded("llama")
    with intervene(lm, HeadMask([(1, 2)])):
        heads, gradient = visited(lm)["heads"][1]
    assert not heads[:, :, 2].any() and heads[:, :, 3].any() and gradient[:, :, 2].any()


def test_inference_mode_is_left_for_the_pass() -> None:
    lm = make_loaded("llama")
    expected = visited(lm)["heads"]
    with torch.inference_mode():
        found = visited(lm)["heads"]
    for layer in expected:
        assert torch.equal(found[layer][1], expected[layer][1])


@pytest.mark.parametrize("where", ["visitor", "repeat"])
def test_an_exception_leaves_no_hook_and_no_frozen_weight(monkeypatch, where: str) -> None:
    lm = make_loaded("llama")
    find_blocks(lm)
    before = lm.model(input_ids=some_ids()).logits
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in lm.model.modules()]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    if where == "repeat":
        monkeypatch.setattr("headscan.gradients.backward.same_output", fail)
    with pytest.raises(ZeroDivisionError):
        backward(lm, NextTokenLoss.of(some_ids(), LENGTHS), on_heads=fail)
    assert all(weight.requires_grad and weight.grad is None for weight in lm.model.parameters())
    after = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in lm.model.modules()]
    assert after == hooks
    assert torch.equal(lm.model(input_ids=some_ids()).logits, before)


def test_train_mode_is_refused() -> None:
    lm = make_loaded("llama")
    lm.model.train()
    with pytest.raises(UnsupportedModelError, match="train mode"):
        visited(lm)


class _Packed(torch.nn.Module):
    """A projection with an integer weight. ``lost`` says what its kernel does to derivatives."""

    def __init__(self, projection: torch.nn.Linear, lost: str) -> None:
        super().__init__()
        self.in_features, self.lost = projection.in_features, lost
        self.register_buffer("packed", (projection.weight.detach() * 4096).round().to(torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        seen = {"all": x.detach(), "half": (x + x.detach()) / 2, "none": x}[self.lost]
        return seen @ (self.packed.to(x.dtype) / 4096).T


@pytest.mark.parametrize("path", ["model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj"])
@pytest.mark.parametrize("lost", ["all", "half", "none"])
def test_quantised_weights_without_derivatives_are_refused(lost: str, path: str) -> None:
    """A residual stream passes derivatives around such a weight, so the loss of them would not show."""
    lm = make_loaded("llama")
    parent, _, leaf = path.rpartition(".")
    setattr(lm.module(parent), leaf, _Packed(lm.module(path), lost).eval())
    ids = torch.arange(5, 15)[None]
    if lost == "none":
        expected = headscan.importance(make_loaded("llama"), ids)["importance"]
        torch.testing.assert_close(headscan.importance(lm, ids)["importance"], expected, rtol=0.05, atol=1e-3)
        return
    with pytest.raises(
        UnsupportedModelError, match=rf"^{path}, a _Packed, has quantised weights through which no deri"
    ):
        headscan.importance(lm, ids)
