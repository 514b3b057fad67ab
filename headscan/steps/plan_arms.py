"""Arms of an evaluation that run with the KV cache of a plan.

*Forward*: window masks in the scored pass; every token, of the context too, sees what the plan keeps. *Decode*: the
context is read with full attention, the cache evicts keys, and the rest is read from it. A likelihood in one pass would
not show an eviction, so an arm names its mode. With a plan for a serving engine, forward is what the engine computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headscan.engine.arms import Arm
from headscan.kv.kept_keys import KeptKeys
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.plans import HeadPlan, budget_lengths, check_model, planned_bytes, random_plan
from headscan.runs.run_context import ModelContext
from headscan.settings.evaluation_settings import PlanMode
from headscan.store.records import ArmKind
from headscan.texts.token_requests import GenerationRequest, Request


@dataclass(frozen=True)
class KeptHead:
    """Decision on one KV head, as in `headscan.plans`. Stored names of arms hold a hash of its repr, so fields
    and names stay as they are.
    """

    layer: int
    kv_head: int
    action: str
    sink: int | None
    recent: int | None


@dataclass(frozen=True)
class KeptHeads:
    """The decisions of a plan without its evidence, with the sizes of its engine: small enough to be sent with every
    item of work.
    """

    heads: tuple[KeptHead, ...]
    block: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, plan: HeadPlan) -> KeptHeads:
        heads = tuple(KeptHead(h.layer, h.kv_head, h.action, h.sink, h.recent) for h in plan.heads)
        return cls(heads, plan.block, plan.chunk)

    @property
    def fingerprint(self) -> str:
        """Six hexadecimal digits, equal for equal decisions."""
        sizes = "" if self.block is self.chunk is None else f"{self.block} {self.chunk}"
        return hashlib.sha256((repr(self.heads) + sizes).encode()).hexdigest()[:6]

    @property
    def reduced(self) -> int:
        """Number of KV heads that do not keep all keys."""
        return sum(head.action != "full" for head in self.heads)


def plan_arms(plan: HeadPlan, modes: Sequence[PlanMode], controls: int) -> list[Arm]:
    """Return the arms of a plan, and ``controls`` random plans with the same bytes, in each mode. Plans with the same
    windows have the same random plans, in arms of the same name.
    """
    chosen = KeptHeads.of(plan)
    share = chosen.reduced / len(chosen.heads)
    unit = " by layer" if plan.granularity == "layer" else ""
    label = f"{plan.method}{unit} {100 * share:g}% {chosen.fingerprint}"
    arms = []
    for mode in modes:
        name = f"plan {label}, {mode}"
        arms.append(_arm(chosen, mode, name, plan))
        for seed in range(controls):
            drawn = random_plan(plan, seed)
            dealt = KeptHeads.of(drawn)
            name = f"random plan{unit} {100 * share:g}% {dealt.fingerprint} seed {seed}, {mode}"
            arms.append(replace(_arm(dealt, mode, name, drawn), kind=ArmKind.RANDOM_PLAN, seed=seed))
    return arms


def _arm(kept: KeptHeads, mode: PlanMode, name: str, plan: HeadPlan) -> Arm:
    ablation = KvEviction(kept, name) if mode == "decode" else KvWindows(KeptKeys.of_plan(kept), name)
    details: tuple[tuple[str, Any], ...] = (
        ("mode", mode),
        ("method", str(plan.method)),
        ("kv_shares", _kv_shares(plan)),
    )
    if plan.granularity == "layer":
        details += (("granularity", plan.granularity),)
    share = kept.reduced / len(kept.heads)
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


def window_notes(arms: Sequence[Arm], requests: Iterable[Request | GenerationRequest]) -> list[str]:
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
                f"{arm.name}: {longer} of {len(lengths)} requests are longer than its narrowest window of {narrowest}"
                f" tokens{nothing}"
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
