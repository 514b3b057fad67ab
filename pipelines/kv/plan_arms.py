"""Arms of an evaluation that run with the KV cache of a plan.

*Forward*: window masks in the scored pass; every token, of the context too, sees what the plan keeps. *Decode*: the
context is read with full attention, the cache evicts keys, and the rest is read from it. A likelihood in one pass would
not show an eviction, so an arm names its mode.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from headscan.ablation.ablation import Ablation
from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.plans import HeadPlan, check_model
from headscan.kv.kept_keys import KeptKeys, PlannedKvHead
from headscan.kv.kv_eviction import KvEviction
from headscan.kv.kv_windows import KvWindows
from headscan.pipelines.kv.plan_modes import PlanMode
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.scoring.arms import Arm


@dataclass(frozen=True)
class KeptHead:
    """What one KV head keeps, as in `headscan.analysis.plans`."""

    layer: int
    kv_head: int
    action: str
    sink: int | None
    recent: int | None


@dataclass(frozen=True)
class KeptHeads:
    """The decisions of a plan without its evidence: small enough to be sent with every item of work."""

    heads: tuple[KeptHead, ...]

    @classmethod
    def of(cls, heads: Sequence[PlannedKvHead]) -> KeptHeads:
        return cls(tuple(KeptHead(h.layer, h.kv_head, h.action, h.sink, h.recent) for h in heads))

    @property
    def fingerprint(self) -> str:
        """Six hexadecimal digits, equal for equal decisions."""
        return hashlib.sha256(repr(self.heads).encode()).hexdigest()[:6]

    @property
    def reduced(self) -> int:
        """KV heads that do not keep all keys."""
        return sum(head.action != "full" for head in self.heads)


def plan_arms(plan: HeadPlan, modes: Sequence[PlanMode], seeds: int) -> list[Arm]:
    """Return the arms of a plan, and ``seeds`` random plans with the same bytes, in each mode.

    A random plan gives each decision of the plan to a random KV head of the same cost that may keep a window.
    """
    chosen = KeptHeads.of(plan.heads)
    share = chosen.reduced / len(chosen.heads)
    label = f"{100 * share:g}% {chosen.fingerprint}"
    found = []
    for mode in modes:
        name = f"plan {label}, {mode}"
        found.append(Arm(name, ArmKind.PLAN, _ablation(chosen, mode, name), share=share, selection=mode))
        for seed in range(seeds):
            name = f"random plan {label} seed {seed}, {mode}"
            drawn = shuffled(plan, seed)
            found.append(
                Arm(name, ArmKind.RANDOM_PLAN, _ablation(drawn, mode, name), share=share, selection=mode, seed=seed)
            )
    return found


def shuffled(plan: HeadPlan, seed: int) -> KeptHeads:
    """Return the decisions of a plan in random order among the KV heads of the same cost that may keep a window."""
    heads = list(KeptHeads.of(plan.heads).heads)
    cost = {layer.layer: layer.kv_bytes for layer in plan.model.layers}
    rng = random.Random(seed)
    for size in sorted({value for value in cost.values() if value is not None}):
        places = [i for i, head in enumerate(plan.heads) if head.head_class != "protected" and cost[head.layer] == size]
        decisions = [heads[i] for i in places]
        rng.shuffle(decisions)
        for i, from_head in zip(places, decisions, strict=True):
            at = heads[i]
            heads[i] = KeptHead(at.layer, at.kv_head, from_head.action, from_head.sink, from_head.recent)
    return KeptHeads(tuple(heads))


def check_plan(plan: HeadPlan, context: RunContext) -> None:
    """Raise PlanError if the plan was made for another model.

    Raises:
        PlanError: It was, or this cannot be determined.
    """
    identity = context.identity
    check_model(
        plan,
        config_hash=identity.config_hash,
        weights_hash=identity.weights_hash,
        revision=identity.revision,
        grid=context.facts.sites,
    )


def _ablation(kept: KeptHeads, mode: PlanMode, name: str) -> Ablation:
    return KvEviction(kept, name) if mode == "decode" else KvWindows(KeptKeys.of_plan(kept), name)
