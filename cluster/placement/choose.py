"""Choice of a model's placement: the requested one, or the first that fits. The first one tried, `WholePlacement`, puts
a replica on each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headscan.cluster.placement.devices import roomiest
from headscan.cluster.placement.pipeline_placement import PipelinePlacement
from headscan.cluster.placement.placement_base import (
    Demand,
    Node,
    Placement,
    PlacementError,
    PlacementPlan,
    PlacementRequest,
    Places,
    ReplicaPlacement,
    on_one_gpu,
    replicas_text,
)
from headscan.cluster.placement.sharded_placement import ShardedPlacement
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.options import BATCH_TOKENS

if TYPE_CHECKING:
    from headscan.sizing.model_sizes import ModelSizes


@dataclass(frozen=True)
class WholePlacement(ReplicaPlacement):
    """Full replicas, each on a device of its own: ``cpu``, ``cuda`` (one GPU per replica) or ``cuda:N``."""

    name: ClassVar[str] = "whole"

    replicas: int
    device: str
    threads: int

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> PlacementPlan:
        layers, weights = (0, demand.sizes.num_layers), demand.sizes.weights
        need = weights + demand.least(layers)
        fit, threads, room = places.workers(need, request.replicas)
        if not fit:
            where = f"one {places.kind}" if places.on_gpus else "one node"
            raise places.refusal(need, request.replicas, "replica", where)
        # A GPU serves one replica; on a CPU one replica with all threads of a node uses it well.
        replicas = request.replicas or fit if places.on_gpus else request.replicas or places.nodes_with(need)
        tokens = demand.most_tokens(room - weights, layers)
        device = demand.on_device(places.kind, layers, weights, tokens, room)
        return PlacementPlan(cls(replicas, places.device, threads), (device,), tokens)

    @property
    def gpus(self) -> int:
        return on_one_gpu(self.device)

    @property
    def target(self) -> str:
        return self.device

    @property
    def actor_target(self) -> str:
        return "cuda" if self.gpus else self.device

    def local_target(self) -> str:
        return roomiest(self.device)

    def describe(self) -> str:
        return f"placement: whole, {replicas_text(self.replicas)} on {self.device}, {self.threads} CPU threads each"


#: Every placement by its name, in the order in which ``auto`` tries them.
PLACEMENTS: dict[str, type[Placement]] = {
    kind.name: kind for kind in (WholePlacement, ShardedPlacement, PipelinePlacement, StreamedPlacement)
}


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
