"""What a model demands of each device, and the plan that comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.cluster.placement.kinds import LayerRange, Placement
from headscan.sizing.model_sizes import ModelSizes

#: Places whose logits exist at one time when tasks are answered. One that scores every token may want more; where they
#: do not fit, the batch is halved.
_LOGIT_PLACES = 512


@dataclass(frozen=True)
class DeviceBytes:
    """What one device holds.

    Attributes:
        name: For people.
        layers: First layer and the one after the last.
        weights, cache, activations, panel: Bytes of weights, of the KV cache, of a forward pass, and of what measuring
            takes beyond that.
        usable: Bytes that there are; None: as many as the disk has.
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
        """All bytes."""
        return self.weights + self.cache + self.activations + self.panel


@dataclass(frozen=True)
class Plan:
    """A placement, and what it comes to.

    Attributes:
        placement: Where the model goes.
        devices: What each device of one replica holds, while the batch below runs.
        batch_tokens: Tokens of one forward pass, padding included: the most that fit, and no more than asked.
        why: A line for each placement that was turned down.
    """

    placement: Placement
    devices: tuple[DeviceBytes, ...]
    batch_tokens: int
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Demand:
    """What a model demands when batches of sequences run.

    Attributes:
        sizes: The model's, for the longest sequence.
        batch_tokens: Tokens of a forward pass, at most.
        evaluates: Tasks are answered: there are logits and, where passes are not staged, a KV cache.
        staged: Layers run on devices of their own, or one range after another: without a KV cache, but with hidden
            states that wait on either side.
    """

    sizes: ModelSizes
    batch_tokens: int
    evaluates: bool = False
    staged: bool = False

    @property
    def layers(self) -> list[int]:
        """Bytes of each layer's weights, the embedding with the first and the head with the last."""
        sizes = self.sizes
        found = list(sizes.blocks)
        found[0] += sizes.embedding + (0 if self.staged else sizes.rest)
        # A head that is the embedding's weight is beside it, or has a copy of its own on the last stage.
        found[-1] += sizes.embedding if self.staged and sizes.tied else sizes.head
        return found

    def weights(self, layers: LayerRange) -> int:
        """Bytes of the weights of some layers; every stage has what is neither block nor end (norms, positions)."""
        return sum(self.layers[slice(*layers)]) + (self.sizes.rest if self.staged else 0)

    def on_device(self, name: str, layers: LayerRange, weights: int, tokens: int, usable: int) -> DeviceBytes:
        """What a device with these layers holds while a batch of so many tokens runs."""
        sizes = self.sizes
        plain = sizes.activation_bytes(tokens, measured=False)
        measured = sizes.activation_bytes(tokens, measured=True)
        # A scan always measures; of an evaluation only the rules do.
        activations = plain if self.evaluates else min(plain, measured)
        cache = 0
        if self.evaluates and layers[1] == sizes.num_layers:
            activations += _LOGIT_PLACES * sizes.logits
        if self.evaluates and not self.staged:
            cache = sizes.cache_bytes(tokens, *layers)
        if self.staged:
            activations += 4 * tokens * sizes.hidden
        return DeviceBytes(name, layers, weights, cache, activations, max(0, measured - plain), usable)

    def beside(self, tokens: int, layers: LayerRange) -> int:
        """Bytes beside the weights on a device with these layers."""
        return self.on_device("", layers, 0, tokens, 0).total

    def least(self, layers: LayerRange) -> int:
        """The same for one sequence, which is the smallest batch."""
        return self.beside(self.sizes.tokens, layers)

    def most_tokens(self, free: int, layers: LayerRange) -> int:
        """Tokens of the largest batch for which so many bytes suffice; of one sequence at least."""
        low, high = self.sizes.tokens, max(self.sizes.tokens, self.batch_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.beside(middle, layers) <= free:
                low = middle
            else:
                high = middle - 1
        return low
