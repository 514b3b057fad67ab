"""How a model is laid out over devices.

One layout so far, ``whole``: a full replica on each device. Layouts for models larger than a device belong here too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from headscan.errors import HeadscanError


class PlacementError(HeadscanError):
    """A layout that these devices do not allow."""


@dataclass(frozen=True)
class WholePlacement:
    """Full replicas of the model, each on a device of its own.

    Attributes:
        replicas: How many.
        device: ``cpu``, or ``cuda`` for one GPU a replica.
        threads: CPU threads of one replica.
    """

    replicas: int
    device: str
    threads: int

    def describe(self) -> str:
        """One line for the user, printed before anything is loaded."""
        copies = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        return f"placement: whole, {copies} on {self.device}, {self.threads} CPU threads each"


def place_whole(replicas: int | None, device: str, *, cores: int | None = None) -> WholePlacement:
    """Choose a layout of whole replicas for this machine.

    Args:
        replicas: How many; None: one a GPU, or one on a CPU (whose threads share the work of one replica well).
        device: ``auto`` (GPUs where there are any), ``cpu``, ``cuda`` or ``cuda:N``.
        cores: CPU cores to share out; None: those this process may use.

    Raises:
        PlacementError: No replica, or more of them than there are devices.
    """
    if replicas is not None and replicas < 1:
        raise PlacementError(f"--replicas {replicas}: at least 1 is needed")
    cores = cores or usable_cores()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        replicas = replicas or 1
        if replicas > cores:
            raise PlacementError(f"--replicas {replicas} on the CPU: there are {cores} cores; ask for at most {cores}")
    else:
        gpus = 1 if ":" in device else torch.cuda.device_count()
        replicas = replicas or max(1, gpus)
        if replicas > gpus:
            raise PlacementError(
                f"--replicas {replicas} on {device}: there are {gpus} GPUs; ask for at most {gpus}, or use --device cpu"
            )
    return WholePlacement(replicas, device, max(1, cores // replicas))


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
