"""Choice of a model's placement: the requested or first fitting one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headscan.cluster.placement.demand import Demand, DeviceBytes, Plan
from headscan.cluster.placement.devices import Node
from headscan.cluster.placement.kinds import (
    PLACEMENTS,
    PipelinePlacement,
    Placement,
    PlacementError,
    ShardedPlacement,
    StreamedPlacement,
    WholePlacement,
)
from headscan.cluster.placement.placement_base import Offload
from headscan.cluster.placement.places import Places

if TYPE_CHECKING:
    from headscan.sizing.model_sizes import ModelSizes

__all__ = [
    "BATCH_TOKENS",
    "DeviceBytes",
    "PipelinePlacement",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "Plan",
    "ShardedPlacement",
    "StreamedPlacement",
    "WholePlacement",
    "place",
]

#: Default number of tokens of one forward pass.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class PlacementRequest:
    """The placement that a user requests; None leaves a choice to `place`.

    Attributes:
        placement: ``auto`` or a name from `PLACEMENTS`.
        replicas: Copies of the model.
        stages: Stages of a pipeline.
        gpus_per_replica: GPUs of a sharded replica.
        memory: Bytes of its device that streaming may use.
        device: ``auto`` (GPUs if there are any), ``cpu``, ``cuda`` or ``cuda:N``.
        batch_tokens: Tokens of one forward pass. None uses `BATCH_TOKENS`, or the most that ``memory`` holds.
        offload: Where a sharded replica keeps layers that do not fit on its devices. None disables offloading.
        evaluates: Tasks are evaluated, which needs memory for logits and a KV cache.
        max_threads: Limit of the CPU threads of a worker. None uses its share of the cores.

    Raises:
        PlacementError: A number is below 1, a placement or device is unknown, or options exclude each other.
    """

    placement: str = "auto"
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
        if self.placement not in ("auto", *PLACEMENTS):
            raise PlacementError(f"unknown placement {self.placement!r}. Choose auto, {', '.join(PLACEMENTS)}")
        for name in ("replicas", "stages", "gpus_per_replica", "batch_tokens", "max_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlacementError(f"{name}={value} is too small. Give at least 1")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise PlacementError(f"unknown device {self.device!r}. Choose auto, cpu, cuda or cuda:N")
        for kind in PLACEMENTS.values():
            for name in self._given(kind):
                if kind not in self.kinds:
                    raise PlacementError(f"`{name}` is only for placement={kind.name}. Leave out one of the two")

    @property
    def kinds(self) -> tuple[type[Placement], ...]:
        """The placements to try in turn.

        They are the named one, else the one of a given option, else all.
        """
        if self.placement != "auto":
            return (PLACEMENTS[self.placement],)
        return next(((kind,) for kind in PLACEMENTS.values() if self._given(kind)), tuple(PLACEMENTS.values()))

    def _given(self, kind: type[Placement]) -> list[str]:
        """Return the given options that only this placement uses."""
        return [name for name in kind.options if getattr(self, name) is not None]


def place(sizes: ModelSizes, nodes: Sequence[Node], request: PlacementRequest) -> Plan:
    """Choose a placement.

    Args:
        sizes: The model's bytes, for the longest sequence.
        nodes: The available machines.
        request: The requested placement.

    Raises:
        PlacementError: Nothing fits; the message names the missing bytes and a fix.
    """
    places = Places(nodes, request)
    demand = Demand(sizes, request.batch_tokens or BATCH_TOKENS, request.evaluates)
    refusals: list[str] = []
    for kind in request.kinds:
        try:
            plan = kind.plan(demand, places, request)
        except PlacementError as problem:
            refusals.append(f"{kind.name}: {problem}")
        else:
            return replace(plan, why=tuple(refusals))
    fix = "Set placement=auto to use what fits" if len(request.kinds) == 1 else "Use larger devices, or more of them"
    raise PlacementError(f"{sizes.name} cannot be placed. {'. '.join(refusals)}. {fix}")
