"""Eviction: the KV cache shrinks to a plan after the context has been read."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.attention.cache_attention import cache_attention
from headscan.kv.kept_keys import KeptKeys, Plan
from headscan.kv.plan_cache import PlanCache
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class KvEviction(Ablation):
    """Continuations are read from a cache that keeps the plan's tokens of the context.

    The context is read with full attention, apart from dropped heads, which output zero. `PlanCache` then frees the
    other keys, so only tokens read after that see the loss of windows.

    Attributes:
        plan: The plan.
        name: Name for messages.
    """

    plan: Plan
    name: str = "plan"

    @property
    def label(self) -> str:
        return self.name

    @property
    def kept(self) -> KeptKeys:
        """The windows of the plan."""
        return KeptKeys.of_plan(self.plan)

    @property
    def fixed(self) -> bool:
        return True

    @property
    def replaces_attention(self) -> bool:
        # The cache calls the model's own kernel, for each group of heads; the kernels of rules would be no nearer.
        return False

    @property
    def may_share_prefix(self) -> bool:
        return False

    @property
    def evicts(self) -> bool:
        return True

    def new_cache(self, lm: LoadedModel, *, context: bool = True) -> PlanCache:
        return PlanCache(self.plan, lm.model.config, prefill="full" if context else "window")

    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> AbstractContextManager[object]:
        return cache_attention(lm.model)
