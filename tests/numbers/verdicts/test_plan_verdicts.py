"""Verdicts on plans: their words, and controls of the same mode and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headscan.store.store import Store
from headscan.verdicts.judge import judge

Evaluate = Callable[..., tuple[Store, str]]

QUESTIONS = 1000
TASKS = np.array(["sums"] * QUESTIONS)
BASELINE = np.tile([1, 1, 1, 0], QUESTIONS // 4)


def losing(count: int, seed: int = 0) -> np.ndarray:
    answers = BASELINE.copy()
    answers[np.random.default_rng(seed).choice(np.flatnonzero(BASELINE), count, replace=False)] = 0
    return answers


def fields(mode: str, left: float, share: float = 0.5, seed: int | None = None) -> dict[str, Any]:
    """The same share of KV heads can keep windows of another width, and so other bytes."""
    config = {"mode": mode, "method": "measured", "kv_shares": [[4096, left], [32768, left / 2]]}
    return {"share": share, "selection": mode, "seed": seed, "config": config}


def test_plans_are_compared_with_random_plans_of_their_mode_and_bytes(evaluate: Evaluate) -> None:
    arms: dict[str, Any] = {"baseline": ("baseline", BASELINE, 0.0, {})}
    for mode, loss in (("forward", 2), ("decode", 50)):
        arms[f"plan a, {mode}"] = ("plan", losing(loss), 0.0, fields(mode, 0.6))
        arms[f"plan wide, {mode}"] = ("plan", losing(loss, 9), 0.0, fields(mode, 0.8))
        for seed in range(2):
            name = f"random plan seed {seed}, {mode}"
            arms[name] = ("random_plan", losing(20 + loss + seed, seed), 0.0, fields(mode, 0.6, seed=seed))
    arms["random mask"] = ("random_mask", losing(300), 0.0, {"share": 0.5})
    store, run_id = evaluate(TASKS, arms)
    found = {arm.name: arm for arm in judge(store, run_id).arms}
    for mode in ("forward", "decode"):
        arm = found[f"plan a, {mode}"]
        assert arm.controls is not None
        assert arm.controls.arms == tuple(f"random plan seed {seed}, {mode}" for seed in range(2))
        assert "Of 2 random choices with as many bytes, 2 lose more accuracy (" in arm.sentence()
        wide = found[f"plan wide, {mode}"]
        assert wide.controls is None and wide.sentence().endswith(". No random control with as many bytes.")


def test_plans_by_layer_are_compared_with_random_layers(evaluate: Evaluate) -> None:
    arms: dict[str, Any] = {"baseline": ("baseline", BASELINE, 0.0, {})}
    for unit in ("head", "layer"):
        changes = {} if unit == "head" else {"granularity": "layer"}
        for name, loss, seed in ((f"plan {unit}", 2, None), (f"random {unit}", 20, 0)):
            own = fields("forward", 0.6, seed=seed)
            own["config"] |= changes
            arms[name] = ("plan" if seed is None else "random_plan", losing(loss), 0.0, own)
    found = {arm.name: arm for arm in judge(*evaluate(TASKS, arms)).arms}
    for unit in ("head", "layer"):
        arm = found[f"plan {unit}"]
        assert arm.controls is not None
        assert arm.controls.arms == (f"random {unit}",)


def test_the_verdict_on_a_plan_speaks_of_kv_heads(evaluate: Evaluate) -> None:
    losses = {"harmless": 1, "unclear": 8, "costly": 200}
    arms = {f"plan {name}, decode": ("plan", losing(loss), 0.0, fields("decode", 0.6)) for name, loss in losses.items()}
    store, run_id = evaluate(TASKS, {"baseline": ("baseline", BASELINE, 0.0, {}), **arms})
    *words, controls = judge(store, run_id).sentences()
    assert controls == "No arm has a random control."
    starts = (
        "safe within one point",
        "not shown to be safe: its loss may be",
        "not safe: it loses more than one point",
    )
    for name, sentence, start in zip(losses, words, starts, strict=True):
        assert sentence.startswith(f"plan {name}, decode (50 % of KV heads keep less): {start}")
        assert "ablated" not in sentence
