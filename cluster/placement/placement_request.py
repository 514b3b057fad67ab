"""What is asked of a placement, and the devices that it may use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headscan.cluster.placement.devices import Node
from headscan.cluster.placement.kinds import Offload, PlacementError

Kind = Literal["whole", "sharded", "pipeline", "streamed"]

#: Tokens of one forward pass, unless others are asked for.
BATCH_TOKENS = 8192

#: Wishes that only one kind of placement can grant.
_WISHES: dict[Kind, tuple[str, ...]] = {
    "sharded": ("gpus_per_replica", "offload"),
    "pipeline": ("stages",),
    "streamed": ("memory",),
}


@dataclass(frozen=True)
class PlacementRequest:
    """What is asked of a placement; None: whatever fits.

    Attributes:
        placement: ``auto`` or one kind.
        replicas: Copies of the model.
        stages: Stages of a pipeline.
        gpus_per_replica: GPUs of a sharded replica.
        memory: Bytes of its device that streaming may take.
        device: ``auto`` (GPUs where there are any), ``cpu``, ``cuda`` or ``cuda:N``.
        batch_tokens: Tokens of one forward pass; None: `BATCH_TOKENS`, or what there is room for within ``memory``.
        offload: Where layers of a sharded replica go that its devices have no room for; None: nowhere.
        evaluates: Tasks are answered, which takes logits and a KV cache.
        max_threads: CPU threads that a worker may use; None: its share of the cores.

    Raises:
        PlacementError: A number below 1, no such device, or wishes that exclude each other.
    """

    placement: Literal["auto"] | Kind = "auto"
    replicas: int | None = None
    stages: int | None = None
    gpus_per_replica: int | None = None
    memory: int | None = None
    device: str = "auto"
    batch_tokens: int | None = None
    offload: Offload | None = None
    evaluates: bool = False
    max_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "stages", "gpus_per_replica", "batch_tokens", "max_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlacementError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise PlacementError(f"unknown device {self.device!r}: choose auto, cpu, cuda or cuda:N")
        for kind, names in _WISHES.items():
            for name in names:
                if getattr(self, name) is not None and kind not in self.kinds:
                    raise PlacementError(
                        f"--{name.replace('_', '-')} is for --placement {kind}: leave one of the two out"
                    )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The placements to try in turn: the one that is named, or that a wish is for, or all."""
        if self.placement != "auto":
            return (self.placement,)
        wished = [kind for kind, names in _WISHES.items() if any(getattr(self, name) is not None for name in names)]
        return (wished[0],) if wished else get_args(Kind)


class Places:
    """The devices that a request may use.

    Args:
        nodes: The machines that there are.
        request: What is asked.

    Attributes:
        nodes: Those that have devices of the right kind.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        PlacementError: There are none, or fewer than replicas.
    """

    def __init__(self, nodes: Sequence[Node], request: PlacementRequest) -> None:
        machine = "this machine" if len(nodes) == 1 else "the cluster"
        self.device = request.device
        self._max_threads = request.max_threads
        if request.device == "auto":
            self.device = "cuda" if any(node.gpus for node in nodes) else "cpu"
        if ":" in self.device:
            nodes = [_with_one_gpu(nodes, self.device)]
        self.nodes = [node for node in nodes if (node.gpus if self.on_gpus else node.cpus)]
        if not self.nodes:
            raise PlacementError(
                f"--device {self.device}: {machine} has no GPU; use --device cpu"
                if self.on_gpus
                else f"{machine} has no CPU to run on: start Ray's nodes with --num-cpus"
            )
        self._check_count(request.replicas, machine)

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs compute."""
        return self.device != "cpu"

    @property
    def kind(self) -> str:
        """What a device is called."""
        return "GPU" if self.on_gpus else "CPU"

    @property
    def sizes(self) -> list[int]:
        """Usable bytes of every device, the largest first: GPUs, or the RAM of nodes."""
        found = [size for node in self.nodes for size in (node.gpus if self.on_gpus else (node.memory,))]
        return sorted(found, reverse=True)

    def workers(self, need: int, wanted: int | None) -> tuple[int, int, int]:
        """How many workers of so many bytes there can be.

        Each has a GPU of its own; on CPUs they share the memory and the cores of their nodes.

        Args:
            need: Bytes of one.
            wanted: How many there have to be; None: as many as there are GPUs, or one a node.

        Returns:
            How many there can be (0 where they are fewer than wanted), the CPU threads of each, and the bytes that the
            one with the least of those wanted has.
        """
        if self.on_gpus:
            fit = self.most_workers(need)
            used = wanted or fit
            if not fit or fit < used:
                return 0, 1, 0
            return fit, self.threads(used), self.sizes[used - 1]
        room = [(node.cpus, node.memory // need, node.memory) for node in self.nodes if node.memory >= need]
        used = wanted or len(room)
        for threads in range(max((cpus for cpus, _, _ in room), default=0), 0, -1):
            fit = sum(min(cpus // threads, copies) for cpus, copies, _ in room)
            if fit >= used:
                each = -(-used // len(room))
                return fit, self.allowed(threads), max(need, min(memory for _, _, memory in room) // each)
        return 0, 1, 0

    def most_workers(self, need: int) -> int:
        """How many workers of so many bytes there can be, with one thread each on a CPU."""
        if self.on_gpus:
            return sum(size >= need for size in self.sizes)
        return sum(min(node.cpus, node.memory // need) for node in self.nodes)

    def threads(self, workers: int, gpus: int = 1) -> int:
        """CPU threads of a worker with so many GPUs, when all run."""
        share = min(node.cpus // max(1, min(workers, len(node.gpus) // gpus)) for node in self.nodes)
        return self.allowed(max(1, share))

    def allowed(self, threads: int) -> int:
        """So many CPU threads, or as many as the user allows."""
        return min(threads, self._max_threads or threads)

    def _check_count(self, replicas: int | None, machine: str) -> None:
        count = len(self.sizes) if self.on_gpus else sum(node.cpus for node in self.nodes)
        if replicas is None or replicas <= count:
            return
        most = f"each takes a {self.kind}, so {machine} runs {count} at most"
        instead = ", or use --device cpu" if self.on_gpus else ""
        raise PlacementError(f"--replicas {replicas} on {self.device}: {most}{instead}")


def _with_one_gpu(nodes: Sequence[Node], device: str) -> Node:
    here, index = nodes[0], int(device.partition(":")[2])
    if len(nodes) > 1:
        raise PlacementError(f"--device {device}: a cluster chooses the GPU itself; use --device cuda")
    if index >= len(here.gpus):
        there = f"the last GPU is cuda:{len(here.gpus) - 1}" if here.gpus else "there is no GPU"
        raise PlacementError(f"--device {device}: on {here.name} {there}")
    return Node(here.name, here.gpus[index : index + 1], here.memory, here.cpus)
