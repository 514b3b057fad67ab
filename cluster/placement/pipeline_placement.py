"""Replicas whose layers run in stages, on devices of any nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headscan.cluster.placement.placement_base import (
    Demand,
    LayerRange,
    Placement,
    PlacementError,
    PlacementPlan,
    Places,
    balanced_ranges,
    on_one_gpu,
    ranges_text,
    replicas_text,
)

if TYPE_CHECKING:
    from headscan.cluster.placement.placement_base import PlacementRequest


@dataclass(frozen=True)
class PipelinePlacement(Placement):
    """Replicas whose layer ranges run in actors on any nodes, on ``cpu`` or ``cuda`` (one GPU per stage)."""

    name: ClassVar[str] = "pipeline"
    options: ClassVar[tuple[str, ...]] = ("stages",)
    staged: ClassVar[bool] = True

    replicas: int
    stages: tuple[LayerRange, ...]
    device: str
    threads: int

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> PlacementPlan:
        """Use the fewest stages that fit; see `Placement.plan`. Each is on a GPU, or on a share of a node's CPU."""
        demand = replace(demand, staged=True)
        layers = demand.divisible_layers()
        wanted, copies = request.stages, request.replicas or 1
        if wanted is not None and wanted > len(layers):
            raise PlacementError(f"stages={wanted} (limit {len(layers)} layers). Lower `stages`")
        devices = len(places.sizes) if places.on_gpus else sum(node.cpus for node in places.nodes)
        most = min(devices // copies, len(layers))
        needed = copies * (wanted or 2)
        refusal = f"{replicas_text(copies)} of {wanted or 2} stages need {needed} {places.kind}s (limit {devices})"
        for count in ([wanted] if wanted <= most else []) if wanted else range(2, most + 1):
            ranges = balanced_ranges(layers, count)
            need = max(demand.weights(part) + demand.least(part) for part in ranges)
            fit, threads, room = places.workers(need, count * copies)
            if fit:
                replicas = request.replicas or (fit // count if places.on_gpus else 1)
                if places.on_gpus:
                    fit, threads, room = places.workers(need, count * replicas)
                tokens = min(demand.most_tokens(room - demand.weights(part), part) for part in ranges)
                placement = cls(replicas, ranges, places.device, threads)
                return PlacementPlan(placement, demand.on_devices("stage", ranges, tokens, room), tokens)
            refusal = str(places.refusal(need, count * copies, "stage", f"each of {count} stages"))
        raise PlacementError(refusal)

    @property
    def devices_at_once(self) -> int:
        """Stages, which work on different batches."""
        return len(self.stages)

    @property
    def gpus(self) -> int:
        return on_one_gpu(self.device)

    def describe(self) -> str:
        return (
            f"placement: pipeline, {replicas_text(self.replicas)} of {len(self.stages)} stages on {self.device}, "
            f"layers {ranges_text(self.stages)}, {self.threads} CPU threads a stage"
        )
