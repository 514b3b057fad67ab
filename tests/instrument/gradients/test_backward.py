"""Backward passes equal those of single sequences, release their tensors, and leave the model as it was.

They need no more memory than plain ones.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, BertConfig

import headscan
from headscan.ablation.intervention import intervene
from headscan.ablation.masks import HeadMask
from headscan.architectures import VOCABULARY
from headscan.attention.discovery import discover
from headscan.errors import UnsupportedModelError
from headscan.gradients import head_importance
from headscan.gradients.backward import backward
from headscan.gradients.head_importance import head_gradients
from headscan.gradients.losses import MaskedTokenLoss, NextTokenLoss
from headscan.layers.blocks import find_blocks
from headscan.models.loaded_model import LoadedModel
from tests.benchmarks.overhead import make_model, peak_bytes
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


def visited(lm: LoadedModel, *, on: tuple[str, ...] = ("heads", "outputs")) -> Found:
    """Return values and derivatives by place and layer."""
    found: Found = {name: {} for name in on}

    def keep(name):
        def visit(site, values, gradient) -> None:
            assert site.layer not in found[name]
            assert not values.requires_grad and not gradient.requires_grad
            found[name][site.layer] = values, gradient

        return visit

    loss = NextTokenLoss.of(some_ids().to(lm.device), LENGTHS)
    backward(lm, loss, **{f"on_{name}": keep(name) for name in on})
    return found


def check(lm: LoadedModel, found: Found, bound: float) -> None:
    for row, length in enumerate(LENGTHS):
        expected = traced(
            lm, lambda row=row, length=length: next_token_loss(lm, some_ids()[row, :length].to(lm.device))
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


SEQUENCES, TOKENS = 2, 128


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no graph of all blocks, however small."""
    monkeypatch.setattr(head_importance, "GRAPH_BYTES", 0)


def plain_backward(lm: LoadedModel, ids: torch.Tensor) -> int:
    """Return the peak bytes of a plain backward pass by the weights."""

    def way() -> None:
        with torch.enable_grad():
            logits = lm.model(input_ids=ids).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        lm.model.zero_grad()

    return peak_bytes(lm, way)


def frozen_backward(lm: LoadedModel, ids: torch.Tensor) -> int:
    """Return the peak bytes of a plain backward pass by the embeddings alone."""
    lm.model.requires_grad_(False)
    embedded = lm.model.get_input_embeddings()(ids).requires_grad_()

    def way() -> None:
        with torch.enable_grad():
            logits = lm.model(inputs_embeds=embedded).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    found = peak_bytes(lm, way)
    lm.model.requires_grad_(True)
    return found


def test_decoders_need_the_memory_of_about_one_block(by_blocks: None) -> None:
    lm = make_model("135M", TOKENS, "cpu", torch.float32, layers=4)
    ids = torch.randint(6, 1024, (SEQUENCES, TOKENS))
    loss = NextTokenLoss.of(ids, [TOKENS] * SEQUENCES)
    head_gradients(lm, loss)
    assert peak_bytes(lm, lambda: head_gradients(lm, loss)) < frozen_backward(lm, ids)


def test_memory_grows_by_the_input_of_a_block(by_blocks: None) -> None:
    """A block keeps tens of hidden states for its backward pass."""
    ids = torch.randint(6, 1024, (SEQUENCES, TOKENS))
    peaks = []
    for layers in (2, 5):
        lm = make_model("135M", TOKENS, "cpu", torch.float32, layers=layers)
        loss = NextTokenLoss.of(ids, [TOKENS] * SEQUENCES)
        head_gradients(lm, loss)
        weights = sum(weight.nbytes for weight in lm.model.parameters())
        peaks.append(peak_bytes(lm, lambda lm=lm, loss=loss: head_gradients(lm, loss)) - weights)
    hidden = SEQUENCES * TOKENS * 576 * 4
    assert peaks[1] - peaks[0] < 3 * 1.2 * hidden


def test_a_graph_of_all_blocks_needs_less_than_a_plain_pass() -> None:
    lm = make_model("135M", TOKENS, "cpu", torch.float32, layers=4)
    ids = torch.randint(6, 1024, (SEQUENCES, TOKENS))
    loss = NextTokenLoss.of(ids, [TOKENS] * SEQUENCES)
    head_gradients(lm, loss)
    assert peak_bytes(lm, lambda: head_gradients(lm, loss)) < plain_backward(lm, ids)


def test_encoders_need_less_than_a_plain_pass() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = AutoModelForMaskedLM.from_config(BertConfig(vocab_size=1024, **sizes)).eval()
    lm = LoadedModel(model, None, discover(model), "bert")
    ids = torch.randint(6, 1024, (SEQUENCES, TOKENS))
    loss = MaskedTokenLoss.of(ids, [TOKENS] * SEQUENCES, 5)
    assert peak_bytes(lm, lambda: head_gradients(lm, loss)) < plain_backward(lm, ids)
