"""The devices that a placement may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headscan.cluster.placement.byte_sizes import format_bytes
from headscan.cluster.placement.devices import Node
from headscan.cluster.placement.placement_base import PlacementError, too_large

if TYPE_CHECKING:
    from headscan.cluster.placement.choose import PlacementRequest


class Places:
    """The devices that a request may use.

    Args:
        nodes: The available machines.
        request: The requested placement.

    Attributes:
        nodes: The machines that have devices of the requested type.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        PlacementError: There is no such device, or there are fewer than replicas.
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
                f"device={self.device}: {machine} has no GPU. Use device=cpu"
                if self.on_gpus
                else f"{machine} has no CPU. Start its nodes with `ray start --num-cpus=N`"
            )
        self._check_count(request.replicas, machine)

    @property
    def on_gpus(self) -> bool:
        """True if GPUs compute."""
        return self.device != "cpu"

    @property
    def kind(self) -> str:
        """``GPU`` or ``CPU``, for messages."""
        return "GPU" if self.on_gpus else "CPU"

    @property
    def sizes(self) -> list[int]:
        """Usable bytes of every device, the largest first.

        Devices are GPUs, or the nodes' RAM.
        """
        found = [size for node in self.nodes for size in (node.gpus if self.on_gpus else (node.memory,))]
        return sorted(found, reverse=True)

    def workers(self, need: int, wanted: int | None) -> tuple[int, int, int]:
        """Count the workers that fit.

        On GPUs each worker has a GPU of its own; on CPUs workers share the memory and the cores of their nodes.

        Args:
            need: Bytes of one worker.
            wanted: Required number of workers. None requires as many as there are GPUs, or one per node.

        Returns:
            The number that fits (0 if fewer than wanted), the CPU threads of each, and the bytes of the smallest device
            among those wanted.
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
        """Return the largest number of workers of ``need`` bytes.

        On a CPU each has at least one thread.
        """
        if self.on_gpus:
            return sum(size >= need for size in self.sizes)
        return sum(min(node.cpus, node.memory // need) for node in self.nodes)

    def nodes_with(self, need: int) -> int:
        """Return the number of nodes with at least ``need`` bytes of RAM."""
        return sum(node.memory >= need for node in self.nodes)

    def threads(self, workers: int, gpus: int = 1) -> int:
        """Return a worker's CPU threads if all workers run."""
        share = min(node.cpus // max(1, min(workers, len(node.gpus) // gpus)) for node in self.nodes)
        return self.allowed(max(1, share))

    def allowed(self, threads: int) -> int:
        """Limit a number of CPU threads by the request's ``max_threads``."""
        return min(threads, self._max_threads or threads)

    def refusal(self, need: int, wanted: int | None, worker: str, where: str) -> PlacementError:
        """Return the error for workers that do not fit.

        Args:
            need: Bytes of one worker.
            wanted: Required number of workers.
            worker: ``replica`` or ``stage``.
            where: What one worker runs on, for messages.
        """
        has = self.sizes[0]
        if need > has:
            return PlacementError(too_large(need, has, where))
        fit = self.most_workers(need)
        at_most = "at most 1 does" if fit == 1 else f"at most {fit} do"
        return PlacementError(f"{wanted} {worker}s of {format_bytes(need)} do not fit; {at_most}")

    def _check_count(self, replicas: int | None, machine: str) -> None:
        count = len(self.sizes) if self.on_gpus else sum(node.cpus for node in self.nodes)
        if replicas is None or replicas <= count:
            return
        instead = ", or use device=cpu" if self.on_gpus else ""
        raise PlacementError(
            f"replicas={replicas} on {self.device} (limit {count} on {machine}: one {self.kind} per replica). "
            f"Lower `replicas`{instead}"
        )


def _with_one_gpu(nodes: Sequence[Node], device: str) -> Node:
    here, index = nodes[0], int(device.partition(":")[2])
    if len(nodes) > 1:
        raise PlacementError(f"device={device}: a cluster chooses the GPU itself. Use device=cuda")
    if index >= len(here.gpus):
        last = f"the last GPU is cuda:{len(here.gpus) - 1}" if here.gpus else "there is no GPU"
        raise PlacementError(f"device={device}: on {here.name} {last}")
    return Node(here.name, here.gpus[index : index + 1], here.memory, here.cpus)
