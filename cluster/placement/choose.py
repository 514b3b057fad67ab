"""Choice of a model's placement: the requested one, or the first that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headscan.cluster.placement.placement_base import (
    Demand,
    Node,
    Placement,
    PlacementError,
    PlacementPlan,
    PlacementRequest,
    Places,
)
from headscan.cluster.placement.placements import PLACEMENTS
from headscan.options import BATCH_TOKENS

if TYPE_CHECKING:
    from headscan.sizing.model_sizes import ModelSizes


def place(sizes: ModelSizes, nodes: Sequence[Node], request: PlacementRequest) -> PlacementPlan:
    """Choose a placement; ``sizes`` are the model's bytes for the longest sequence."""
    kinds = kinds_to_try(request)
    places = Places(nodes, request)
    demand = Demand(sizes, request.batch_tokens or BATCH_TOKENS, request.evaluates)
    refusals: list[str] = []
    for kind in kinds:
        try:
            plan = kind.plan(demand, places, request)
        except PlacementError as problem:
            refusals.append(f"{kind.name}: {problem}")
        else:
            return replace(plan, why=tuple(refusals))
    fix = "Set placement=auto to use what fits" if len(kinds) == 1 else "Use larger devices, or more of them"
    raise PlacementError(f"{sizes.name} cannot be placed. {'. '.join(refusals)}. {fix}")


def kinds_to_try(request: PlacementRequest) -> tuple[type[Placement], ...]:
    """Return the named placement, else the one that has a given option, else all."""
    if request.placement != "auto":
        kinds: tuple[type[Placement], ...] = (PLACEMENTS[request.placement],)
    else:
        with_options = ((kind,) for kind in PLACEMENTS.values() if request.given(kind.options))
        kinds = next(with_options, tuple(PLACEMENTS.values()))
    for kind in PLACEMENTS.values():
        if kind not in kinds:
            for name in request.given(kind.options):
                raise PlacementError(f"`{name}` is only for placement={kind.name}. Leave out one of the two")
    return kinds
