"""The placements of a model: whole, sharded over GPUs of one node, in stages, or streamed one range after another; and
the choice of one: the requested placement, or the first that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

from headscan.cluster.devices import roomiest, roomiest_gpus
from headscan.cluster.placement_base import (
    PLACEMENTS,
    ChosenPlacement,
    Demand,
    DeviceBytes,
    LayerRange,
    Node,
    Offload,
    Placement,
    PlacementError,
    PlacementRequest,
    Places,
    ReplicaPlacement,
    balanced_ranges,
    fewest_ranges,
    format_bytes,
    on_one_gpu,
    ranges_text,
    replicas_text,
    too_large,
)
from headscan.options import BATCH_TOKENS

if TYPE_CHECKING:
    from headscan.models.loaded_model import Sharding
    from headscan.sizing.model_sizes import ModelSizes

_OFFLOADED = {"cpu": "in RAM", "disk": "on disk", None: ""}


@dataclass(frozen=True)
class WholePlacement(ReplicaPlacement):
    """Full replicas, each on a device of its own: ``cpu``, ``cuda`` (one GPU per replica) or ``cuda:N``."""

    name: ClassVar[str] = "whole"

    replicas: int
    device: str
    threads: int
    idle_cpus: int = 0

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> ChosenPlacement:
        layers, weights = (0, demand.sizes.num_layers), demand.sizes.weights
        need = weights + demand.least(layers)
        fit, cpus, room = places.workers(need, request.replicas)
        if not fit:
            where = f"one {places.kind}" if places.on_gpus else "one node"
            raise places.refusal(need, request.replicas, "replica", where)
        replicas = request.replicas or fit
        tokens = demand.most_tokens(room - weights, layers)
        device = demand.on_device(places.kind, layers, weights, tokens, room)
        placement = cls(replicas, places.device, places.allowed(cpus), places.idle(cpus))
        return ChosenPlacement(placement, (device,), tokens)

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


@dataclass(frozen=True)
class ShardedPlacement(ReplicaPlacement):
    """Replicas over several GPUs of one node, by accelerate's device map, which never splits blocks. With 0 ``devices``
    a replica computes on the CPU and offloads the other layers to disk. ``offload`` is the place of layers that do not
    fit; None if all fit.
    """

    name: ClassVar[str] = "sharded"

    replicas: int
    devices: int
    layers: tuple[LayerRange, ...]
    threads: int
    offload: Offload | None = None

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> ChosenPlacement:
        """Use the fewest GPUs of one node that fit; see `Placement.plan`."""
        layers = demand.divisible_layers()
        if not places.on_gpus:
            if request.offload != "disk":
                raise PlacementError("`device=cpu` holds all layers in RAM. Use GPUs, or set `offload=disk`")
            return cls._offloaded(demand, places, request, 0)
        most, wanted = max(len(node.gpus) for node in places.nodes), request.gpus_per_replica
        if wanted is not None and wanted > most:
            raise PlacementError(f"`gpus_per_replica={wanted}` (limit {most} GPUs of a node). Lower `gpus_per_replica`")
        if wanted is not None and wanted > len(layers):
            raise PlacementError(f"`gpus_per_replica={wanted}` (limit {len(layers)} layers). Lower `gpus_per_replica`")
        if most < 2 and request.offload is None:
            raise PlacementError("no node has two GPUs; `offload=cpu` keeps layers in RAM")
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
                return ChosenPlacement(placement, demand.on_devices("GPU", ranges, tokens, room), tokens)
            best = max(sorted(node.gpus)[-count] for node in places.nodes if len(node.gpus) >= count)
            refusal = too_large(need, best, f"each of {count} GPUs of a node")
            if need <= best:
                at_most = "at most 1 does" if fit == 1 else f"at most {fit} do"
                refusal = f"{request.replicas} replicas over {count} GPUs of one node each do not fit; {at_most}"
        if request.offload is not None:
            return cls._offloaded(demand, places, request, wanted or most)
        raise PlacementError(refusal or "the model has one layer, which is never split")

    @classmethod
    def _offloaded(cls, demand: Demand, places: Places, request: PlacementRequest, gpus: int) -> ChosenPlacement:
        """Keep as many of the first layers as fit on devices, and the rest in RAM or on disk."""
        sizes, count, replicas = demand.sizes, max(1, gpus), request.replicas or 1
        nodes = [node for node in places.nodes if len(node.gpus) >= gpus]
        if gpus and (fit := sum(len(node.gpus) // gpus for node in nodes)) < replicas:
            raise PlacementError(
                f"`replicas={replicas}` over {gpus} GPUs of one node each (limit {fit}). Set `gpus_per_replica`"
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
            raise PlacementError(f"{too_large(elsewhere, memory, 'RAM')}. Set `offload=disk`")
        parts = [end + sum(sizes.blocks[slice(*part)]) for part, end in zip(ranges, ends, strict=True)]
        tokens = demand.most_tokens(room - max(sizes.blocks) - max(parts), (0, sizes.num_layers))
        names = [f"GPU {i}" for i in range(gpus)] or ["CPU"]
        devices = [demand.on_device(*device, tokens, room) for device in zip(names, ranges, parts, strict=True)]
        if elsewhere:
            devices.append(DeviceBytes("RAM" if memory is not None else "disk", rest, elsewhere, usable=memory))
        share = max(1, min(node.cpus for node in nodes) // replicas)
        threads = places.threads(replicas, gpus) if gpus else places.allowed(share)
        offload = request.offload if elsewhere else None
        return ChosenPlacement(cls(replicas, gpus, tuple(ranges), threads, offload), tuple(devices), tokens)

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


@dataclass(frozen=True)
class PipelinePlacement(Placement):
    """Replicas whose layer ranges run in actors on any nodes, on ``cpu`` or ``cuda`` (one GPU per stage)."""

    name: ClassVar[str] = "pipeline"
    staged: ClassVar[bool] = True

    replicas: int
    stages: tuple[LayerRange, ...]
    device: str
    threads: int
    idle_cpus: int = 0

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> ChosenPlacement:
        """Use the fewest stages that fit; see `Placement.plan`. Each is on a GPU, or on a share of a node's CPU."""
        demand = replace(demand, staged=True)
        layers = demand.divisible_layers()
        wanted, copies = request.stages, request.replicas or 1
        if wanted is not None and wanted > len(layers):
            raise PlacementError(f"`stages={wanted}` (limit {len(layers)} layers). Lower `stages`")
        devices = len(places.sizes) if places.on_gpus else sum(node.cpus for node in places.nodes)
        most = min(devices // copies, len(layers))
        needed = copies * (wanted or 2)
        refusal = f"{replicas_text(copies)} of {wanted or 2} stages need {needed} {places.kind}s (limit {devices})"
        for count in ([wanted] if wanted <= most else []) if wanted else range(2, most + 1):
            ranges = balanced_ranges(layers, count)
            need = max(demand.weights(part) + demand.least(part) for part in ranges)
            fit, cpus, room = places.workers(need, count * copies)
            if fit:
                replicas = request.replicas or (fit // count if places.on_gpus else 1)
                if places.on_gpus:
                    fit, cpus, room = places.workers(need, count * replicas)
                tokens = min(demand.most_tokens(room - demand.weights(part), part) for part in ranges)
                placement = cls(replicas, ranges, places.device, places.allowed(cpus), places.idle(cpus))
                return ChosenPlacement(placement, demand.on_devices("stage", ranges, tokens, room), tokens)
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


@dataclass(frozen=True)
class StreamedPlacement(Placement):
    """One replica that holds one of ``ranges`` at a time and reads the next range while this one runs. ``memory`` are
    the bytes of the device that it may use; ``replicas`` is always 1, so that each weight is read once.
    """

    name: ClassVar[str] = "streamed"
    staged: ClassVar[bool] = True

    device: str
    threads: int
    memory: int
    ranges: tuple[LayerRange, ...]
    replicas: int = field(default=1, init=False)

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> ChosenPlacement:
        """Use the largest device. The batch is chosen first, then the fewest ranges that leave room for it, so more
        memory never gives a smaller batch: fewer ranges would take memory from it. Without a requested batch size the
        batch gets at most half of the memory, unless the whole model leaves more.
        """
        demand = replace(demand, staged=True)
        layers = demand.divisible_layers()
        if (request.replicas or 1) > 1:
            raise PlacementError(f"`replicas={request.replicas}` (limit 1: each weight is read once). Set `replicas=1`")
        room = places.sizes[0]
        memory = request.memory or room
        if memory > room:
            raise PlacementError(
                f"`memory={format_bytes(memory)}` (limit {format_bytes(room)} of the {places.kind}; "
                f"{format_bytes(memory - room)} missing). Lower `memory`"
            )
        every = (0, len(layers))
        # On a CPU the hidden states that wait between ranges get as much memory as a pass; the others go to disk.
        shares = 1 if places.on_gpus else 2
        least = shares * demand.least(every)
        all_layers, two_layers = demand.weights(every), 2 * max(layers) + demand.sizes.rest
        if memory < (need := min(all_layers, two_layers) + least):
            remedy = "" if request.memory is None else ". Raise `memory`"
            holds = "two layers" if two_layers <= all_layers else "the model"
            raise PlacementError(too_large(need, memory, f"the {places.kind} for {holds} and a pass") + remedy)

        def most_tokens(weights: int, share: int = 1) -> int:
            """Return the tokens of the largest batch; 0 if no sequence fits."""
            free = min(memory - weights, max(memory // share, least))
            return demand.most_tokens(free // shares, every) if memory - weights >= least else 0

        at_once, in_ranges = most_tokens(all_layers), most_tokens(two_layers, 1 if request.batch_tokens else 2)
        tokens = max(at_once, in_ranges)
        ranges: tuple[LayerRange, ...] = (every,)
        weights = all_layers
        if in_ranges > at_once:
            half = (memory - demand.sizes.rest - shares * demand.without_weights(tokens, every)) // 2
            ranges = balanced_ranges(layers, fewest_ranges(layers, half) or len(layers))
            weights = demand.sizes.rest + 2 * max(sum(layers[slice(*part)]) for part in ranges)
        if request.memory is not None and request.batch_tokens is not None and tokens < request.batch_tokens:
            raise PlacementError(
                f"`batch_tokens={request.batch_tokens}` in {format_bytes(memory)} (limit {tokens}). "
                f"Set `batch_tokens={tokens}`, or raise `memory`"
            )
        node = max(places.nodes, key=lambda node: max(node.gpus) if places.on_gpus else node.memory)
        placement = cls(places.device, places.allowed(node.cpus), memory, ranges)
        device = demand.on_device(places.kind, every, weights, tokens, memory)
        waiting = (shares - 1) * demand.without_weights(tokens, every)
        return ChosenPlacement(placement, (replace(device, activations=device.activations + waiting),), tokens)

    @property
    def gpus(self) -> int:
        return on_one_gpu(self.device)

    def describe(self) -> str:
        largest = max(last - first for first, last in self.ranges)
        return (
            f"placement: streamed, on {self.device} within {self.memory / 2**30:.2f} GiB, {self.ranges[-1][1]} layers "
            f"in {len(self.ranges)} ranges of at most {largest}, {self.threads} CPU threads"
        )


def place(
    sizes: ModelSizes,
    nodes: Sequence[Node],
    request: PlacementRequest,
    *,
    batch_tokens: int = BATCH_TOKENS,
    evaluates: bool = False,
    max_threads: int | None = None,
    backward: int = 0,
    kept: int = 0,
) -> ChosenPlacement:
    """Choose a placement for a model with these bytes for its longest sequence. ``batch_tokens`` counts if the request
    does not state the size of a batch; with ``evaluates`` tasks are evaluated, which needs memory for logits and a KV
    cache; and ``max_threads`` limits the CPU threads of a worker, None to its share of the cores. ``backward`` and
    ``kept`` are bytes of a job with backward passes, see `Demand`.
    """
    kinds: list[type[Placement]] = [
        resolve_name(f"headscan.cluster.{PLACEMENTS[name].placement}") for name in request.kinds()
    ]
    places = Places(nodes, request, max_threads)
    demand = Demand(sizes, request.batch_tokens or batch_tokens, evaluates, backward=backward, kept=kept)
    refusals: list[str] = []
    for kind in kinds:
        try:
            plan = kind.plan(demand, places, request)
        except PlacementError as problem:
            refusals.append(f"{kind.name}: {problem}")
        else:
            return replace(plan, why=tuple(refusals))
    fix = "Set `placement=auto` to use what fits" if len(kinds) == 1 else "Use larger devices, or more of them"
    raise PlacementError(f"{sizes.name} cannot be placed. {'. '.join(refusals)}. {fix}")
