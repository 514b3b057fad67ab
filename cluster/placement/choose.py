"""Choice of a model's placement: the requested or first fitting one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headscan.cluster.placement.pipeline_placement import PipelinePlacement
from headscan.cluster.placement.placement_base import (
    BATCH_TOKENS,
    Demand,
    Node,
    Placement,
    PlacementError,
    PlacementRequest,
    Places,
    Plan,
)
from headscan.cluster.placement.sharded_placement import ShardedPlacement
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.cluster.placement.whole_placement import WholePlacement

if TYPE_CHECKING:
    from headscan.sizing.model_sizes import ModelSizes

#: Every placement by its name, in the order in which ``auto`` tries them.
PLACEMENTS: dict[str, type[Placement]] = {
    kind.name: kind for kind in (WholePlacement, ShardedPlacement, PipelinePlacement, StreamedPlacement)
}


def place(sizes: ModelSizes, nodes: Sequence[Node], request: PlacementRequest) -> Plan:
    """Choose a placement.

    Args:
        sizes: The model's bytes, for the longest sequence.
        nodes: The available machines.
        request: The requested placement.
    """
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
    if request.placement not in ("auto", *PLACEMENTS):
        raise PlacementError(f"unknown placement {request.placement!r}. Choose auto, {', '.join(PLACEMENTS)}")
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
