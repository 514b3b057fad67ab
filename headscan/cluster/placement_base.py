"""Requests, timeouts, devices, needed memory, ranges of layers, and the interface of placements."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from headscan.errors import HeadscanError
from headscan.options import BATCH_TOKENS, LONGEST_WAIT, Option, check_limits, short
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.models.loaded_model import Sharding
    from headscan.sizing.model_sizes import ModelSizes

#: Bytes by unit, in lower case.
_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}

#: Larger than any machine: a larger number is a typing error, and would overflow 64 bits in later sums.
_LARGEST = 1 << 60


class ByteSizeError(HeadscanError):
    """A text is not a size in memory."""


def parse_bytes(text: str) -> int:
    """Return the bytes of a size with a unit, such as ``80GiB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is not None and not match[2]:
        raise ByteSizeError(
            f"{text.strip()!r} has no unit: write {match[1]}GiB for gibibytes, or {match[1]}B for bytes"
        )
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ByteSizeError(f"{text!r} is not a size in memory: write a number and a unit, such as 80GiB or 500MB")
    size = float(match[1]) * unit
    if not 1 <= size <= _LARGEST:
        raise ByteSizeError(f"{text!r} is out of range: write a size from 1B to {_LARGEST >> 40}TiB, such as 80GiB")
    return int(size)


def format_bytes(size: float) -> str:
    """Return a size as text, such as ``1.5 GiB``."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if abs(size) >= 1024**power * (1 - 0.05 / 1024):  # what would print as 1024.0 of the next smaller unit, too
            return f"{size / 1024**power:.1f} {letter}iB"
    return f"{size:.0f} B"


#: Positions whose logits are in memory together when tasks are evaluated. A task that scores every token may need
#: more; if they do not fit, the batch is halved.
_LOGIT_PLACES = 512


#: Where a replica keeps layers that do not fit on its GPUs.
Offload = Literal["cpu", "disk"]

#: The first layer, and the one after the last.
LayerRange = tuple[int, int]


class PlacementError(HeadscanError):
    """A placement that these devices do not allow."""


def device_name(text: str) -> str:
    """Return the name of a device, checked."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text):
        raise PlacementError(f"unknown device {text!r}: choose auto, cpu, cuda or cuda:N")
    return text


#: Option of every verb that loads a model.
DEVICE = Option("device: auto, cpu, cuda or cuda:N", parse=device_name)


def ray_address(text: str) -> str:
    """Return the address of a Ray cluster, checked."""
    if text != "auto" and not re.fullmatch(r"(ray://)?(\[[\da-fA-F:.]+\]|[^\s:/\[\]]+):\d{1,5}", str(text)):
        raise PlacementError(f"{text!r} is no address of a Ray cluster: write HOST:PORT, such as first:6379, or auto")
    return text


class PlacementKind(NamedTuple):
    """A placement before its code is imported: a phrase of the help, its subclasses of `Placement` and of `Pool` in
    `headscan.cluster`, and the fields of `PlacementRequest` that only it uses.
    """

    summary: str
    placement: str
    pool: str
    options: tuple[str, ...] = ()


#: The placements by name, in the order in which ``auto`` tries them.
PLACEMENTS = {
    "whole": PlacementKind("one copy per device", "placements:WholePlacement", "ray_pool:RayPool"),
    "sharded": PlacementKind(
        "one copy over the GPUs of a node",
        "placements:ShardedPlacement",
        "ray_pool:RayPool",
        options=("gpus_per_replica", "offload"),
    ),
    "pipeline": PlacementKind(
        "layer ranges on devices of several nodes",
        "placements:PipelinePlacement",
        "ray_pool:PipelinePool",
        options=("stages",),
    ),
    "streamed": PlacementKind(
        "one layer range at a time on one device",
        "placements:StreamedPlacement",
        "streamed_pool:StreamedPool",
        options=("memory",),
    ),
}


@short
@dataclass(frozen=True)
class PlacementRequest:
    """The placement that a user requests; None leaves a choice to `placements.place`.

    Attributes:
        batch_tokens: Tokens of one forward pass; refused if ``memory`` does not hold them. None uses those of the step,
            or as many as ``memory`` holds if they are fewer.
    """

    placement: Annotated[
        str,
        Option(
            "; ".join(f"{name}: {kind.summary}" for name, kind in PLACEMENTS.items())
            + " (default: the first of these that fits)",
            names=("auto", *PLACEMENTS),
        ),
    ] = "auto"
    device: Annotated[str, DEVICE] = "auto"
    replicas: Annotated[
        int | None, Option("number of model copies (default: as many as the GPUs hold; one per node on CPUs)", least=1)
    ] = None
    gpus_per_replica: Annotated[
        int | None, Option("number of GPUs per sharded copy (default: the fewest that fit)", least=1)
    ] = None
    stages: Annotated[int | None, Option("number of pipeline stages (default: the fewest that fit)", least=1)] = None
    memory: Annotated[
        int | None,
        Option(
            "memory limit of streaming, such as 2GiB (default: all free memory)",
            parse=parse_bytes,
            least=1,
            most=_LARGEST,
        ),
    ] = None
    offload: Annotated[
        Offload | None, Option("place for layers of a sharded copy that exceed its devices (default: none)")
    ] = None
    batch_tokens: Annotated[
        int | None,
        Option(
            f"tokens of one forward pass, with padding (default: {BATCH_TOKENS}, or 1024 for gates; fewer if --memory "
            "holds fewer)",
            least=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_limits(self, PlacementError)
        device_name(self.device)
        self.kinds()

    def kinds(self) -> tuple[str, ...]:
        """Return the names of the placements to try: the named one, else the one that has a given option, else all.

        Raises:
            PlacementError: Another placement has a given option.
        """
        given = {
            name: [option for option in kind.options if getattr(self, option) is not None]
            for name, kind in PLACEMENTS.items()
        }
        with_options = [name for name, options in given.items() if options]
        named = (self.placement,) if self.placement != "auto" else tuple(with_options[:1])
        chosen = named or tuple(PLACEMENTS)
        for name in with_options:
            if name not in chosen:
                raise PlacementError(f"`{given[name][0]}` is only for `placement={name}`. Leave out one of the two")
        return chosen

    def in_this_process(self) -> PlacementRequest:
        """Return the request with one replica, which runs in this process; raise PlacementError if it has several."""
        if (self.replicas or 1) > 1:
            raise PlacementError(f"`replicas={self.replicas}` (limit 1 for this job). Set `replicas` to 1")
        return replace(self, replicas=1)


@dataclass(frozen=True)
class Node:
    """One machine, with the usable bytes of each GPU and of its RAM (``memory``)."""

    name: str
    gpus: tuple[int, ...]
    memory: int
    cpus: int


class Places:
    """The machines (``nodes``) with devices of the requested type; ``device`` is ``cpu``, ``cuda`` or ``cuda:N``. A
    worker has its share of the cores, and no more than ``max_threads`` CPU threads, if given.
    """

    def __init__(self, nodes: Sequence[Node], request: PlacementRequest, max_threads: int | None = None) -> None:
        machine = "this machine" if len(nodes) == 1 else "the cluster"
        self.device = request.device
        self._max_threads = max_threads
        if request.device == "auto":
            self.device = "cuda" if any(node.gpus for node in nodes) else "cpu"
        if ":" in self.device:
            nodes = [_with_one_gpu(nodes, self.device)]
        self.nodes = [node for node in nodes if (node.gpus if self.on_gpus else node.cpus)]
        if not self.nodes:
            raise PlacementError(
                f"`device={self.device}`: {machine} has no GPU. Use `device=cpu`"
                if self.on_gpus
                else f"{machine} has no CPU. Start its nodes with `ray start --num-cpus=N`"
            )
        #: Number of nodes by CPUs and bytes of RAM: a large cluster has few different nodes.
        self._alike = Counter((node.cpus, node.memory) for node in self.nodes)
        self._check_count(request.replicas, machine)

    @property
    def on_gpus(self) -> bool:
        return self.device != "cpu"

    @property
    def kind(self) -> str:
        return "GPU" if self.on_gpus else "CPU"

    @property
    def sizes(self) -> list[int]:
        """Usable bytes of every device (a GPU, or the RAM of a node), the largest first."""
        usable = [size for node in self.nodes for size in (node.gpus if self.on_gpus else (node.memory,))]
        return sorted(usable, reverse=True)

    def workers(self, need: int, wanted: int | None) -> tuple[int, int, int]:
        """Return the number of workers of ``need`` bytes that fit (0 if fewer than ``wanted``), the CPUs of each, and
        the bytes that each may use wherever it runs. None for ``wanted`` requires one worker per GPU, or one per node
        whose RAM holds it if so many fit. On GPUs each worker has a GPU of its own; on CPUs workers share the memory
        and the cores of their nodes.
        """
        if self.on_gpus:
            fit = self.most_workers(need)
            used = wanted or fit
            if not fit or fit < used:
                return 0, 1, 0
            return fit, self.threads(used), self.sizes[used - 1]
        used = wanted or min(self.most_workers(need), sum(node.memory >= need for node in self.nodes))
        cpus = self._most_cpus(need, used)
        if not cpus:
            return 0, 1, 0
        shares = [memory // min(cores // cpus, used) for cores, memory in self._alike if cores >= cpus]
        return used, cpus, min(shares)

    def most_workers(self, need: int) -> int:
        """Return the largest number of workers of ``need`` bytes. On a CPU each has at least one thread."""
        if self.on_gpus:
            return sum(size >= need for size in self.sizes)
        counts = range(1, self._by_memory(need) + 1)
        return bisect_left(counts, True, key=lambda used: not self._most_cpus(need, used))

    def _by_memory(self, need: int) -> int:
        """Return how many workers of ``need`` bytes the cores and the RAM of all nodes hold."""
        return sum(count * min(cores, memory // need) for (cores, memory), count in self._alike.items())

    def _most_cpus(self, need: int, used: int) -> int:
        """Return the most CPUs that each of ``used`` workers may have; 0 if they do not fit. Ray starts a worker on any
        node with as many free CPUs, so each node has to hold all workers that its CPUs admit.
        """
        for cpus in range(max(cores for cores, _ in self._alike), 0, -1) if used else ():
            if sum(count * (cores // cpus) for (cores, _), count in self._alike.items()) >= used:
                holds = all(min(cores // cpus, used) * need <= memory for cores, memory in self._alike)
                return cpus if holds else 0
        return 0

    def threads(self, workers: int, gpus: int = 1) -> int:
        """Return a worker's CPU threads if all workers run."""
        share = min(node.cpus // max(1, min(workers, len(node.gpus) // gpus)) for node in self.nodes)
        return self.allowed(max(1, share))

    def allowed(self, threads: int) -> int:
        """Limit a number of CPU threads by ``max_threads``."""
        return min(threads, self._max_threads or threads)

    def idle(self, cpus: int) -> int:
        """Return the CPUs that a worker on the CPU has in addition to its allowed threads."""
        return 0 if self.on_gpus else cpus - self.allowed(cpus)

    def refusal(self, need: int, wanted: int | None, worker: str, where: str) -> PlacementError:
        """Return the error for workers (replicas or stages) that do not fit; ``where`` names the devices of one."""
        has = self.sizes[0]
        if need > has:
            return PlacementError(too_large(need, has, where))
        fit = self.most_workers(need)
        at_most = {0: "none does", 1: "at most 1 does"}.get(fit, f"at most {fit} do")
        count = wanted or 1
        remedy = ""
        if not self.on_gpus and self._by_memory(need) >= max(count, fit + 1):
            remedy = (
                ", because Ray chooses nodes by their CPUs alone. Start nodes with little RAM with fewer CPUs "
                "(`ray start --num-cpus=N`)"
            )
        return PlacementError(
            f"{count} {worker}{'s' * (count > 1)} of {format_bytes(need)} do not fit; {at_most}{remedy}"
        )

    def _check_count(self, replicas: int | None, machine: str) -> None:
        count = len(self.sizes) if self.on_gpus else sum(node.cpus for node in self.nodes)
        if replicas is None or replicas <= count:
            return
        instead = ", or use `device=cpu`" if self.on_gpus else ""
        raise PlacementError(
            f"`replicas={replicas}` on {self.device} (limit {count} on {machine}: one {self.kind} per replica). "
            f"Lower `replicas`{instead}"
        )


def _with_one_gpu(nodes: Sequence[Node], device: str) -> Node:
    here, index = nodes[0], int(device.partition(":")[2])
    if len(nodes) > 1:
        raise PlacementError(f"`device={device}`: a cluster chooses the GPU itself. Use `device=cuda`")
    if index >= len(here.gpus):
        last = f"the last GPU is cuda:{len(here.gpus) - 1}" if here.gpus else "there is no GPU"
        raise PlacementError(f"`device={device}`: on {here.name} {last}")
    return Node(here.name, here.gpus[index : index + 1], here.memory, here.cpus)


@dataclass(frozen=True)
class DeviceBytes:
    """Memory use of one device in bytes: measuring adds ``panel``, and ``usable`` is None for a disk."""

    name: str
    layers: LayerRange
    weights: int
    cache: int = 0
    activations: int = 0
    panel: int = 0
    usable: int | None = None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.panel


@dataclass(frozen=True)
class ChosenPlacement:
    """A placement with the memory use of each device of one replica, the most tokens of a batch that fit, padding
    included, and no more than requested; and ``why``, a line for each rejected placement with the reason.
    """

    placement: Placement
    devices: tuple[DeviceBytes, ...]
    batch_tokens: int
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Demand:
    """The memory that a model needs while batches of at most ``batch_tokens`` tokens run. With ``evaluates`` there are
    logits and, unless passes are staged, a KV cache. With ``staged``, passes run range by range of the layers: without
    a KV cache, but with hidden states that wait between the ranges.

    Attributes:
        backward: Bytes of a backward pass over one sequence of `ModelSizes.tokens`; 0 if the job has none. Staged
            passes have none.
        kept: Bytes that the job keeps next to the model.
    """

    sizes: ModelSizes
    batch_tokens: int
    evaluates: bool = False
    staged: bool = False
    backward: int = 0
    kept: int = 0

    @property
    def layers(self) -> list[int]:
        """Bytes of each layer's weights; the first layer includes the embedding, the last the head."""
        sizes = self.sizes
        parts = list(sizes.blocks)
        parts[0] += sizes.embedding + (0 if self.staged else sizes.rest)
        # A tied head shares the embedding's weight; on the last of several stages it is a copy.
        parts[-1] += sizes.embedding if self.staged and sizes.tied else sizes.head
        return parts

    def divisible_layers(self) -> list[int]:
        """Return `layers`; raise PlacementError if the model cannot be divided."""
        if not self.sizes.blocks or (self.staged and not self.sizes.decoder):
            reason = "its layers cannot run on their own" if self.sizes.blocks else "it has no list of layers"
            raise PlacementError(f"the model cannot be divided: {reason}")
        return self.layers

    def weights(self, layers: LayerRange) -> int:
        """Return the bytes of a range's weights. Every stage also holds the final norm and the positions."""
        return sum(self.layers[slice(*layers)]) + (self.sizes.rest if self.staged else 0)

    def on_device(self, name: str, layers: LayerRange, weights: int, tokens: int, usable: int) -> DeviceBytes:
        """Return a device's memory use while a batch of ``tokens`` runs."""
        sizes = self.sizes
        plain = sizes.activation_bytes(tokens, measured=False)
        measured = sizes.activation_bytes(tokens, measured=True)
        # A scan measures in every pass, an evaluation only in passes of rules.
        activations = plain if self.evaluates else min(plain, measured)
        cache = 0
        if self.evaluates and layers[1] == sizes.num_layers:
            activations += _LOGIT_PLACES * sizes.logits
        if self.evaluates and not self.staged:
            cache = sizes.cache_bytes(tokens, *layers)
        if self.staged:
            activations += 4 * tokens * sizes.hidden
        elif self.backward:
            # A backward pass has no KV cache.
            activations = max(activations, -(-self.backward * tokens // sizes.tokens) - cache)
        activations += self.kept
        return DeviceBytes(name, layers, weights, cache, activations, max(0, measured - plain), usable)

    def on_devices(
        self, kind: str, ranges: tuple[LayerRange, ...], tokens: int, usable: int
    ) -> tuple[DeviceBytes, ...]:
        """Return `on_device` for each range of layers, on devices ``kind 0``, ``kind 1``, ..."""
        return tuple(
            self.on_device(f"{kind} {i}", part, self.weights(part), tokens, usable) for i, part in enumerate(ranges)
        )

    def without_weights(self, tokens: int, layers: LayerRange) -> int:
        """Return a device's bytes in addition to the weights."""
        return self.on_device("", layers, 0, tokens, 0).total

    def least(self, layers: LayerRange) -> int:
        """Return `without_weights` for one sequence, the smallest batch."""
        return self.without_weights(self.sizes.tokens, layers)

    def most_tokens(self, free: int, layers: LayerRange) -> int:
        """Return the tokens of the largest batch that fits in ``free`` bytes, at least one sequence."""
        larger = range(self.sizes.tokens + 1, self.batch_tokens + 1)
        fitting = bisect_right(larger, free, key=lambda tokens: self.without_weights(tokens, layers))
        return self.sizes.tokens + fitting


class Placement(ABC):
    """The layout of a model's replicas on devices.

    A new placement is a subclass, and an entry of its ``name`` in `PLACEMENTS`.

    Attributes:
        staged: True if passes run range by range of the layers; its pools take a `PassTask` only.
        idle_cpus: CPUs of a worker that its limited ``threads`` do not use. Ray reserves them too, so that a node
            receives no more workers than planned.
    """

    name: ClassVar[str]
    staged: ClassVar[bool] = False
    replicas: int
    threads: int
    idle_cpus: int = 0

    @classmethod
    @abstractmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> ChosenPlacement:
        """Lay the model out on devices."""

    @property
    @abstractmethod
    def gpus(self) -> int:
        """GPUs of one worker: a replica, or a stage of one."""

    @property
    def devices_at_once(self) -> int:
        """Devices of one replica that compute at the same time; layers on several run one after the other."""
        return 1

    @abstractmethod
    def describe(self) -> str:
        """Return the line that is printed before anything is loaded."""


class ReplicaPlacement(Placement):
    """A placement in which one process holds a whole replica."""

    @property
    @abstractmethod
    def target(self) -> str | Sharding:
        """Device or sharding that a replica is loaded onto."""

    @property
    @abstractmethod
    def actor_target(self) -> str | Sharding:
        """`target` inside a Ray actor, which numbers its GPUs from 0."""

    @abstractmethod
    def local_target(self) -> str | Sharding:
        """Return `target` here, on the GPUs with the most free memory."""


def too_large(need: int, has: int, where: str) -> str:
    """Return the reason why ``need`` bytes do not fit into ``has`` bytes of a place."""
    return f"{format_bytes(need)} needed on {where} (limit {format_bytes(has)}; {format_bytes(need - has)} missing)"


def replicas_text(replicas: int) -> str:
    """Return ``1 replica`` or ``3 replicas``."""
    return counted(replicas, "replica")


def ranges_text(ranges: Sequence[LayerRange]) -> str:
    """Return first and last layer of each range, such as ``0-4 5-9``. Long lists are shortened."""
    named = [f"{first}-{last - 1}" if last > first else "none" for first, last in ranges]
    return " ".join(named if len(named) <= 8 else [*named[:4], "...", *named[-2:]])


def on_one_gpu(device: str) -> int:
    """Return 1 for ``cuda`` and ``cuda:N``, 0 for ``cpu``."""
    return 1 if device.startswith("cuda") else 0


def fewest_ranges(weights: Sequence[int], limit: int) -> int | None:
    """Return the smallest number of ranges of at most ``limit`` each. None means that one weight exceeds it."""
    if max(weights) > limit:
        return None
    ranges, filled = 1, 0
    for weight in weights:
        if filled + weight > limit:
            ranges, filled = ranges + 1, 0
        filled += weight
    return ranges


def balanced_ranges(weights: Sequence[int], parts: int) -> tuple[LayerRange, ...]:
    """Split weights into ``parts`` ranges, at most one per layer, with the smallest possible maximum and, among those,
    the smallest sum of squared sizes.
    """
    limits = range(max(weights), sum(weights) + 1)
    limit = limits[bisect_left(limits, True, key=lambda limit: (fewest_ranges(weights, limit) or 0) <= parts)]
    sums = [0, *accumulate(weights)]
    # Keyed by the end layer: the smallest sum of squared range sizes so far, and the ends of its ranges.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for _ in range(parts):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, ends) in best.items():
            for end in range(start + 1, len(weights) + 1):
                size = sums[end] - sums[start]
                if size > limit:
                    break
                candidate = (squares + size**2, (*ends, end))
                if end not in longer or candidate < longer[end]:
                    longer[end] = candidate
        best = longer
    return tuple(pairwise(best[len(weights)][1]))


@short
@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a pool on Ray, in seconds.

    Attributes:
        heartbeat: A worker without a heartbeat for this long is replaced. A slow disk that is read while Python's lock
            is held, or a node that swaps, can delay one for minutes.
        start: A run in which no worker has started for this long ends; it can be resumed.
    """

    heartbeat: Annotated[
        float,
        Option("heartbeat timeout of Ray workers, in seconds", flag="--silence-limit", least=1, most=LONGEST_WAIT),
    ] = 300.0
    start: Annotated[
        float,
        Option(
            "timeout for the first worker on a Ray cluster, in seconds",
            flag="--start-timeout",
            least=1,
            most=LONGEST_WAIT,
        ),
    ] = 600.0

    def __post_init__(self) -> None:
        check_limits(self, PlacementError)
