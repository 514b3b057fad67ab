"""The ways in which a model lies over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headscan.errors import HeadscanError
from headscan.models.layout import Sharding

#: Where layers go that no GPU has room for.
Offload = Literal["cpu", "disk"]

#: First layer and the one after the last.
LayerRange = tuple[int, int]


class PlacementError(HeadscanError):
    """A layout that these devices do not allow."""


@dataclass(frozen=True)
class WholePlacement:
    """Full replicas of the model, each on a device of its own.

    Attributes:
        replicas: How many.
        device: ``cpu``, ``cuda`` (one GPU a replica) or ``cuda:N``.
        threads: CPU threads of one replica.
    """

    replicas: int
    device: str
    threads: int

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return 1 if self.device.startswith("cuda") else 0

    @property
    def target(self) -> str:
        """What a replica is loaded onto."""
        return self.device

    def describe(self) -> str:
        """One line for the user, printed before anything is loaded."""
        return f"placement: whole, {_copies(self.replicas)} on {self.device}, {self.threads} CPU threads each"


@dataclass(frozen=True)
class ShardedPlacement:
    """Replicas over several GPUs of one node each, by accelerate's device map; blocks are never split.

    Attributes:
        replicas: How many.
        devices: GPUs of one replica; 0: the CPU is the one device, and ``offload`` takes the rest to disk.
        layers: The layers of each device.
        threads: CPU threads of one replica.
        offload: Where the layers beyond them are; None: there are none.
    """

    replicas: int
    devices: int
    layers: tuple[LayerRange, ...]
    threads: int
    offload: Offload | None = None

    @property
    def device(self) -> str:
        """The kind of device that computes."""
        return "cuda" if self.devices else "cpu"

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.devices

    @property
    def target(self) -> Sharding:
        """What a replica is loaded onto: the GPUs that it sees are numbered from 0."""
        return Sharding(tuple(range(self.devices)) or ("cpu",), self.layers, self.offload)

    def describe(self) -> str:
        """One line for the user, printed before anything is loaded."""
        over = f"over {self.devices} GPUs each" if self.devices > 1 else f"on {self.device}"
        rest = f", the other layers {_OFFLOADED[self.offload]}" if self.offload else ""
        return (
            f"placement: sharded, {_copies(self.replicas)} {over}, layers {_ranges(self.layers)}{rest}, "
            f"{self.threads} CPU threads each"
        )


@dataclass(frozen=True)
class PipelinePlacement:
    """Replicas whose layer ranges are on actors of their own, on whatever nodes.

    Attributes:
        replicas: How many.
        stages: The layers of each stage.
        device: ``cpu`` or ``cuda`` (one GPU a stage).
        threads: CPU threads of one stage.
    """

    replicas: int
    stages: tuple[LayerRange, ...]
    device: str
    threads: int

    @property
    def gpus(self) -> int:
        """GPUs of one stage."""
        return 1 if self.device.startswith("cuda") else 0

    def describe(self) -> str:
        """One line for the user, printed before anything is loaded."""
        return (
            f"placement: pipeline, {_copies(self.replicas)} of {len(self.stages)} stages on {self.device}, layers "
            f"{_ranges(self.stages)}, {self.threads} CPU threads a stage"
        )


@dataclass(frozen=True)
class StreamedPlacement:
    """One replica that has a range of layers at a time, and reads the next one while this one runs.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads.
        memory: Bytes that it may take of the device.
        ranges: The layers that are there at one time.
    """

    device: str
    threads: int
    memory: int
    ranges: tuple[LayerRange, ...]

    @property
    def replicas(self) -> int:
        """One: each weight is read once."""
        return 1

    @property
    def gpus(self) -> int:
        """GPUs that it takes."""
        return 1 if self.device.startswith("cuda") else 0

    def describe(self) -> str:
        """One line for the user, printed before anything is loaded."""
        largest = max(last - first for first, last in self.ranges)
        return (
            f"placement: streamed, on {self.device} within {self.memory / 2**30:.2f} GiB, {self.ranges[-1][1]} layers "
            f"in {len(self.ranges)} ranges of at most {largest}, {self.threads} CPU threads"
        )


Placement = WholePlacement | ShardedPlacement | PipelinePlacement | StreamedPlacement

_OFFLOADED = {"cpu": "in RAM", "disk": "on disk", None: ""}


def _copies(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def _ranges(ranges: Sequence[LayerRange]) -> str:
    """``0-4 5-9``: first and last layer of each; of many ranges the first and the last ones."""
    named = [f"{first}-{last - 1}" if last > first else "none" for first, last in ranges]
    return " ".join(named if len(named) <= 8 else [*named[:4], "...", *named[-2:]])
