"""What `repr` and `help` show of public objects fits into a few lines."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass, replace

import pytest

import headscan

#: Most characters of a `repr`: three lines.
_SHORT = 360


@pytest.fixture(scope="module")
def lm() -> headscan.LoadedModel:
    return headscan.load("demo", device="cpu")


def test_signatures_have_no_marks_of_the_command_line() -> None:
    classes = [each for each in (getattr(headscan, name) for name in dir(headscan)) if isinstance(each, type)]
    assert len(classes) > 40
    for each in classes:
        signature = str(inspect.signature(each)) if is_dataclass(each) else ""
        assert not any(mark in signature for mark in ("Option(", "Group(", "Limits(")), each


def test_settings_show_what_differs_from_the_defaults() -> None:
    scan = headscan.Scan(model=headscan.ModelSpec("demo"), corpus=headscan.CorpusSpec("python-stdlib-heldout"))
    assert repr(scan) == ("Scan(model=ModelSpec(source='demo'), corpus=CorpusSpec(name='python-stdlib-heldout'))")
    assert repr(headscan.TokenConfig()) == "TokenConfig()"
    few = headscan.TokenConfig(64, mode="chunk")
    assert eval(repr(few), {"TokenConfig": headscan.TokenConfig}) == few
    fewer = replace(scan, tokens=headscan.TokenConfig(limit_sequences=8))
    assert "tokens=TokenConfig(limit_sequences=8)" in repr(fewer)


def test_measured_objects_are_a_few_lines(lm: headscan.LoadedModel) -> None:
    stats = headscan.collect(lm, ["a text", "another, longer text"])
    assert "entropy (2, 6, 8)" in repr(stats) and len(repr(stats)) < 2 * _SHORT
    half = headscan.HeadMask.of_lowest(headscan.score(stats, "output_norm_ln").mean(0), share=0.5)
    assert repr(half).endswith(" and 16 more, replacement=ZeroOutput())") and len(repr(half)) < _SHORT
    input_ids = lm.tokenizer("a text", return_tensors="pt").input_ids
    with headscan.intervene(lm, half) as record:
        assert repr(record) == "InterventionRecord(before the first pass)"
        lm.model(input_ids=input_ids)
    assert repr(record) == "InterventionRecord(1 sequence, 50 % of heads ablated)"
    kept = headscan.KeptKeys.of([(0, 1, headscan.Window(4, 8))], dict.fromkeys(range(6), 4))
    cache = headscan.PlanCache(kept)
    assert repr(cache) == "PlanCache(6 layers, KeptKeys(1 of 24 KV heads keep (4, 8)), 0 tokens)"
    lm.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
    assert repr(cache).endswith(f", {input_ids.shape[1]} tokens)")
