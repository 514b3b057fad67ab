"""Importance equals a batch-of-one reference on every family, site and loss."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

import headscan
from headscan.architectures import ENCODER_DECODERS, ENCODERS, FAMILIES, VOCABULARY
from headscan.attention.discovery import discover
from headscan.errors import NotFiniteError, SequenceError, UnsupportedModelError
from headscan.gradients import head_importance
from headscan.gradients.head_importance import head_gradients, importance
from headscan.gradients.losses import ClassificationLoss, Loss, MaskedTokenLoss, NextTokenLoss, TargetTextLoss
from headscan.models.loaded_model import LoadedModel, Sharding
from tests.devices import on
from tests.instrument.gradients.gradient_oracle import next_token_loss, traced
from tests.small_models import distinct_first, make_loaded, make_model

LENGTHS = [40, 33, 21]
LABEL_LENGTHS = [7, 12, 9]
MASK = 5


def some_ids(seed: int = 0, tokens: int = max(LENGTHS)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, VOCABULARY, (len(LENGTHS), tokens), generator=generator)


def exact(family: str) -> LoadedModel:
    """Return a model in float64, or in float32 if it runs in no other dtype."""
    try:
        return make_loaded(family, dtype=torch.float64)
    except UnsupportedModelError:  # its experts have no kernel in float64
        return make_loaded(family)


def check(lm: LoadedModel, loss: Loss, of_one, bound: float | None = None) -> None:
    """Compare with ``of_one(row)``, the loss of one sequence without padding."""
    found = head_gradients(lm, loss)
    assert set(found) == set(lm.grid.kinds)
    bound = bound or (1e-5 if lm.model.dtype == torch.float64 else 1e-4)
    for kind in lm.grid.kinds:
        for row in range(len(LENGTHS)):
            expected = traced(lm.at(kind), lambda row=row: of_one(row))
            for layer, each in expected.items():
                for ours, theirs in (
                    (found[kind].gates.abs(), each.importance_H),
                    (found[kind].tokens, each.token_importance_H),
                ):
                    own, theirs = ours[row, layer, : len(theirs)], theirs.cpu()
                    assert (own - theirs).norm() <= bound * theirs.norm(), (kind, row, layer)
            absent = [layer for layer in range(lm.grid.num_layers) if layer not in expected]
            assert found[kind].gates[row, absent].isnan().all() and found[kind].tokens[row, absent].isnan().all()


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no graph of all blocks, however small."""
    monkeypatch.setattr(head_importance, "GRAPH_BYTES", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_decoders(family: str, by_blocks: None, device: torch.device) -> None:
    lm, ids = on(device, exact(family)), some_ids().to(device)
    check(lm, NextTokenLoss.of(ids, LENGTHS), lambda row: next_token_loss(lm, ids[row, : LENGTHS[row]]))


@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_graphs_of_all_blocks_give_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, loss = exact(family), NextTokenLoss.of(some_ids(), LENGTHS)
    calls: list[object] = []
    monkeypatch.setattr("headscan.gradients.backward.same_output", lambda *two: bool(calls.append(two)) or True)
    whole = head_gradients(lm, loss)["self"].gates
    assert not calls
    monkeypatch.setattr(head_importance, "GRAPH_BYTES", 0)
    found = head_gradients(lm, loss)["self"].gates
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-4, equal_nan=True)


SHARDINGS = {"two devices": Sharding(("cpu", "cpu"), ((0, 1), (1, 3))), "disk": Sharding(("cpu",), ((0, 1),), "disk")}


@pytest.mark.parametrize("name", SHARDINGS)
def test_sharded_encoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_model("bert").save_pretrained(tmp_path / "bert")
    whole, sharded = (headscan.load(tmp_path / "bert", device=device) for device in ("cpu", SHARDINGS[name]))
    loss = MaskedTokenLoss.of(some_ids(), LENGTHS, MASK)
    expected, found = (head_gradients(lm, loss)[lm.grid.kind].tokens for lm in (whole, sharded))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert all(weight.requires_grad for weight in sharded.model.parameters())


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str) -> None:
    lm = make_loaded(family, dtype=torch.float64)
    loss = MaskedTokenLoss.of(some_ids(), LENGTHS, MASK)

    def of_one(row: int) -> torch.Tensor:
        logits = lm.model(input_ids=loss.ids[row : row + 1, : LENGTHS[row]]).logits[0]
        places = [column for each, column in zip(loss.rows, loss.columns, strict=True) if each == row]
        return F.cross_entropy(logits[places], some_ids()[row, places])

    check(lm, loss, of_one)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoders(family: str) -> None:
    lm = make_loaded(family, dtype=torch.float64)
    lm.model.config.decoder_start_token_id = 1  # that of Marian is outside of this vocabulary
    labels = some_ids(1, max(LABEL_LENGTHS))
    loss = TargetTextLoss.of(lm, some_ids(), LENGTHS, labels, LABEL_LENGTHS)

    def of_one(row: int) -> torch.Tensor:
        own = labels[row : row + 1, : LABEL_LENGTHS[row]]
        start = torch.full((1, 1), loss.start_id)
        decoder_ids = torch.cat([start, own[:, :-1]], 1)
        ids = some_ids()[row : row + 1, : LENGTHS[row]]
        logits = lm.model(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False).logits[0]
        return F.cross_entropy(logits, own[0])

    check(lm, loss, of_one)


def make_classifier(model_type: str) -> LoadedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, pad_token_id=0, num_labels=4, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval().double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return LoadedModel(model, None, discover(model), model_type)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "llama"])
def test_classifiers(model_type: str) -> None:
    lm, labels = make_classifier(model_type), [3, 0, 2]
    ids = some_ids()
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = 0  # a decoder finds the last token by its padding
    loss = ClassificationLoss.of(lm, ids, LENGTHS, labels)

    def of_one(row: int) -> torch.Tensor:
        logits = lm.model(input_ids=ids[row : row + 1, : LENGTHS[row]]).logits
        return F.cross_entropy(logits, torch.tensor(labels[row : row + 1]))

    check(lm, loss, of_one)


def test_importance_is_absolute_by_token_or_sequence_and_entropy_is_that_of_collect() -> None:
    lm = make_loaded("llama")
    found = headscan.importance(lm, some_ids(), LENGTHS)
    assert (
        torch.equal(found["sequence_importance"], found["gate_gradient"].abs()) and (found["gate_gradient"] < 0).any()
    )
    tokens = head_gradients(lm, NextTokenLoss.of(some_ids(), LENGTHS))["self"].tokens
    assert torch.equal(found["importance"], tokens) and (tokens > found["sequence_importance"]).all()
    assert torch.equal(found["entropy"], headscan.collect(lm, some_ids(), LENGTHS)["entropy"])
    assert all(values.dtype == torch.float32 for values in found.values())


def test_one_kind_of_site_is_chosen_by_the_model() -> None:
    lm = make_loaded("t5", dtype=torch.float64)
    by_site = head_gradients(lm, TargetTextLoss.of(lm, some_ids(), LENGTHS, some_ids(), LENGTHS))
    for kind in ("encoder", "self", "cross"):
        found = importance(lm.at(kind), some_ids(), LENGTHS)
        torch.testing.assert_close(found["gate_gradient"], by_site[kind].gates)
        assert found["entropy"].isfinite().all()


def test_a_gate_of_zero_changes_the_loss_as_its_derivative_says() -> None:
    """A finite difference of the gate itself, by scaling the projection's columns."""
    lm, step = make_loaded("llama", dtype=torch.float64), 2e-3  # norms round to float32
    found = importance(lm, some_ids(), LENGTHS)["gate_gradient"]
    site = lm.grid.sites[1]
    weight = lm.module(site.output_projection).weight
    columns = slice(2 * site.value_dim, 3 * site.value_dim)
    losses = []
    for factor in (1 + step, (1 - step) / (1 + step)):
        weight.data[:, columns] *= factor
        of_all = [next_token_loss(lm, some_ids()[row, : LENGTHS[row]]) for row in range(len(LENGTHS))]
        losses.append(torch.stack(of_all))
    difference = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(found[:, 1, 2].double(), difference, rtol=1e-2, atol=1e-5)


def test_summed_losses_scale_with_the_scored_tokens() -> None:
    lm = make_loaded("llama", dtype=torch.float64)
    mean, total = (importance(lm, some_ids(), LENGTHS, summed=each)["gate_gradient"] for each in (False, True))
    tokens = torch.tensor([length - 1 for length in LENGTHS])[:, None, None]
    torch.testing.assert_close(total, mean * tokens, rtol=1e-5, atol=1e-9)


def test_masked_places_depend_on_the_key_alone() -> None:
    batch = MaskedTokenLoss.of(some_ids(), LENGTHS, MASK, input_keys=[7, 8, 9])
    alone = MaskedTokenLoss.of(some_ids()[1:2, :33], [33], MASK, input_keys=[8])
    assert alone.columns == tuple(c for r, c in zip(batch.rows, batch.columns, strict=True) if r == 1)
    assert len(alone.columns) == 5 and not torch.isin(alone.targets, torch.tensor([MASK])).any()
    ids = torch.tensor([[7, 8, 9, 10]])
    assert MaskedTokenLoss.of(ids, [4], MASK, never=[7, 9, 10]).columns == (1,)


def test_errors_name_the_fix() -> None:
    lm = make_loaded("llama")
    with pytest.raises(UnsupportedModelError, match="no mask token"):
        importance(make_loaded("bert"), some_ids())
    with pytest.raises(UnsupportedModelError, match="is a classifier, and text has no labels"):
        importance(make_classifier("bert"), some_ids())
    with pytest.raises(UnsupportedModelError, match="not a sequence classifier"):
        ClassificationLoss.of(lm, some_ids(), LENGTHS, [0, 0, 0])
    with pytest.raises(SequenceError, match=r"labels \[0, 9, 0\].*limit 0 to 3"):
        ClassificationLoss.of(make_classifier("bert"), some_ids(), LENGTHS, [0, 9, 0])
    with pytest.raises(SequenceError, match="scored tokens of sequence 1: 0"):
        importance(lm, some_ids(), [40, 1, 20])
    with pytest.raises(SequenceError, match="no token to mask"):
        MaskedTokenLoss.of(some_ids(), LENGTHS, MASK, never=range(VOCABULARY))
    with pytest.raises(SequenceError, match="share of masked tokens: 0"):
        MaskedTokenLoss.of(some_ids(), LENGTHS, MASK, share=0)
    with pytest.raises(UnsupportedModelError, match=r"first token of the decoder: 58100 \(limit 96\)"):
        importance(make_loaded("marian"), some_ids(), LENGTHS)
    torch.nn.init.constant_(lm.model.model.norm.weight, float("nan"))
    with pytest.raises(NotFiniteError, match=r"derivatives in layer 0, self attention: 18 of 18"):
        importance(lm, some_ids(), LENGTHS)
