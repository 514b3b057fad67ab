"""Ways to evaluate a KV-cache plan; importing them loads no torch."""

from __future__ import annotations

from typing import Literal

#: ``forward``: window masks in the scored pass. ``decode``: keys are evicted after the context.
PlanMode = Literal["forward", "decode"]
PLAN_MODES: tuple[PlanMode, ...] = ("forward", "decode")
