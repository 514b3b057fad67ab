"""Padding on the left next to lengths is refused, and text that holds padding ids as content is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import headscan
from headscan.errors import HeadscanError
from headscan.gates.fit_gates import GateFit
from headscan.gates.gate_settings import GateFitConfig
from headscan.measure.collect import refuse_left_padding
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from tests.small_models import make_loaded

#: A padding id that no text begins with, and one that begins, ends and pads texts, as GPT-2's.
PAD, BEGIN, END = 3, 1, 2
LEFT = torch.tensor([[PAD, PAD, PAD, 11, 12, 13], [21, 22, 23, 24, 25, 26]])
RIGHT = torch.tensor([[11, 12, 13, PAD, PAD, PAD], [21, 22, 23, 24, 25, 26]])
LENGTHS = torch.tensor([3, 6])


def padded_by(padding: int | None, family: str = "llama") -> LoadedModel:
    lm = make_loaded(family)
    config = lm.model.config
    config.pad_token_id, config.bos_token_id, config.eos_token_id = padding, BEGIN, END
    return lm


def of_rule(lm: LoadedModel, ids: Tensor, lengths: Tensor) -> None:
    with headscan.intervene(lm, headscan.HeadRule("entropy", threshold=0.5), lengths=lengths):
        lm.model(ids, use_cache=False)


ENTRIES: dict[str, Callable[[LoadedModel, Tensor, Tensor], Any]] = {
    "collect": headscan.collect,
    "importance": headscan.importance,
    "head_means": headscan.head_means,
    "head_samples": headscan.head_samples,
    "kv_damage": lambda lm, ids, lengths: headscan.kv_damage(lm, ids, lengths, 1, 2),
    "intervene": of_rule,
    "gates": lambda lm, ids, lengths: GateFit(lm, Calibration(ids, lengths), GateFitConfig()),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_left_padding_is_refused(entry: str) -> None:
    lm = padded_by(PAD)
    message = (
        r"^sequence 0 is padded on the left: it begins with 3 padding ids \(3\) and has 3 tokens\. Pad on the right"
    )
    with pytest.raises(HeadscanError, match=message):
        ENTRIES[entry](lm, LEFT, LENGTHS)
    ENTRIES[entry](lm, RIGHT, LENGTHS)


def test_the_texts_of_a_decoder_are_checked_too() -> None:
    lm = padded_by(PAD, "t5")
    with pytest.raises(HeadscanError, match="padded on the left"):
        headscan.collect(lm, RIGHT, LENGTHS, decoder_input_ids=LEFT, decoder_lengths=LENGTHS)


def test_the_first_token_of_a_decoder_may_be_the_padding_id() -> None:
    """T5 and others begin with it, and the target text behind it may be one token longer than the inputs."""
    lm = padded_by(PAD, "t5")
    lm.model.config.decoder_start_token_id = PAD
    texts = torch.tensor([[PAD, 7, 8, 9, 10, 11], [PAD, 7, 8, 9, 10, 11]])
    expected = headscan.collect(lm, RIGHT, LENGTHS, decoder_input_ids=texts[:, :5], decoder_lengths=[5, 5])
    found = headscan.collect(lm, RIGHT, LENGTHS, decoder_input_ids=texts, decoder_lengths=[5, 6])
    torch.testing.assert_close(found["entropy"][0], expected["entropy"][0])
    with pytest.raises(HeadscanError, match="padded on the left"):
        padded = torch.tensor([[PAD, PAD, PAD, 7, 8, 9], [PAD, 7, 8, 9, 10, 11]])
        headscan.collect(lm, RIGHT, LENGTHS, decoder_input_ids=padded, decoder_lengths=[4, 6])


def test_the_tokenizer_knows_the_padding_id() -> None:
    lm = padded_by(None)
    headscan.collect(lm, LEFT, LENGTHS)
    tokenizer: Any = SimpleNamespace(pad_token_id=PAD)
    with pytest.raises(HeadscanError, match="padded on the left"):
        headscan.collect(LoadedModel(lm.model, tokenizer, lm.grid, lm.source), LEFT, LENGTHS)


@pytest.mark.parametrize(
    ("padding", "row", "length"),
    [
        (PAD, [PAD, 11, 12, 13], 4),  # without padding, the id is content
        (PAD, [11, PAD, 12, 0], 3),
        (PAD, [PAD, PAD, PAD, PAD], 2),
        (PAD, [PAD, 11, PAD, PAD], 2),  # padded on the right, by the id that the text begins with
        (PAD, [PAD, 11, 12, 0], 3),
        (BEGIN, [BEGIN, 11, 12, BEGIN], 3),
        (BEGIN, [BEGIN, 11, 12, 0], 3),  # padded by headscan
        (BEGIN, [BEGIN, 11, 12, -100], 3),
        (END, [END, 11, END, 12, END, END], 4),  # documents in a row
        (END, [END, END, 11, 0, 0], 3),
    ],
)
def test_padding_ids_that_are_content_are_accepted(padding: int, row: list[int], length: int) -> None:
    refuse_left_padding(padded_by(padding), torch.tensor([row, [21] * len(row)]), torch.tensor([length, len(row)]))


def test_lists_have_lengths_of_their_own() -> None:
    lm = padded_by(PAD)
    rows = [[PAD, 11, 12], [21, 22, 23, 24]]
    alone = headscan.collect(lm, rows[:1])["entropy"]
    torch.testing.assert_close(headscan.collect(lm, rows)["entropy"][:1], alone)


@pytest.mark.parametrize(
    ("padding", "row", "length"),
    [
        (PAD, [PAD, 11, 12, END], 3),
        (BEGIN, [BEGIN, 11, 12, 13], 3),
        (BEGIN, [BEGIN, BEGIN, BEGIN, 11, 12], 3),  # two of padding, and one that begins the text
        (END, [END, END, 11, 12, END], 3),
    ],
)
def test_left_padding_by_ids_that_texts_hold_is_refused(padding: int, row: list[int], length: int) -> None:
    with pytest.raises(HeadscanError, match="padded on the left"):
        refuse_left_padding(padded_by(padding), torch.tensor([row]), torch.tensor([length]))
