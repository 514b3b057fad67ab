"""Plans from keep-scores: shares, counts, bytes at a length, widths per head, drops, and random controls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headscan.plans import (
    BudgetRequest,
    HeadPlan,
    KeepScores,
    KVBytes,
    PlanError,
    WindowHeads,
    WindowShare,
    allocate,
    budget_lengths,
    check_model,
    load_plan,
    planned_bytes,
    planned_layer_bytes,
    planned_model,
    random_plan,
    random_scores,
)
from headscan.settings.evaluation_settings import ChosenArms
from headscan.windows import DROPPED, Window
from tests.numbers.plan_fixtures import site

#: Bytes of one token in one KV head: a key and a value of 8 numbers in bfloat16; layer 3 has 16 numbers.
SMALL, LARGE = 32, 64
GRID = [site(0, 4, 2), site(1, 4, 2), site(2, 4, 2, window=32), site(3, 4, 2, dim=16)]


def run_row(grid: list[dict]) -> dict:
    names = ("model_revision", "model_config_hash", "weights_hash")
    row = {"run_id": "r0", "model": "tiny", "dtype": "bfloat16", "num_layers": 1 + max(s["layer"] for s in grid)}
    return row | {"grid": grid} | dict.fromkeys(names)


MODEL, _ = planned_model(run_row(GRID))
WHOLE = 4 * SMALL + 2 * LARGE


def scored(*values: float) -> KeepScores:
    """Keep-scores of the six heads of full layers."""
    scores = random_scores(MODEL, 0)
    chosen = dict(zip(sorted(scores.scores), values, strict=True))
    return dataclasses.replace(scores, scores=chosen, order=tuple(sorted(chosen, key=lambda p: (chosen[p], p))))


SCORES = scored(0.5, 0.1, 0.9, 0.2, 0.3, 1.0)
ORDER = [(0, 1), (1, 1), (3, 0), (0, 0), (1, 0), (3, 1)]


def plan_of(budget: BudgetRequest, **options: object) -> HeadPlan:
    return allocate(SCORES, budget, **{"sink": 4, "recent": 12} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(7))
def test_the_lowest_scores_get_windows(count: int) -> None:
    plan = plan_of(WindowHeads(count))
    assert plan.window_heads == sorted(ORDER[:count]) and plan.budget.window_heads == count
    assert any("the full cache fits" in note for note in plan.notes) == (count == 0)
    assert len(plan.summary()) >= 4


def test_a_share_counts_candidates() -> None:
    for share, count in ((0.01, 1), (0.24, 1), (0.26, 2), (0.5, 3), (1.0, 6)):
        assert plan_of(WindowShare(share)).budget.window_heads == count


@pytest.mark.parametrize("tokens", [17, 100, 4096])
def test_bytes_get_the_fewest_windows_that_fit(tokens: int) -> None:
    bound = 2 * SMALL * min(tokens, 31)
    sizes = [planned_bytes(plan_of(WindowHeads(count)), tokens) for count in range(7)]
    assert sizes[0] == WHOLE * tokens + bound and sizes == sorted(sizes, reverse=True)
    for count, size in enumerate(sizes):
        plan = plan_of(KVBytes(size, tokens))
        assert plan.budget.window_heads == count
        assert planned_bytes(plan, tokens) == size
        assert [row.planned_bytes for row in plan.budget.lengths if row.tokens == tokens] == [size]
        if count:
            assert plan_of(KVBytes(size + 1, tokens)).budget.window_heads == count
    with pytest.raises(PlanError, match=rf"budget out of reach: {sizes[-1] - 1} .* \(limit {sizes[-1]}, .* all 6 "):
        plan_of(KVBytes(sizes[-1] - 1, tokens))


def test_planned_bytes_are_exact_by_layer() -> None:
    plan = plan_of(WindowHeads(1), windows={(0, 1): Window(4, 60)}, dropped={(1, 1): "verdict"})
    assert plan.window_heads == [(0, 1)]
    for tokens in (1, 16, 17, 64, 1000):
        assert planned_layer_bytes(plan, tokens) == {
            0: SMALL * (tokens + min(tokens, 64)),
            1: SMALL * tokens,
            2: 2 * SMALL * min(tokens, 31),
            3: 2 * LARGE * tokens,
        }
    assert [row.tokens for row in plan_of(KVBytes(10**9, 777)).budget.lengths] == [777, 4096, 32768, 131072]
    assert [budget_lengths(positions) for positions in (512, 8192, 1 << 20)] == [
        (512,),
        (4096, 8192),
        (4096, 32768, 131072),
    ]


def test_widths_may_differ_per_head(tmp_path) -> None:
    plan = plan_of(WindowHeads(3), windows={(0, 1): Window(4, 60), (1, 0): Window(4, 28)})
    assert {place: window for place, window in plan.windows.items() if window is not None} == {
        (0, 1): Window(4, 60),
        (1, 1): Window(4, 12),
        (3, 0): Window(4, 12),
    }
    assert "3 of 8 KV heads keep 4 first and 12 to 60 last tokens" in plan.summary()[0]
    assert load_plan(plan.save(tmp_path / "p.json")) == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recent": 0}, "recent of the window is 0"),
        ({"sink": 0, "recent": 0}, "recent of the window is 0"),
        ({"sink": -1}, "sink of the window is -1"),
        ({"windows": {(0, 1): DROPPED}}, "recent of the window is 0"),
        ({"windows": {(0, 1): Window(3, 13)}}, r"a window keeps 3 first tokens \(limit 4"),
        ({"budget": WindowHeads(7)}, r"window_heads out of range: 7 \(limit 6"),
        ({"dropped": {(2, 0): "v"}}, "layer 2, KV head 0 of tiny has no unbounded cache"),
        ({"dropped": {(9, 0): "v"}}, "layer 9"),
        ({"dropped": {(0, 0): " "}}, "without a verdict"),
    ],
)
def test_windows_that_keep_nothing_and_unfounded_drops_are_refused(options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(**{"budget": WindowHeads(2)} | options)


def test_requests_out_of_range_are_refused() -> None:
    for make, message in (
        (lambda: WindowShare(0), "WindowShare.window_share is 0 "),
        (lambda: WindowHeads(-1), "WindowHeads.window_heads is -1 "),
        (lambda: KVBytes(0, 5), "KVBytes.kv_bytes is 0 "),
        (lambda: KVBytes(5, 0), "KVBytes.tokens is 0 "),
    ):
        with pytest.raises(PlanError, match=message):
            make()


def test_few_first_tokens_are_kept_if_few_are_requested() -> None:
    assert plan_of(WindowHeads(1), sink=0, recent=1).heads[1].window == Window(0, 1)
    assert plan_of(WindowHeads(1), sink=2, windows={(0, 1): Window(2, 9)}).heads[1].window == Window(2, 9)


def test_dropped_heads_need_a_verdict(tmp_path) -> None:
    plan = plan_of(WindowHeads(2), dropped={(0, 0): "within one point, run e0"})
    head = plan.heads[0]
    assert (head.head_class, head.window) == ("dropped", DROPPED)
    assert head.verdict == "within one point, run e0" and plan.budget.dropped_heads == 1
    assert plan.window_heads == [(0, 1), (1, 1)] and "1 keep none" in plan.summary()[0]
    assert load_plan(plan.save(tmp_path / "p.json")) == plan
    bare = dataclasses.replace(head, verdict=None)
    with pytest.raises(PlanError, match="only a head with a verdict"):
        dataclasses.replace(plan, heads=(bare, *plan.heads[1:]))


def test_random_plans_have_the_same_bytes_at_every_length() -> None:
    plan = plan_of(WindowHeads(3), windows={(0, 1): Window(4, 60)}, dropped={(1, 0): "verdict"})
    found = set()
    for seed in range(20):
        control = random_plan(plan, seed)
        assert control == random_plan(plan, seed)
        assert control.method == "random" and control.validation is None
        for tokens in (1, 20, 50, 4096):
            assert planned_bytes(control, tokens) == planned_bytes(plan, tokens)
        assert Counter(h.window for h in control.heads) == Counter(h.window for h in plan.heads)
        assert [h.window for h in control.heads if h.layer == 2] == [None, None]
        found.add(tuple(h.window for h in control.heads))
    assert len(found) > 5


def test_random_scores_follow_from_the_seed() -> None:
    one, same, other = (random_scores(MODEL, seed) for seed in (1, 1, 2))
    assert one == same and one.order != other.order and len(one.candidates) == 6


def test_keep_scores_are_checked() -> None:
    values = dict(SCORES.scores)
    for change, message in (
        ({"order": SCORES.order[::-1]}, "the order of 6 KV heads"),
        ({"order": SCORES.order[1:]}, "the order of 5 KV heads"),
        ({"scores": values | {(0, 0): 1.5}}, r"is 1.5 \(limit 0 to 1\)"),
        ({"scores": values | {(0, 0): np.nan}}, "is nan"),
        ({"scores": values | {(2, 0): 0.5}}, "layer 2, KV head 0 of tiny cannot get a window: the model itself bounds"),
        ({"scores": values | {(0, 5): 0.5}}, "the model has no such KV head"),
        ({"scores": {}, "order": ()}, "no KV head of tiny can get a window"),
    ):
        with pytest.raises(PlanError, match=message):
            dataclasses.replace(SCORES, **change)  # type: ignore[arg-type]


def test_models_without_candidates_are_refused_with_the_reason() -> None:
    latent = site(0, 4, 4) | {"cache_heads": 1, "cache_bytes_per_token": 40}
    for a_site, why in ((latent, r"one latent vector a token .*\(MLA\)"), (site(0, 4, 2, window=8), "itself bounds")):
        model, _ = planned_model(run_row([a_site]))
        with pytest.raises(PlanError, match=why):
            random_scores(model, 0)


@pytest.mark.parametrize(("tokens", "window"), [(7, 8), (16, 16), (17, 20), (41, 20), (64, 16), (4096, 16)])
def test_blocks_of_a_serving_engine_are_counted_whole(tokens: int, window: int, tmp_path) -> None:
    """Windows of 4 + 12 tokens in blocks of 4: one first block, and those of the last 12 tokens, 3 or 4."""
    plan = plan_of(WindowHeads(6), block=4)
    whole = -(-tokens // 4) * 4
    start = max(0, tokens - 12) // 4 * 4
    assert window == min(whole, 4 + whole - start)
    bound = 2 * SMALL * -(-min(tokens, 31) // 4) * 4
    assert planned_bytes(plan, tokens) == WHOLE * window + bound
    lengths = plan_of(KVBytes(planned_bytes(plan, tokens), tokens), block=4).budget.lengths
    assert [each.planned_bytes for each in lengths if each.tokens == tokens] == [WHOLE * window + bound]
    assert [each.kv_bytes for each in lengths if each.tokens == tokens] == [WHOLE * whole + bound]


@pytest.mark.parametrize(("tokens", "window"), [(7, 8), (20, 20), (25, 24), (40, 36), (41, 20), (60, 36), (4096, 32)])
def test_chunks_of_a_serving_engine_are_counted(tokens: int, window: int) -> None:
    """Windows of 4 + 12 tokens in blocks of 4 and chunks of 20: until its end a chunk keeps the 12 tokens before it."""
    plan = plan_of(WindowHeads(6), block=4, chunk=20)
    bound = 2 * SMALL * -(-min(tokens, 31) // 4) * 4
    assert planned_bytes(plan, tokens) == WHOLE * window + bound
    lengths = plan_of(KVBytes(planned_bytes(plan, tokens), tokens), block=4, chunk=20).budget.lengths
    assert [each.planned_bytes for each in lengths if each.tokens == tokens] == [WHOLE * window + bound]


@pytest.mark.parametrize("chunk", [8, 500])
def test_a_chunk_that_is_no_multiple_of_its_block_is_refused(chunk: int, tmp_path) -> None:
    message = rf"`chunk={chunk}` \(limit 1, or a multiple of `block=16`\)"
    with pytest.raises(PlanError, match=message):
        plan_of(WindowHeads(2), block=16, chunk=chunk)
    file = plan_of(WindowHeads(2), block=16, chunk=512).save(tmp_path / "plan.json")
    file.write_text(file.read_text().replace('"chunk": 512', f'"chunk": {chunk}'))
    with pytest.raises(PlanError, match=message):
        load_plan(file)
    assert plan_of(WindowHeads(2), block=16, chunk=1).chunk == 1 and plan_of(WindowHeads(2), chunk=chunk).block is None


def test_plans_state_blocks_and_chunks_only_if_they_have_them(tmp_path) -> None:
    plain, engine = plan_of(WindowHeads(2)), plan_of(WindowHeads(2), block=16, chunk=512)
    assert '"block"' not in plain.to_json() and '"chunk"' not in plain.to_json()
    assert load_plan(plain.save(tmp_path / "plain.json")) == plain and plain.block is plain.chunk is None
    loaded = load_plan(engine.save(tmp_path / "engine.json"))
    assert loaded == engine and (loaded.block, loaded.chunk) == (16, 512)
    assert "for an engine with blocks of 16 tokens and chunks of 512 tokens" in loaded.summary()
    assert (random_plan(loaded, 3).block, random_plan(loaded, 3).chunk) == (16, 512)
    for wrong in (0, -1, "16", 1.5, True):
        with pytest.raises(PlanError, match="block"):
            plan_of(WindowHeads(2), block=wrong)


@pytest.mark.parametrize("path", [None, {"heads": []}, 3, ["head_plan.json"]])
def test_a_plan_is_read_from_a_path(path: object) -> None:
    with pytest.raises(PlanError, match=r"`path` is of type .*Pass the file of a plan"):
        load_plan(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["head_plan.json", {"heads": []}, None])
def test_other_things_than_plans_are_refused(plan: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: planned_bytes(plan, 64),
        lambda: random_plan(plan, 0),
        lambda: check_model(plan, grid=()),
    ]
    if not isinstance(plan, str):
        calls.append(lambda: ChosenArms(plans=(plan,)))  # reads files
    for call in calls:
        with pytest.raises(PlanError, match=r"`plan=.*` is no HeadPlan. Read it with load_plan"):
            call()
