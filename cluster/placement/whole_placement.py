"""One replica per device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headscan.cluster.placement.devices import roomiest
from headscan.cluster.placement.placement_base import Demand, Places, Plan, ReplicaPlacement, on_one_gpu, replicas_text

if TYPE_CHECKING:
    from headscan.cluster.placement.placement_base import PlacementRequest


@dataclass(frozen=True)
class WholePlacement(ReplicaPlacement):
    """Full replicas of the model, each on a device of its own.

    Attributes:
        replicas: Number of replicas.
        device: ``cpu``, ``cuda`` (one GPU per replica) or ``cuda:N``.
        threads: CPU threads of one replica.
    """

    name: ClassVar[str] = "whole"
    summary: ClassVar[str] = "one replica per device"

    replicas: int
    device: str
    threads: int

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> Plan:
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
        return Plan(cls(replicas, places.device, threads), (device,), tokens)

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
