"""Arms of an evaluation that run with the KV cache of a plan.

*Forward*: window masks in the scored pass; every token, of the context too, sees what the plan keeps. *Decode*: the
context is read with full attention, the cache evicts keys, and the rest is read from it. A likelihood in one pass would
not show an eviction, so an arm names its mode. With a plan for a serving engine, forward is what the engine computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from headscan.engine.arms import Arm
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.plans import HeadPlan, budget_lengths, check_model, planned_bytes, random_plan
from headscan.runs.run_context import ModelContext
from headscan.settings.evaluation_settings import PlanMode
from headscan.store.records import ArmKind
from headscan.texts.tasks import AnyRequest
from headscan.texts.token_requests import GenerationRequest
from headscan.windows import KeptKeys


def plan_arms(plan: HeadPlan, modes: Sequence[PlanMode], controls: int) -> list[Arm]:
    """Return the arms of a plan, and ``controls`` random plans with the same bytes, in each mode. Plans with the same
    windows have the same random plans, in arms of the same name.
    """
    share = len(plan.kept.windows) / len(plan.heads)
    unit = " by layer" if plan.granularity == "layer" else ""
    label = f"{plan.method}{unit} {100 * share:g}% {plan.digest}"
    arms = []
    for mode in modes:
        name = f"plan {label}, {mode}"
        arms.append(_arm(plan, mode, name))
        for seed in range(controls):
            drawn = random_plan(plan, seed)
            name = f"random plan{unit} {100 * share:g}% {drawn.digest} seed {seed}, {mode}"
            arms.append(replace(_arm(drawn, mode, name), kind=ArmKind.RANDOM_PLAN, seed=seed))
    return arms


def _arm(plan: HeadPlan, mode: PlanMode, name: str) -> Arm:
    kept = plan.kept
    ablation = KvEviction(kept, name) if mode == "decode" else KvWindows(kept, name)
    details: tuple[tuple[str, Any], ...] = (
        ("mode", mode),
        ("method", str(plan.method)),
        ("plan", plan.digest),
        ("kv_shares", _kv_shares(plan)),
    )
    if plan.granularity == "layer":
        details += (("granularity", plan.granularity),)
    share = len(kept.windows) / len(plan.heads)
    return Arm(name, ArmKind.PLAN, ablation, share=share, selection=mode, details=details)


def _kv_shares(plan: HeadPlan) -> tuple[tuple[int, float], ...]:
    """Return the share of the KV cache that is left, by tokens. The lengths are the same for every plan of a model,
    because arms of one name must have the same details.
    """
    return tuple(
        (tokens, planned_bytes(plan, tokens) / plan.model.cache_bytes(tokens, plan.block))
        for tokens in budget_lengths(plan.model.max_tokens)
    )


def narrowest_window(kept: KeptKeys) -> int | None:
    """Return the tokens of the longest text in which reduced KV heads show all keys; None if all KV heads keep all."""
    return min((window.covers for _, _, window in kept.windows), default=None)


def window_notes(arms: Sequence[Arm], requests: Iterable[AnyRequest]) -> list[str]:
    """Return notes about plans that free little or nothing on these requests."""
    lengths = [len(each.ids) + (each.max_new_tokens if isinstance(each, GenerationRequest) else 0) for each in requests]
    notes = []
    for arm in arms:
        if arm.kind is not ArmKind.PLAN or not isinstance(arm.intervention, KvWindows | KvEviction):
            continue
        narrowest = narrowest_window(arm.intervention.kept)
        if narrowest is None:
            notes.append(f"{arm.name} keeps all tokens of all KV heads: it equals the baseline")
            continue
        longer = sum(length > narrowest for length in lengths)
        if longer < len(lengths):
            nothing = ": it frees nothing and equals the baseline" if not longer else ""
            notes.append(
                f"{arm.name}: requests longer than its narrowest window of {narrowest} tokens: {longer:,} of"
                f" {len(lengths):,}{nothing}"
            )
    return notes


def check_plan(plan: HeadPlan, model: ModelContext) -> None:
    identity = model.identity
    check_model(
        plan,
        config_hash=identity.config_hash,
        weights_hash=identity.weights_hash,
        revision=identity.revision,
        grid=model.facts.sites,
    )
