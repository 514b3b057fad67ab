"""One call answers every kind of arm, in a way that follows from the model, the arms and the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import headscan
from headscan.ablation.intervention import Intervention
from headscan.engine import answer as engine
from headscan.engine.answer import AnsweringSettings, answer, settings_for
from headscan.models.model_facts import UNVARYING
from headscan.texts.token_requests import Request
from headscan.windows import KeptKeys, Window
from tests.jobs.engine.test_bundles import BATCH_TOKENS, REQUESTS, close
from tests.small_models import make_loaded

MASK, RULE, RANDOM = headscan.HeadMask([(2, 0)]), headscan.HeadRule("entropy", 1.0), headscan.RandomHeads(0.1, 0)

MASKS: list[Intervention | None] = [None, MASK]
RULES: list[Intervention | None] = [None, MASK, RULE]
CONTROLS: list[Intervention | None] = [None, MASK, RANDOM]
ASKED = (Request((1, 2, 3), 1),)
#: The way of each arm alone, ``likelihoods`` with shared prefixes and headscan's kernels.
WHOLE, WHOLE_AS_RULES, CACHED, ROWS = ("whole", False), ("whole", True), ("cached", False), ("rows", True)


def settings_of(dtype: str, arms: Sequence[Intervention | None], share: bool | None) -> AnsweringSettings:
    return settings_for(arms, BATCH_TOKENS, share, dtype=dtype, rope=UNVARYING, say=lambda line: None)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ways that answers go: those of arms alone, and the number of arms of a bundle."""
    taken: list[Any] = []
    alone, rows, bundled = engine.likelihoods, engine.shared_row_likelihoods, engine.bundled_likelihoods

    def watch(way: Callable[..., Any], name: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: taken.append(name(*given)) or way(*given)

    share_of = lambda *given: ("cached" if given[4] else "whole", given[5])  # noqa: E731
    monkeypatch.setattr(engine, "likelihoods", watch(alone, share_of))
    monkeypatch.setattr(engine, "shared_row_likelihoods", watch(rows, lambda *given: ROWS))
    monkeypatch.setattr(engine, "bundled_likelihoods", watch(bundled, lambda *given: len(given[2])))
    return taken


@pytest.mark.parametrize(
    ("family", "dtype", "arms", "share", "expected"),
    [
        ("llama", "float32", MASKS, None, [CACHED] * 2),
        ("llama", "float32", RULES, None, [CACHED, CACHED, ROWS]),
        ("llama", "float32", CONTROLS, None, [CACHED] * 3),
        ("llama", "bfloat16", MASKS, None, [CACHED] * 2),
        ("llama", "bfloat16", RULES, None, [ROWS] * 3),
        ("gemma3", "bfloat16", [*RULES, RANDOM], None, [ROWS] * 4),
        ("llama", "float16", RULES, True, [ROWS] * 3),
        ("llama", "bfloat16", CONTROLS, None, [ROWS] * 3),
        ("llama", "bfloat16", RULES, False, [WHOLE_AS_RULES] * 3),
        ("llama", "bfloat16", MASKS, False, [WHOLE] * 2),
        ("llama", "float32", RULES, False, [WHOLE] * 3),
        # It cannot share rows, but it goes on from a KV cache.
        ("gptj", "float32", RULES, None, [CACHED] * 3),
        ("gptj", "bfloat16", RULES, None, [WHOLE_AS_RULES] * 3),
        ("gptj", "bfloat16", RULES, True, [CACHED] * 3),
        ("gptj", "bfloat16", MASKS, None, [CACHED] * 2),
        # It keeps states that its cache does not continue.
        ("jamba", "float32", MASKS, None, [WHOLE] * 2),
        ("jamba", "float32", RULES, None, [WHOLE] * 3),
    ],
)
def test_prefixes_are_shared_where_arms_stay_comparable(
    family: str, dtype: str, arms: list[Intervention | None], share: bool | None, expected: list[Any], ways: list[Any]
) -> None:
    lm = make_loaded(family)
    lm.model.to(getattr(torch, dtype))
    settings = settings_of(dtype, arms, share)
    notes = [answer(lm, ASKED, [arm], settings)[0].note for arm in arms]
    assert ways == expected
    assert [bool(note) for note in notes] == [way[0] == "whole" and share is not False for way in expected]


def test_in_half_precision_resampled_heads_decide_that_prompts_are_read_whole() -> None:
    lm, said = make_loaded("llama"), list[str]()
    samples = headscan.head_samples(lm, torch.randint(5, 90, (4, 12)), [12] * 4, seed=0)
    resampled = [None, headscan.HeadMask([(1, 0)], samples)]
    for dtype, share in (("float32", None), ("bfloat16", False)):
        found = settings_for(resampled, 8, None, dtype=dtype, rope=UNVARYING, say=said.append)
        assert found.share_prefixes is share
    assert len(said) == 1 and said[0].startswith("prompts are read whole: in bfloat16")
    assert settings_for(resampled, 8, True, dtype="bfloat16", rope=UNVARYING, say=said.append).share_prefixes


def test_several_changes_share_layers_and_have_the_answers_that_they_have_alone(ways: list[Any]) -> None:
    """Masks and the baseline are one bundle; a rule, and a mask of the first layer's attention, are alone."""
    lm, settings = make_loaded("llama"), AnsweringSettings(BATCH_TOKENS)
    windows = headscan.KvWindows(KeptKeys.of([(0, 0, Window(0, 4))]))
    changes = [None, RULE, MASK, windows, headscan.HeadMask([(1, 1), (2, 2)])]
    together = answer(lm, REQUESTS, changes, settings)
    assert ways == [3, ROWS, CACHED]
    for change, ours in zip(changes, together, strict=True):
        [alone] = answer(lm, REQUESTS, [change], settings)
        assert close(ours.values, alone.values)
        assert ours.ablated_shares == alone.ablated_shares


def test_what_short_passes_show_of_a_model_is_found_once() -> None:
    lm, settings = make_loaded("llama"), AnsweringSettings(BATCH_TOKENS)
    passes = list[int]()
    lm.model.get_input_embeddings().register_forward_pre_hook(lambda *_: passes.append(1))
    counts = []
    for _ in range(3):
        answer(lm, ASKED, [None, MASK], settings)
        answer(lm, ASKED, [RULE], settings)
        counts.append(len(passes))
        passes.clear()
    assert counts[0] > counts[1] == counts[2]
