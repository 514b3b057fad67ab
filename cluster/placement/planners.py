"""The four placements, each on the devices that there are: what it comes to, or by how much it does not fit."""

from __future__ import annotations

from dataclasses import replace

from headscan.cluster.placement.byte_sizes import format_bytes
from headscan.cluster.placement.demand import Demand, DeviceBytes, Plan
from headscan.cluster.placement.kinds import (
    LayerRange,
    PipelinePlacement,
    PlacementError,
    ShardedPlacement,
    StreamedPlacement,
    WholePlacement,
)
from headscan.cluster.placement.partition import balanced_ranges, fewest_ranges
from headscan.cluster.placement.placement_request import PlacementRequest, Places


def whole(demand: Demand, places: Places, request: PlacementRequest) -> Plan:
    """A replica a device.

    Raises:
        PlacementError: It does not fit.
    """
    layers, weights = (0, demand.sizes.num_layers), demand.sizes.weights
    need = weights + demand.least(layers)
    fit, threads, room = places.workers(need, request.replicas)
    if not fit:
        raise _refused(need, places, request.replicas, f"one {places.kind}" if places.on_gpus else "one node")
    # On GPUs one each; a CPU's threads share the work of one replica well.
    replicas = request.replicas or fit if places.on_gpus else request.replicas or _nodes_with(places, need)
    tokens = demand.most_tokens(room - weights, layers)
    device = demand.on_device(places.kind, layers, weights, tokens, room)
    return Plan(WholePlacement(replicas, places.device, threads), (device,), tokens)


def sharded(demand: Demand, places: Places, request: PlacementRequest) -> Plan:
    """A replica over the fewest GPUs of one node that have room for it, its blocks never split.

    Raises:
        PlacementError: It does not fit.
    """
    layers = _divisible(demand)
    if not places.on_gpus:
        if request.offload != "disk":
            raise PlacementError("it is for GPUs; on a CPU --offload disk keeps layers on disk")
        return _offloaded(demand, places, request, 0)
    most, wanted = max(len(node.gpus) for node in places.nodes), request.gpus_per_replica
    if wanted is not None and wanted > most:
        raise PlacementError(f"--gpus-per-replica {wanted}: no node has more than {most}; ask for at most {most}")
    if wanted is not None and wanted > len(layers):
        raise PlacementError(f"--gpus-per-replica {wanted}: the model has {len(layers)} layers, which are not split")
    if most < 2 and request.offload is None:
        raise PlacementError("no node has two GPUs; --offload cpu keeps layers in RAM")
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
            placement = ShardedPlacement(replicas, count, ranges, places.threads(replicas, count))
            return Plan(placement, _devices(demand, "GPU", ranges, tokens, room), tokens)
        best = max(sorted(node.gpus)[-count] for node in places.nodes if len(node.gpus) >= count)
        refusal = _missing(need, best, f"each of {count} GPUs of a node")
        if need <= best:
            refusal = f"{request.replicas} replicas over {count} GPUs of one node each do not fit, {fit} do"
    if request.offload is not None:
        return _offloaded(demand, places, request, wanted or most)
    raise PlacementError(refusal or "the model has one layer")


def _offloaded(demand: Demand, places: Places, request: PlacementRequest, gpus: int) -> Plan:
    """The first layers on the devices, as many as there is room for, the rest in RAM or on disk."""
    sizes, count, replicas = demand.sizes, max(1, gpus), request.replicas or 1
    nodes = [node for node in places.nodes if len(node.gpus) >= gpus]
    if gpus and sum(len(node.gpus) // gpus for node in nodes) < replicas:
        raise PlacementError(
            f"--replicas {replicas} with {gpus} of a node's GPUs each are more than there are: name --gpus-per-replica"
        )
    room = min(min(node.gpus) for node in nodes) if gpus else places.sizes[-1] // replicas
    # A block that is elsewhere comes to the first device when it runs.
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
        raise PlacementError(_missing(room - free + ends[0] + sizes.blocks[0], room, f"a {places.kind} for one layer"))
    rest = (start, sizes.num_layers)
    elsewhere = sum(sizes.blocks[slice(*rest)])
    memory = min(node.memory for node in nodes) // replicas if request.offload == "cpu" else None
    if memory is not None and elsewhere > memory:
        raise PlacementError(f"{_missing(elsewhere, memory, 'RAM')}; --offload disk takes more")
    parts = [end + sum(sizes.blocks[slice(*part)]) for part, end in zip(ranges, ends, strict=True)]
    tokens = demand.most_tokens(room - max(sizes.blocks) - max(parts), (0, sizes.num_layers))
    names = [f"GPU {i}" for i in range(gpus)] or ["CPU"]
    devices = [demand.on_device(*each, tokens, room) for each in zip(names, ranges, parts, strict=True)]
    if elsewhere:
        devices.append(DeviceBytes("RAM" if memory is not None else "disk", rest, elsewhere, usable=memory))
    share = max(1, min(node.cpus for node in nodes) // replicas)
    threads = places.threads(replicas, gpus) if gpus else places.allowed(share)
    offload = request.offload if elsewhere else None
    return Plan(ShardedPlacement(replicas, gpus, tuple(ranges), threads, offload), tuple(devices), tokens)


def pipeline(demand: Demand, places: Places, request: PlacementRequest) -> Plan:
    """Replicas of the fewest stages that fit, each on a GPU or on a share of a node's CPU.

    Raises:
        PlacementError: It does not fit.
    """
    demand = replace(demand, staged=True)
    layers = _divisible(demand, alone=True)
    wanted = request.stages
    if wanted is not None and wanted > len(layers):
        raise PlacementError(f"--stages {wanted}: the model has {len(layers)} layers, which are not split")
    devices = len(places.sizes) if places.on_gpus else sum(node.cpus for node in places.nodes)
    most = min(devices // (request.replicas or 1), len(layers))
    refusal = f"there are {devices} {places.kind}s, too few for {request.replicas or 1} times {wanted or 2} stages"
    for count in ([wanted] if wanted <= most else []) if wanted else range(2, most + 1):
        ranges = balanced_ranges(layers, count)
        need = max(demand.weights(part) + demand.least(part) for part in ranges)
        fit, threads, room = places.workers(need, count * (request.replicas or 1))
        if fit:
            replicas = request.replicas or (fit // count if places.on_gpus else 1)
            if places.on_gpus:
                fit, threads, room = places.workers(need, count * replicas)
            tokens = min(demand.most_tokens(room - demand.weights(part), part) for part in ranges)
            placement = PipelinePlacement(replicas, ranges, places.device, threads)
            return Plan(placement, _devices(demand, "stage", ranges, tokens, room), tokens)
        refusal = str(_refused(need, places, count * (request.replicas or 1), f"each of {count} stages"))
    raise PlacementError(refusal)


def streamed(demand: Demand, places: Places, request: PlacementRequest) -> Plan:
    """One replica on the largest device, which holds one range of layers and reads the next one meanwhile.

    The batch is chosen first and the ranges for it, as few as fit, so that more memory never gives a smaller batch:
    fewer ranges alone would take memory from the batch. Without a requested batch size at most half of the memory is
    for the batch, unless the whole model leaves more.

    Raises:
        PlacementError: It does not fit, or more than one replica is asked for.
    """
    demand = replace(demand, staged=True)
    layers = _divisible(demand, alone=True)
    if (request.replicas or 1) > 1:
        raise PlacementError(f"it is one replica, which reads each weight once: --replicas {request.replicas} is more")
    room = places.sizes[0]
    memory = request.memory or room
    if memory > room:
        raise PlacementError(_missing(memory, room, f"the {places.kind} for --memory"))
    every = (0, len(layers))
    # On a CPU the hidden states that wait between ranges get as much as a pass; the others go to disk.
    shares = 1 if places.on_gpus else 2
    least = shares * demand.least(every)
    all_layers, two_layers = demand.weights(every), 2 * max(layers) + demand.sizes.rest
    if memory < (need := min(all_layers, two_layers) + least):
        remedy = "" if request.memory is None else "; give more --memory"
        what = "two layers" if two_layers <= all_layers else "the model"
        raise PlacementError(_missing(need, memory, f"the {places.kind} for {what} and a pass") + remedy)

    def most_tokens(weights: int, share: int = 1) -> int:
        """Tokens of the largest batch beside these weights and within a share of the memory; 0: not one sequence."""
        free = min(memory - weights, max(memory // share, least))
        return demand.most_tokens(free // shares, every) if memory - weights >= least else 0

    at_once, in_ranges = most_tokens(all_layers), most_tokens(two_layers, 1 if request.batch_tokens else 2)
    tokens = max(at_once, in_ranges)
    ranges: tuple[LayerRange, ...] = (every,)
    weights = all_layers
    if in_ranges > at_once:
        half = (memory - demand.sizes.rest - shares * demand.beside(tokens, every)) // 2
        ranges = balanced_ranges(layers, fewest_ranges(layers, half) or len(layers))
        weights = demand.sizes.rest + 2 * max(sum(layers[slice(*part)]) for part in ranges)
    if request.memory is not None and request.batch_tokens is not None and tokens < request.batch_tokens:
        raise PlacementError(
            f"within {format_bytes(memory)} there is room for batches of {tokens} tokens: set --batch-tokens {tokens}, "
            "or give more --memory"
        )
    node = max(places.nodes, key=lambda node: max(node.gpus) if places.on_gpus else node.memory)
    placement = StreamedPlacement(places.device, places.allowed(node.cpus), memory, ranges)
    device = demand.on_device(places.kind, every, weights, tokens, memory)
    waiting = (shares - 1) * demand.beside(tokens, every)
    return Plan(placement, (replace(device, activations=device.activations + waiting),), tokens)


def _divisible(demand: Demand, *, alone: bool = False) -> list[int]:
    """Bytes of the layers that a model can be divided into.

    Raises:
        PlacementError: It cannot be.
    """
    if not demand.sizes.blocks or (alone and not demand.sizes.decoder):
        what = "its layers cannot run apart" if demand.sizes.blocks else "it is no list of blocks, one for each layer"
        raise PlacementError(f"the model cannot be divided: {what}")
    return demand.layers


def _devices(
    demand: Demand, kind: str, ranges: tuple[LayerRange, ...], tokens: int, room: int
) -> tuple[DeviceBytes, ...]:
    return tuple(
        demand.on_device(f"{kind} {i}", part, demand.weights(part), tokens, room) for i, part in enumerate(ranges)
    )


def _nodes_with(places: Places, need: int) -> int:
    return sum(node.memory >= need for node in places.nodes)


def _refused(need: int, places: Places, wanted: int | None, what: str) -> PlacementError:
    has = places.sizes[0]
    if need > has:
        return PlacementError(_missing(need, has, what))
    fit = places.most_workers(need)
    return PlacementError(f"{wanted} times {format_bytes(need)} do not fit at one time, {fit} times they do")


def _missing(need: int, has: int, where: str) -> str:
    return f"{format_bytes(need)} wanted on {where}, {format_bytes(has)} there: {format_bytes(need - has)} are missing"
