"""How prompts are read follows from what has to be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

import headscan
from cluster.pool import Pool
from headscan.families import make_loaded
from pipelines.arms import Silenced
from pipelines.reading import Reading, choose_reading

MASK, RULE, RANDOM = headscan.HeadMask([(0, 0)]), headscan.HeadRule("entropy", 1.0), headscan.RandomHeads(0.1, 0)

MASKS: list[Silenced | None] = [None, MASK]
RULES: list[Silenced | None] = [None, MASK, RULE]
CONTROLS: list[Silenced | None] = [None, MASK, RANDOM]
WHOLE, WHOLE_AS_RULES, CACHED = Reading(False), Reading(False, as_rules=True), Reading(True)
RULES_IN_ROWS, ALL_IN_ROWS = Reading(True, packs=True), Reading(True, packs=True, as_rules=True)


def pool_of(family: str, staged: bool = False) -> Pool:
    lm = make_loaded(family)

    def one(task: Callable[[headscan.LoadedModel, Any], Any], item: Any) -> Any:
        return task(lm, item)

    return cast(Pool, SimpleNamespace(one=one, staged=staged))


@pytest.mark.parametrize(
    ("family", "dtype", "silenced", "share", "expected"),
    [
        ("llama", "float32", MASKS, None, CACHED),
        ("llama", "float32", RULES, None, RULES_IN_ROWS),
        ("llama", "float32", CONTROLS, None, CACHED),
        ("llama", "bfloat16", MASKS, None, CACHED),
        ("llama", "bfloat16", RULES, None, ALL_IN_ROWS),
        ("llama", "float16", RULES, True, ALL_IN_ROWS),
        ("llama", "bfloat16", CONTROLS, None, WHOLE),
        ("llama", "bfloat16", CONTROLS, True, CACHED),
        ("llama", "bfloat16", RULES, False, WHOLE_AS_RULES),
        ("llama", "float32", RULES, False, WHOLE),
        # Its blocks can be packed by nobody, but it goes on from a KV cache.
        ("gptj", "float32", RULES, None, CACHED),
        ("gptj", "bfloat16", RULES, None, WHOLE_AS_RULES),
        ("gptj", "bfloat16", RULES, True, CACHED),
        ("gptj", "bfloat16", MASKS, None, CACHED),
        # It keeps states that its cache does not continue.
        ("jamba", "float32", MASKS, None, WHOLE),
        ("jamba", "float32", RULES, None, WHOLE),
        ("jamba", "float16", RULES, True, WHOLE_AS_RULES),
    ],
)
def test_prefixes_are_shared_where_arms_stay_comparable(
    family: str, dtype: str, silenced: Sequence[Silenced | None], share: bool | None, expected: Reading
) -> None:
    said: list[str] = []
    assert choose_reading(pool_of(family), dtype, silenced, share, said.append) == expected
    assert len(said) == (not expected.share_prefixes and share is not False)


def test_a_model_in_ranges_reads_whole_prompts() -> None:
    pool = pool_of("llama", staged=True)
    assert choose_reading(pool, "float32", RULES, None, pytest.fail) == WHOLE
    assert choose_reading(pool, "bfloat16", RULES, None, pytest.fail) == WHOLE_AS_RULES
    assert choose_reading(pool, "bfloat16", MASKS, None, pytest.fail) == WHOLE
