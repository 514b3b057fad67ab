"""Replicas over several GPUs of one node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headscan.cluster.placement.devices import roomiest_gpus
from headscan.cluster.placement.placement_base import (
    Demand,
    DeviceBytes,
    LayerRange,
    Offload,
    PlacementError,
    PlacementPlan,
    Places,
    ReplicaPlacement,
    balanced_ranges,
    ranges_text,
    replicas_text,
    too_large,
)

if TYPE_CHECKING:
    from headscan.cluster.placement.placement_base import PlacementRequest
    from headscan.models.loaded_model import Sharding

_OFFLOADED = {"cpu": "in RAM", "disk": "on disk", None: ""}


@dataclass(frozen=True)
class ShardedPlacement(ReplicaPlacement):
    """Replicas over several GPUs of one node, by accelerate's device map, which never splits blocks. With 0 ``devices``
    a replica computes on the CPU and offloads the other layers to disk. ``offload`` is the place of layers that do not
    fit; None if all fit.
    """

    name: ClassVar[str] = "sharded"
    options: ClassVar[tuple[str, ...]] = ("gpus_per_replica", "offload")

    replicas: int
    devices: int
    layers: tuple[LayerRange, ...]
    threads: int
    offload: Offload | None = None

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> PlacementPlan:
        """Use the fewest GPUs of one node that fit; see `Placement.plan`."""
        layers = demand.divisible_layers()
        if not places.on_gpus:
            if request.offload != "disk":
                raise PlacementError("device=cpu holds all layers in RAM. Use GPUs, or set offload=disk")
            return cls._offloaded(demand, places, request, 0)
        most, wanted = max(len(node.gpus) for node in places.nodes), request.gpus_per_replica
        if wanted is not None and wanted > most:
            raise PlacementError(f"gpus_per_replica={wanted} (limit {most} GPUs of a node). Lower `gpus_per_replica`")
        if wanted is not None and wanted > len(layers):
            raise PlacementError(f"gpus_per_replica={wanted} (limit {len(layers)} layers). Lower `gpus_per_replica`")
        if most < 2 and request.offload is None:
            raise PlacementError("no node has two GPUs; offload=cpu keeps layers in RAM")
        refusal = None
        for count in (wanted,) if wanted else range(2, min(most, len(layers)) + 1):
            ranges = balanced_ranges(layers, count)
            need = max(demand.weights(part) + demand.least(part) for part in ranges)
            fitting = [[size for size in node.gpus if size >= need] for node in places.nodes]
            fit = sum(len(gpus) // count for gpus in fitting)
            if fit and fit >= (request.replicas or 1):
                replicas = request.replicas or fit
                room = min(min(gpus) for gpus in fitting if len(gpus) >= count)
                tokens = min(demand.most_tokens(room - demand.weights(part), part) for part in ranges)
                placement = cls(replicas, count, ranges, places.threads(replicas, count))
                return PlacementPlan(placement, demand.on_devices("GPU", ranges, tokens, room), tokens)
            best = max(sorted(node.gpus)[-count] for node in places.nodes if len(node.gpus) >= count)
            refusal = too_large(need, best, f"each of {count} GPUs of a node")
            if need <= best:
                at_most = "at most 1 does" if fit == 1 else f"at most {fit} do"
                refusal = f"{request.replicas} replicas over {count} GPUs of one node each do not fit; {at_most}"
        if request.offload is not None:
            return cls._offloaded(demand, places, request, wanted or most)
        raise PlacementError(refusal or "the model has one layer, which is never split")

    @classmethod
    def _offloaded(cls, demand: Demand, places: Places, request: PlacementRequest, gpus: int) -> PlacementPlan:
        """Keep as many of the first layers as fit on devices, and the rest in RAM or on disk."""
        sizes, count, replicas = demand.sizes, max(1, gpus), request.replicas or 1
        nodes = [node for node in places.nodes if len(node.gpus) >= gpus]
        if gpus and (fit := sum(len(node.gpus) // gpus for node in nodes)) < replicas:
            raise PlacementError(
                f"replicas={replicas} over {gpus} GPUs of one node each (limit {fit}). Set `gpus_per_replica`"
            )
        room = min(min(node.gpus) for node in nodes) if gpus else places.sizes[-1] // replicas
        # accelerate copies an offloaded block to the first device while it runs.
        free = room - demand.least((0, sizes.num_layers)) - max(sizes.blocks)
        ends = [sizes.embedding + sizes.rest, *[0] * (count - 1)]
        ends[-1] += sizes.head
        ranges: list[LayerRange] = []
        start = 0
        for end in ends:
            last, left = start, free - end
            while last < sizes.num_layers and sizes.blocks[last] <= left:
                left -= sizes.blocks[last]
                last += 1
            ranges.append((start, last))
            start = last
        if not start:
            need = room - free + ends[0] + sizes.blocks[0]
            raise PlacementError(too_large(need, room, f"a {places.kind} for one layer"))
        rest = (start, sizes.num_layers)
        elsewhere = sum(sizes.blocks[slice(*rest)])
        memory = min(node.memory for node in nodes) // replicas if request.offload == "cpu" else None
        if memory is not None and elsewhere > memory:
            raise PlacementError(f"{too_large(elsewhere, memory, 'RAM')}. Set offload=disk")
        parts = [end + sum(sizes.blocks[slice(*part)]) for part, end in zip(ranges, ends, strict=True)]
        tokens = demand.most_tokens(room - max(sizes.blocks) - max(parts), (0, sizes.num_layers))
        names = [f"GPU {i}" for i in range(gpus)] or ["CPU"]
        devices = [demand.on_device(*each, tokens, room) for each in zip(names, ranges, parts, strict=True)]
        if elsewhere:
            devices.append(DeviceBytes("RAM" if memory is not None else "disk", rest, elsewhere, usable=memory))
        share = max(1, min(node.cpus for node in nodes) // replicas)
        threads = places.threads(replicas, gpus) if gpus else places.allowed(share)
        offload = request.offload if elsewhere else None
        return PlacementPlan(cls(replicas, gpus, tuple(ranges), threads, offload), tuple(devices), tokens)

    @property
    def device(self) -> str:
        return "cuda" if self.devices else "cpu"

    @property
    def gpus(self) -> int:
        return self.devices

    @property
    def target(self) -> Sharding:
        from headscan.models.loaded_model import Sharding

        return Sharding(tuple(range(self.devices)) or ("cpu",), self.layers, self.offload)

    @property
    def actor_target(self) -> Sharding:
        return self.target

    def local_target(self) -> Sharding:
        return replace(self.target, devices=roomiest_gpus(self.devices)) if self.devices else self.target

    def describe(self) -> str:
        over = f"over {self.devices} GPUs each" if self.devices > 1 else f"on {self.device}"
        rest = f", the other layers {_OFFLOADED[self.offload]}" if self.offload else ""
        return (
            f"placement: sharded, {replicas_text(self.replicas)} {over}, layers {ranges_text(self.layers)}{rest}, "
            f"{self.threads} CPU threads each"
        )
