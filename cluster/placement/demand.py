"""The memory that a model needs on each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscan.cluster.placement.placement_base import LayerRange, Placement, PlacementError

if TYPE_CHECKING:
    from headscan.sizing.model_sizes import ModelSizes

#: Positions whose logits are in memory together when tasks are evaluated. A task that scores every token may need
#: more; if they do not fit, the batch is halved.
_LOGIT_PLACES = 512


@dataclass(frozen=True)
class DeviceBytes:
    """Memory use of one device.

    Attributes:
        name: For messages.
        layers: The layers on it.
        weights, cache, activations, panel: Bytes of weights, KV cache and activations, and what measuring adds.
        usable: Usable bytes; None for a disk.
    """

    name: str
    layers: LayerRange
    weights: int
    cache: int = 0
    activations: int = 0
    panel: int = 0
    usable: int | None = None

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.weights + self.cache + self.activations + self.panel


@dataclass(frozen=True)
class Plan:
    """A placement with the memory that it uses.

    Attributes:
        placement: The placement.
        devices: Memory use of each device of one replica while a batch of ``batch_tokens`` runs.
        batch_tokens: Tokens of one forward pass, padding included: the most that fit, and no more than requested.
        why: A line for each rejected placement, with the reason.
    """

    placement: Placement
    devices: tuple[DeviceBytes, ...]
    batch_tokens: int
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Demand:
    """The memory that a model needs while batches of sequences run.

    Attributes:
        sizes: The model's bytes, for the longest sequence.
        batch_tokens: Most tokens of a forward pass.
        evaluates: Tasks are evaluated: there are logits and, unless passes are staged, a KV cache.
        staged: Passes run range by range of the layers: without a KV cache, but with hidden states that wait between
            the ranges.
    """

    sizes: ModelSizes
    batch_tokens: int
    evaluates: bool = False
    staged: bool = False

    @property
    def layers(self) -> list[int]:
        """Bytes of each layer's weights, including embedding and head.

        The first layer includes the embedding, the last the head.
        """
        sizes = self.sizes
        found = list(sizes.blocks)
        found[0] += sizes.embedding + (0 if self.staged else sizes.rest)
        # A tied head shares the embedding's weight; on the last of several stages it is a copy.
        found[-1] += sizes.embedding if self.staged and sizes.tied else sizes.head
        return found

    def divisible_layers(self) -> list[int]:
        """Return `layers` of a model that can be divided.

        Raises:
            PlacementError: The model cannot be divided.
        """
        if not self.sizes.blocks or (self.staged and not self.sizes.decoder):
            reason = "its layers cannot run on their own" if self.sizes.blocks else "it has no list of layers"
            raise PlacementError(f"the model cannot be divided: {reason}")
        return self.layers

    def weights(self, layers: LayerRange) -> int:
        """Return the bytes of a range's weights.

        Every stage also holds the final norm and the positions.
        """
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
        """Return the same for one sequence, the smallest batch."""
        return self.without_weights(self.sizes.tokens, layers)

    def most_tokens(self, free: int, layers: LayerRange) -> int:
        """Return the tokens of the largest batch that fits in ``free`` bytes.

        It is at least one sequence.
        """
        low, high = self.sizes.tokens, max(self.sizes.tokens, self.batch_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.without_weights(middle, layers) <= free:
                low = middle
            else:
                high = middle - 1
        return low
