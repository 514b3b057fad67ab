"""The way of reading prompts follows from the arms that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import headscan
from headscan.ablation.intervention import Intervention
from headscan.cluster.pool import Pool
from headscan.engine.likelihood import LikelihoodItem
from headscan.engine.reading import PromptReading, choose_reading
from headscan.engine.shared_row_likelihood import SharedRowItem
from headscan.models.model_facts import RopeLengths
from headscan.texts.token_requests import Request
from tests.loaded_pool import LoadedPool
from tests.small_models import make_loaded

MASK, RULE, RANDOM = headscan.HeadMask([(0, 0)]), headscan.HeadRule("entropy", 1.0), headscan.RandomHeads(0.1, 0)

ROPE = RopeLengths(switches=(4,))
MASKS: list[Intervention | None] = [None, MASK]
RULES: list[Intervention | None] = [None, MASK, RULE]
CONTROLS: list[Intervention | None] = [None, MASK, RANDOM]
WHOLE, WHOLE_AS_RULES, CACHED = PromptReading(False), PromptReading(False, headscan_kernels=True), PromptReading(True)
RULES_IN_ROWS, ALL_IN_ROWS = (
    PromptReading(True, shared_rows=True),
    PromptReading(True, shared_rows=True, headscan_kernels=True),
)


def pool_of(family: str, dtype: str) -> Pool:
    lm = make_loaded(family)
    lm.model.to(getattr(torch, dtype))
    return LoadedPool(lm)


@pytest.mark.parametrize(
    ("family", "dtype", "ablated", "share", "expected"),
    [
        ("llama", "float32", MASKS, None, CACHED),
        ("llama", "float32", RULES, None, RULES_IN_ROWS),
        ("llama", "float32", CONTROLS, None, CACHED),
        ("llama", "bfloat16", MASKS, None, CACHED),
        ("llama", "bfloat16", RULES, None, ALL_IN_ROWS),
        ("gemma3", "bfloat16", [*RULES, RANDOM], None, ALL_IN_ROWS),
        ("llama", "float16", RULES, True, ALL_IN_ROWS),
        ("llama", "bfloat16", CONTROLS, None, ALL_IN_ROWS),
        ("llama", "bfloat16", RULES, False, WHOLE_AS_RULES),
        ("llama", "bfloat16", MASKS, False, WHOLE),
        ("llama", "float32", RULES, False, WHOLE),
        # It cannot share rows, but it goes on from a KV cache.
        ("gptj", "float32", RULES, None, CACHED),
        ("gptj", "bfloat16", RULES, None, WHOLE_AS_RULES),
        ("gptj", "bfloat16", RULES, True, CACHED),
        ("gptj", "bfloat16", MASKS, None, CACHED),
        # It keeps states that its cache does not continue.
        ("jamba", "float32", MASKS, None, WHOLE),
        ("jamba", "float32", RULES, None, WHOLE),
    ],
)
def test_prefixes_are_shared_where_arms_stay_comparable(
    family: str, dtype: str, ablated: Sequence[Intervention | None], share: bool | None, expected: PromptReading
) -> None:
    said: list[str] = []
    found = choose_reading(pool_of(family, dtype), dtype, ROPE, ablated, share, said.append)
    assert found == replace(expected, rope=ROPE)
    assert len(said) == (not expected.share_prefixes and share is not False)


@pytest.mark.parametrize("reading", [WHOLE, WHOLE_AS_RULES, CACHED, RULES_IN_ROWS, ALL_IN_ROWS])
def test_an_item_is_read_as_was_chosen(reading: PromptReading) -> None:
    for ablated in (None, MASK, RULE, RANDOM):
        item = reading.item("all", (Request((1, 2), 1),), [ablated], 8)
        in_rows = reading == ALL_IN_ROWS or (reading == RULES_IN_ROWS and ablated == RULE)
        assert isinstance(item, SharedRowItem if in_rows else LikelihoodItem)
        if isinstance(item, LikelihoodItem):
            assert (item.share_prefixes, item.headscan_kernels) == (reading.share_prefixes, reading.headscan_kernels)
