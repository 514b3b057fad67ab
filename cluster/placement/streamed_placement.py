"""One device, through which the layers pass one range after another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from headscan.cluster.placement.placement_base import (
    Demand,
    LayerRange,
    Placement,
    PlacementError,
    PlacementPlan,
    Places,
    balanced_ranges,
    fewest_ranges,
    format_bytes,
    on_one_gpu,
    too_large,
)

if TYPE_CHECKING:
    from headscan.cluster.placement.placement_base import PlacementRequest


@dataclass(frozen=True)
class StreamedPlacement(Placement):
    """One replica that holds one of ``ranges`` at a time and reads the next range while this one runs. ``memory`` are
    the bytes of the device that it may use; ``replicas`` is always 1, so that each weight is read once.
    """

    name: ClassVar[str] = "streamed"
    options: ClassVar[tuple[str, ...]] = ("memory",)
    staged: ClassVar[bool] = True

    device: str
    threads: int
    memory: int
    ranges: tuple[LayerRange, ...]
    replicas: int = field(default=1, init=False)

    @classmethod
    def plan(cls, demand: Demand, places: Places, request: PlacementRequest) -> PlacementPlan:
        """Use the largest device. The batch is chosen first, then the fewest ranges that leave room for it, so more
        memory never gives a smaller batch: fewer ranges would take memory from it. Without a requested batch size the
        batch gets at most half of the memory, unless the whole model leaves more.
        """
        demand = replace(demand, staged=True)
        layers = demand.divisible_layers()
        if (request.replicas or 1) > 1:
            raise PlacementError(f"replicas={request.replicas} (limit 1: each weight is read once). Set replicas=1")
        room = places.sizes[0]
        memory = request.memory or room
        if memory > room:
            raise PlacementError(
                f"memory={format_bytes(memory)} (limit {format_bytes(room)} of the {places.kind}; "
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
                f"batch_tokens={request.batch_tokens} in {format_bytes(memory)} (limit {tokens}). "
                f"Set batch_tokens={tokens}, or raise `memory`"
            )
        node = max(places.nodes, key=lambda node: max(node.gpus) if places.on_gpus else node.memory)
        placement = cls(places.device, places.allowed(node.cpus), memory, ranges)
        device = demand.on_device(places.kind, every, weights, tokens, memory)
        waiting = (shares - 1) * demand.without_weights(tokens, every)
        return PlacementPlan(placement, (replace(device, activations=device.activations + waiting),), tokens)

    @property
    def gpus(self) -> int:
        return on_one_gpu(self.device)

    def describe(self) -> str:
        largest = max(last - first for first, last in self.ranges)
        return (
            f"placement: streamed, on {self.device} within {self.memory / 2**30:.2f} GiB, {self.ranges[-1][1]} layers "
            f"in {len(self.ranges)} ranges of at most {largest}, {self.threads} CPU threads"
        )
