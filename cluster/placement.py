"""How a model is laid out over devices.

One layout so far, ``whole``: a full replica on each device. Layouts for models larger than a device belong here too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headscan.errors import HeadscanError


class PlacementError(HeadscanError):
    """A layout that these devices do not allow."""


@dataclass(frozen=True)
class WholePlacement:
    """Full replicas of the model, each on devices of its own.

    Attributes:
        replicas: How many.
        device: ``cpu``, ``cuda`` (one GPU a replica), ``cuda:N``, or ``auto``: a single replica over all GPUs.
        threads: CPU threads of one replica.
    """

    replicas: int
    device: str
    threads: int

    def describe(self) -> str:
        """One line for the user, printed before anything is loaded."""
        copies = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        where = "all GPUs" if self.device == "auto" else self.device
        return f"placement: whole, {copies} on {where}, {self.threads} CPU threads each"


def place_whole(replicas: int | None, device: str, *, cores: int | None = None) -> WholePlacement:
    """Choose a layout of whole replicas for this machine.

    Args:
        replicas: How many; None: one a GPU, or one on a CPU (whose threads share the work of one replica well).
        device: ``auto`` (GPUs where there are any; one replica then spreads over all of them), ``cpu``, ``cuda`` or
            ``cuda:N``.
        cores: CPU cores to share out; None: those this process may use.

    Raises:
        PlacementError: No replica, no such device, or more replicas than devices.
    """
    _check_request(replicas, device)
    cores = cores or usable_cores()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto" and gpus and replicas == 1:
        return WholePlacement(1, "auto", cores)
    device = ("cuda" if gpus else "cpu") if device == "auto" else device
    if device == "cpu":
        replicas = replicas or 1
        if replicas > cores:
            raise PlacementError(f"--replicas {replicas} on the CPU: there are {cores} cores; ask for at most {cores}")
        return WholePlacement(replicas, device, cores // replicas)
    if not gpus:
        raise PlacementError(f"--device {device}: this machine has no GPU; use --device cpu")
    devices = 1 if ":" in device else gpus
    replicas = replicas or devices
    if replicas > devices:
        raise PlacementError(
            f"--replicas {replicas} on {device}: {devices} GPUs are there; ask for at most {devices}, or --device cpu"
        )
    return WholePlacement(replicas, device, max(1, cores // replicas))


def place_on_cluster(nodes: Sequence[Mapping[str, float]], replicas: int | None, device: str) -> WholePlacement:
    """Choose a layout of whole replicas for a Ray cluster.

    Args:
        nodes: For each node its resources, of which ``CPU`` and ``GPU`` count.
        replicas: How many; None: one a GPU, or one a node where there are none.
        device: ``auto`` (GPUs where there are any), ``cpu`` or ``cuda``.

    Raises:
        PlacementError: The nodes cannot hold so many, each whole on one node.
    """
    _check_request(replicas, device)
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    device = ("cuda" if gpus else "cpu") if device == "auto" else device
    if device == "cpu":
        replicas = replicas or len(nodes)
        most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        # The most threads a replica can have so that all of them find a node.
        for threads in range(most, 0, -1):
            if sum(int(node.get("CPU", 0)) // threads for node in nodes) >= replicas:
                return WholePlacement(replicas, "cpu", threads)
        cpus = sum(int(node.get("CPU", 0)) for node in nodes)
        raise PlacementError(f"--replicas {replicas} on the CPU: the cluster has {cpus} CPUs; ask for at most {cpus}")
    replicas = replicas or max(1, gpus)
    if replicas > gpus:
        raise PlacementError(
            f"--replicas {replicas} on {device}: the cluster has {gpus} GPUs; ask for at most {gpus}, or --device cpu"
        )
    per_gpu = min(int(node.get("CPU", 0)) // int(node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1)
    return WholePlacement(replicas, "cuda", max(1, per_gpu))


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_request(replicas: int | None, device: str) -> None:
    if replicas is not None and replicas < 1:
        raise PlacementError(f"--replicas {replicas}: at least 1 is needed")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise PlacementError(f"unknown device {device!r}: choose auto, cpu, cuda or cuda:N")
