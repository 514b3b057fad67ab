"""The interface of a placement of replicas on devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from headscan.cluster.placement.byte_sizes import format_bytes
from headscan.errors import HeadscanError

if TYPE_CHECKING:
    from headscan.cluster.placement.choose import PlacementRequest
    from headscan.cluster.placement.demand import Demand, Plan
    from headscan.cluster.placement.places import Places
    from headscan.models.layout import Sharding

#: Where a replica keeps layers that do not fit on its GPUs.
Offload = Literal["cpu", "disk"]

#: The first layer, and the one after the last.
LayerRange = tuple[int, int]


class PlacementError(HeadscanError):
    """A placement that these devices do not allow."""


class Placement(ABC):
    """How the replicas of a model are laid out on devices.

    A new placement is a subclass, a line in `kinds.PLACEMENTS`, and its pool in `open_pool`.

    Attributes:
        name: Value of ``placement`` in a `PlacementRequest`.
        summary: Noun phrase for help texts.
        options: Fields of `PlacementRequest` that only this placement uses.
        staged: Forward passes run range by range of the layers, so pools take tasks of `staged_task` only.
        replicas: Number of copies of the model.
        threads: CPU threads of one worker.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    staged: ClassVar[bool] = False
    replicas: int
    threads: int

    @classmethod
    @abstractmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> Plan:
        """Lay the model out on devices.

        Raises:
            PlacementError: It does not fit.
        """

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
        """Return `target` here, on the GPUs with the most free memory.

        Raises:
            PlacementError: The GPUs' free memory cannot be read.
        """


def too_large(need: int, has: int, where: str) -> str:
    """Return a message about bytes that do not fit."""
    return f"{format_bytes(need)} needed on {where} (limit {format_bytes(has)}; {format_bytes(need - has)} missing)"


def replicas_text(replicas: int) -> str:
    """Return ``1 replica`` or ``3 replicas``."""
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def ranges_text(ranges: Sequence[LayerRange]) -> str:
    """Return first and last layer of each range, such as ``0-4 5-9``.

    Long lists are shortened.
    """
    named = [f"{first}-{last - 1}" if last > first else "none" for first, last in ranges]
    return " ".join(named if len(named) <= 8 else [*named[:4], "...", *named[-2:]])


def on_one_gpu(device: str) -> int:
    """Return 1 for ``cuda`` and ``cuda:N``, 0 for ``cpu``."""
    return 1 if device.startswith("cuda") else 0
