"""Rules read lengths from the padding mask of a pass, and fail on other padding than on the right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headscan
from headscan.architectures import ENCODERS, FAMILIES, VOCABULARY
from headscan.errors import HeadscanError, InterventionError
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from tests.small_models import distinct_first, make_loaded

REAL, WIDTH = (20, 13), 32
SCORES = ("output_norm_ln", "first_token_weight")


def padded(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Ids and padding mask (2, N)."""
    ids = torch.randint(5, VOCABULARY, (2, WIDTH), generator=torch.Generator().manual_seed(seed))
    return ids, (torch.arange(WIDTH) < torch.tensor(REAL)[:, None]).long()


def rule_for(lm: LoadedModel, score: str) -> headscan.HeadRule:
    """A rule that ablates about half of the heads of the first sequence."""
    alone = headscan.collect(lm, padded()[0][:1, : REAL[0]])
    return headscan.HeadRule(score, headscan.score(alone, score).nanquantile(0.5).item())


def zeroed_alone(lm: LoadedModel, rule: headscan.HeadRule) -> Tensor:
    """Return the heads that the rule ablates in each sequence alone (2, L, H)."""
    ids, rows = padded()[0], []
    for row, length in enumerate(REAL):
        with headscan.intervene(lm, rule) as record:
            run_forward(lm.model, {"input_ids": ids[row : row + 1, :length]})
        rows.append(record.ablated)
    return torch.cat(rows)


@pytest.mark.parametrize("family", distinct_first([*FAMILIES, *ENCODERS]))
def test_lengths_come_from_the_mask_of_the_pass(family: str) -> None:
    lm = make_loaded(family)
    ids, mask = padded()
    rule = rule_for(lm, "output_norm_ln")
    expected = zeroed_alone(lm, rule)
    with headscan.intervene(lm, rule) as record:
        lm.model(input_ids=ids, attention_mask=mask)
    assert expected.any() and torch.equal(record.ablated, expected)


@pytest.mark.parametrize("score", SCORES)
def test_collect_hands_its_lengths_to_a_rule(score: str) -> None:
    lm = make_loaded("llama")
    ids, _ = padded()
    rule = rule_for(lm, score)
    expected = zeroed_alone(lm, rule)
    for statistics in (None, ["output_norm"]):
        with headscan.intervene(lm, rule) as record:
            inside = headscan.collect(lm, ids, REAL, statistics=statistics)
        assert torch.equal(record.ablated, expected)
    for row, length in enumerate(REAL):
        with headscan.intervene(lm, rule):
            alone = headscan.collect(lm, ids[row : row + 1, :length], statistics=["output_norm"])
        torch.testing.assert_close(inside["output_norm"][row], alone["output_norm"][0], rtol=1e-5, atol=1e-6)


def test_collect_stays_on_the_fused_path() -> None:
    lm = make_loaded("llama")
    ids, _ = padded()
    with headscan.intervene(lm, rule_for(lm, "output_norm_ln")):
        headscan.collect(lm, ids, REAL, path="fused", statistics=["entropy"])


@pytest.mark.parametrize("site", ["encoder", "self"])
def test_each_side_of_an_encoder_decoder_has_its_own_mask(site: str) -> None:
    lm = make_loaded("bart").at(site)
    ids, mask = padded()
    decoder_ids, decoder_mask = ids.flip(0)[:, :25].contiguous(), mask.flip(0)[:, :25]
    rule = headscan.HeadRule("output_norm_ln", 0.9)
    rows = []
    for row in range(2):
        with headscan.intervene(lm, rule) as record:
            lm.model(
                input_ids=ids[row : row + 1, : REAL[row]],
                decoder_input_ids=decoder_ids[row : row + 1, : int(decoder_mask[row].sum())],
            )
        rows.append(record.ablated)
    expected = torch.cat(rows)
    with headscan.intervene(lm, rule) as record:
        lm.model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, decoder_attention_mask=decoder_mask)
    assert torch.equal(record.ablated, expected)
    for measured in ("encoder", "self", "cross"):
        with headscan.intervene(lm, rule) as record:
            headscan.collect(
                lm.at(measured),
                ids,
                REAL,
                decoder_input_ids=decoder_ids,
                decoder_lengths=REAL[::-1],
                statistics=["output_norm"],
            )
        assert torch.equal(record.ablated, expected)


@pytest.mark.parametrize("lengths", [None, REAL])
def test_padding_in_front_of_tokens_is_refused(lengths: tuple[int, int] | None) -> None:
    lm = make_loaded("llama")
    ids, mask = padded()
    hole = mask.clone()
    hole[1, 4] = 0
    rule = headscan.HeadRule("output_norm_ln", 0.9)
    for wrong in (mask.flip(1), hole):
        with (
            headscan.intervene(lm, rule, lengths=lengths),
            pytest.raises(InterventionError, match=r"Pad on the right \(tokenizer.padding_side = 'right'\)"),
        ):
            lm.model(input_ids=ids, attention_mask=wrong)
    # A mask of heads is the same for all tokens, wherever the padding is.
    with headscan.intervene(lm, headscan.HeadMask([(0, 0)])):
        lm.model(input_ids=ids, attention_mask=mask.flip(1))


def test_lengths_that_contradict_the_mask_are_refused() -> None:
    lm = make_loaded("llama")
    ids, mask = padded()
    rule = headscan.HeadRule("output_norm_ln", 0.9)
    with headscan.intervene(lm, rule, lengths=REAL) as record:
        lm.model(input_ids=ids, attention_mask=mask)
        record.lengths = torch.tensor([20, 14])
        with pytest.raises(InterventionError, match=r"contradict each other: \[20, 14\] \(given\), \[20, 13\]"):
            lm.model(input_ids=ids, attention_mask=mask)
        with pytest.raises(InterventionError, match="contradict each other"):
            headscan.collect(lm, ids, REAL)
    with headscan.intervene(lm, rule), pytest.raises(InterventionError, match=r"4 dimensions \(limit 2\)"):
        lm.model(input_ids=ids, attention_mask=torch.zeros(2, 1, WIDTH, WIDTH))
    # Queries of an encoder see padding that no mask hides.
    encoder = make_loaded("bert")
    with headscan.intervene(encoder, rule, lengths=REAL), pytest.raises(InterventionError, match="no attention_mask"):
        encoder.model(input_ids=ids)


def test_one_pass_s_mask_is_not_another_s() -> None:
    lm = make_loaded("llama")
    ids, mask = padded()
    rule = rule_for(lm, "first_token_weight")
    with headscan.intervene(lm, rule) as plain:
        lm.model(input_ids=ids)
    with headscan.intervene(lm, rule) as record:
        lm.model(input_ids=ids, attention_mask=mask)
        lm.model(input_ids=ids)
    assert torch.equal(record.ablated, plain.ablated)


def test_nothing_is_left_behind() -> None:
    lm = make_loaded("llama")
    ids, mask = padded()
    rule = headscan.HeadRule("output_norm_ln", 0.9)
    with pytest.raises(HeadscanError), headscan.intervene(lm, rule):
        lm.model(input_ids=ids, attention_mask=mask.flip(1))
    with pytest.raises(HeadscanError), headscan.intervene(lm, rule, lengths=[3, 4]):
        headscan.collect(lm, ids, REAL)
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
