"""Backward passes of importance need no more memory than plain ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, BertConfig

from headscan.attention.discovery import discover
from headscan.gradients import head_importance
from headscan.gradients.head_importance import head_gradients
from headscan.gradients.losses import MaskedTokenLoss, NextTokenLoss
from headscan.models.loaded_model import LoadedModel
from tests.benchmarks.overhead import make_model, peak_bytes

SEQUENCES, TOKENS = 2, 128


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no graph of all blocks, however small."""
    monkeypatch.setattr(head_importance, "_GRAPH_BYTES", 0)


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


@pytest.mark.parametrize("plain", [plain_backward, frozen_backward])
def test_decoders_need_the_memory_of_about_one_block(plain, by_blocks: None) -> None:
    lm = make_model("135M", TOKENS, "cpu", torch.float32, layers=4)
    ids = torch.randint(6, 1024, (SEQUENCES, TOKENS))
    loss = NextTokenLoss.of(ids, [TOKENS] * SEQUENCES)
    head_gradients(lm, loss)
    assert peak_bytes(lm, lambda: head_gradients(lm, loss)) < plain(lm, ids)


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
