"""The field `head_plan` of a configuration as the plugin of vLLM reads it. vLLM is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from headscan_vllm.served_plan import ServedPlan, ServedPlanError, WindowRule, freeing, modules_of

HEADS = [[0, 1, 1, 0], [], [2, 2, 2, 2]]


def field(**others: Any) -> dict[str, Any]:
    model = {"hidden_size": 64, "vocab_size": 100}
    return {"version": 1, "model": model, "windows": [[4, 64], [0, 8]], "heads": HEADS} | others


def test_a_plan_is_read() -> None:
    plan = ServedPlan.read(field(block=32, chunk=64))
    assert plan.heads == ((0, 1, 1, 0), (), (2, 2, 2, 2)) and plan.windows == ((4, 64), (0, 8))
    plan.check_model(SimpleNamespace(hidden_size=64, vocab_size=100, num_hidden_layers=3))
    assert plan.rule(1, 16) == WindowRule(32, 64, 32, 64)
    assert plan.rule(2, 32) == WindowRule(0, 8, 32, 64)
    assert ServedPlan.read(field()).rule(1, 16) == WindowRule(16, 64, 16, 16, 15)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "the configuration has no head_plan"),
        (field(version=2), r"version of head_plan: 2 \(limit 1\)"),
        (field(extra=1), "should not have extra"),
        ({"version": 1, "model": {}, "windows": []}, "lacks or should not have heads"),
        (field(windows=[[4, -64]], heads=[[1]]), r"window of head_plan: \[4, -64\]"),
        (field(windows=[[-4, 64]], heads=[[1]]), r"window of head_plan: \[-4, 64\]"),
        (field(windows=[[4, 0]], heads=[[1]]), r"window of head_plan: \[4, 0\]"),
        (field(windows=[[4, 64, 1]], heads=[[1]]), "window of head_plan"),
        (field(windows=[[4, 6.5]], heads=[[1]]), "window of head_plan"),
        (field(heads=[[3]]), r"KV head of layer 0 of head_plan: 3 \(limit 0 to 2\)"),
        (field(heads=[[0], [-1]]), "KV head of layer 1 of head_plan: -1"),
        (field(heads=[[True]]), "KV head of layer 0 of head_plan: True"),
        (field(heads=[7]), "heads of layer 0 of head_plan: 7"),
        (field(heads="0110"), "heads of head_plan: '0110'"),
        (field(heads=[[0, 0]]), "has no windows"),
        (field(block=0), "block of head_plan: 0"),
        (field(chunk="8"), "chunk of head_plan: '8'"),
        (field(model=3), "model of head_plan: 3"),
    ],
)
def test_a_bad_plan_is_one_line(data: Any, words: str) -> None:
    with pytest.raises(ServedPlanError, match=words) as caught:
        ServedPlan.read(data)
    assert "\n" not in str(caught.value) and str(caught.value).count(". ") == 1


def test_another_model_is_refused() -> None:
    plan = ServedPlan.read(field())
    with pytest.raises(ServedPlanError, match="for a model with vocab_size 100; this one has 99"):
        plan.check_model(SimpleNamespace(hidden_size=64, vocab_size=99, num_hidden_layers=3))
    with pytest.raises(ServedPlanError, match="hidden_size 64; this one has None"):
        plan.check_model(SimpleNamespace(vocab_size=100, num_hidden_layers=3))
    with pytest.raises(ServedPlanError, match="has 3 layers; this model has 4"):
        plan.check_model(SimpleNamespace(hidden_size=64, vocab_size=100, num_hidden_layers=4))
    for layer, kv_heads, ranks in ((0, 3, 1), (0, 8, 1), (1, 4, 1), (0, 1, 1), (0, 4, 2)):
        with pytest.raises(ServedPlanError, match=f"KV heads in layer {layer}; this model has {kv_heads * ranks}"):
            plan.row(layer, kv_heads, 0, ranks)


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ServedPlanError, match=r"blocks of 128 tokens in the engine, and of 32 .* --block-size 32"):
        ServedPlan.read(field(block=32)).rule(1, 128)
    with pytest.raises(ServedPlanError, match=r"chunk of head_plan: 40 \(limit: a multiple of its block, 16\)"):
        ServedPlan.read(field(chunk=40)).rule(1, 16)


def test_ranks_have_their_heads() -> None:
    plan = ServedPlan.read(field())
    assert [plan.row(0, 2, rank, 2) for rank in range(2)] == [(0, 1), (1, 0)]
    assert [plan.row(0, 1, rank, 4) for rank in range(4)] == [(0,), (1,), (1,), (0,)]
    # With more ranks than KV heads neighbours share one.
    assert [plan.row(0, 1, rank, 8) for rank in range(8)] == [(0,), (0,), (1,), (1,), (1,), (1,), (0,), (0,)]
    assert [plan.heads_per_module(ranks) for ranks in (1, 2, 4, 8)] == [2, 1, 1, 1]


def test_modules_hold_neighbours_of_a_kind() -> None:
    assert modules_of((0, 1, 1, 0), 2) == ((0, (0, 3)), (1, (1, 2)))
    assert modules_of((0, 1, 1, 0), 1) == ((0, (0,)), (1, (1,)), (1, (2,)), (0, (3,)))
    assert modules_of((2, 2, 2, 2), 2) == ((2, (0, 1)), (2, (2, 3)))
    assert ServedPlan.read(field(heads=[[1, 1, 0], [1, 1, 1]])).heads_per_module(1) == 1
    assert ServedPlan.read(field(heads=[[1, 1, 1, 1], [0, 0, 0, 0]])).heads_per_module(1) == 4


def test_modules_are_counted_so_that_groups_are_full() -> None:
    tokens = {0: 8192, 1: 600, 2: 900}
    assert freeing({0: 45, 1: 45}, tokens) == {1: 45}
    assert freeing({0: 68, 1: 22}, tokens) == {1: 18}, "four groups of 18 full ones and one of 18 windows"
    assert freeing({0: 0, 1: 90}, tokens) == {1: 90}
    assert freeing({0: 60, 1: 30, 2: 15}, tokens) == {1: 30, 2: 15}
    assert freeing({0: 58, 1: 30, 2: 2}, tokens) == {1: 30, 2: 0}, "a kind of two modules would make 45 groups"
    assert freeing({0: 1, 1: 1}, tokens) == {1: 1}


def test_all_ranks_free_the_same_modules() -> None:
    plan = ServedPlan.read(field(heads=[[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]))
    whole = plan.freeing_modules(1, 1, {0: 8192, 1: 600, 2: 900})
    assert [len(each) for each in whole] == [3, 2, 0]
    # On two ranks vLLM counts one full and two windowed modules in layer 0, and two of each in layer 1.
    halves = plan.freeing_modules(1, 2, {0: 8192, 1: 600, 2: 900})
    assert halves[0] <= {(1, 0), (1, 1)} and halves[1] <= {(1, 0), (1, 1)} and not halves[2]
