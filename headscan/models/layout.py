"""The parts of a model by name and their devices, and one block of a decoder with hooks on its input and its forward.

Parts are found from the modules, so a model on the meta device is enough.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from headscan.errors import ModelLoadError

#: Called with the input of a block and the KV cache; returns a replacement of the input, or None to keep it.
HiddenHook = Callable[[Tensor, Cache | None], Tensor | None]


@dataclass(frozen=True)
class Block:
    """One block, or its attention, which takes hidden states (B, N, E) and returns new ones.

    Attributes:
        module: The module that the model calls.
        argument: Name of its first argument, the hidden states.
        extras: Number of further values that it returns; None means that it returns the hidden states, not a tuple.
    """

    module: nn.Module
    argument: str
    extras: int | None

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden states among the arguments of a call."""
        return kwargs[self.argument] if self.argument in kwargs else args[0]

    @contextmanager
    def watched(self, hidden_hook: HiddenHook) -> Iterator[None]:
        """Call a hook with each pass's input, which it may replace."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
            changed = hidden_hook(self.hidden(args, kwargs), cache)
            if changed is None:
                return None
            if self.argument in kwargs:
                return args, kwargs | {self.argument: changed}
            return (changed, *args[1:]), kwargs

        handle = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def skipped(self) -> AbstractContextManager[None]:
        """Let the block return its input."""
        return self.replaced(lambda hidden: hidden)

    @contextmanager
    def replaced(self, compute: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let the block return ``compute`` of its input.

        The module stays in the model, so the model's loop can read its attributes. Accelerate keeps the forward of an
        offloaded module in the same attribute, so it loads no weights for a replaced block.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = compute(self.hidden(args, kwargs))
            return hidden if self.extras is None else (hidden, *[None] * self.extras)

        own = vars(self.module)
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before


class FoundBlocks(NamedTuple):
    """The blocks, and the attention that can be replaced, by layer."""

    all: tuple[Block, ...]
    attention: Mapping[int, Block]


#: A GPU's number, ``cpu`` or ``disk``, as accelerate names devices.
Device = int | str


@dataclass(frozen=True)
class Layout:
    """The parts of a model, by module name.

    Attributes:
        embedding: Name of the module that embeds tokens.
        blocks: Names of the blocks, one a layer, the encoder's first; empty if the model has no list of blocks.
        head: Name of the module that computes logits; None if the model has none.
        tied: The head shares the embedding's weight.
    """

    embedding: str
    blocks: tuple[str, ...]
    head: str | None
    tied: bool

    def part_of(self, parameter: str) -> int | Literal["embedding", "head", "rest"]:
        """Return a parameter's part: its block's index, or a name."""
        for index, block in enumerate(self.blocks):
            if parameter.startswith(f"{block}."):
                return index
        if parameter.startswith(f"{self.embedding}."):
            return "embedding"
        return "head" if self.head is not None and parameter.startswith(f"{self.head}.") else "rest"


def find_layout(model: PreTrainedModel) -> Layout:
    """Find the parts of a model; it needs no weights."""
    names = {module: name for name, module in model.named_modules()}
    words: Any = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = isinstance(head, nn.Module) and getattr(head, "weight", None) is words.weight
    blocks = tuple(name for path, size in _block_lists(model) for name in (f"{path}.{i}" for i in range(size)))
    return Layout(names[words], blocks, names.get(head) if isinstance(head, nn.Module) else None, tied)


def _block_lists(model: PreTrainedModel) -> list[tuple[str, int]]:
    """Return the lists of blocks with their numbers of layers. An encoder-decoder has two, all others one."""
    config = model.config.get_text_config()
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    sizes = {name: sum(p.numel() for p in blocks.parameters()) for name, blocks in found.items()}
    if model.config.is_encoder_decoder:
        both = sorted(sizes, key=lambda name: -sizes[name])[:2]
        return [(name, len(found[name])) for name in found if name in both]
    layers = int(getattr(config, "num_hidden_layers", 0))
    # A list may end with other blocks, such as those that predict a further token.
    of_layers = [name for name, blocks in found.items() if layers and len(blocks) >= layers]
    return [(max(of_layers, key=sizes.__getitem__), layers)] if of_layers else []


@dataclass(frozen=True)
class Sharding:
    """The layers of one copy of a model on several devices.

    Attributes:
        devices: The devices that compute, in order of layers: GPU numbers, or ``cpu``.
        layers: For each device its first layer and the layer after its last one.
        offload: Where further layers are kept until they run on the first device: ``cpu`` or ``disk``. None means that
            ``layers`` covers the model.

    Raises:
        ModelLoadError: The number of ranges and devices differs, or the ranges do not cover the layers from 0 on.
    """

    devices: tuple[Device, ...]
    layers: tuple[tuple[int, int], ...]
    offload: Literal["cpu", "disk"] | None = None

    def __post_init__(self) -> None:
        bounds = [(0, 0), *self.layers]
        if len(self.devices) != len(self.layers) or any(a[1] != b[0] or b[0] > b[1] for a, b in pairwise(bounds)):
            raise ModelLoadError(
                f"layer ranges do not fit the devices: {self.layers} on {self.devices}. Pass one range a device, from "
                "layer 0 on, without gaps"
            )

    def device_map(self, model: PreTrainedModel) -> dict[str, Device]:
        """Return accelerate's device map, which splits no block.

        Modules before the blocks are on the first device; those after them and the head on the last one. A head that
        shares the embedding's weight is on the first device.

        Raises:
            ModelLoadError: The model has no list of blocks, or another number of layers.
        """
        layout = find_layout(model)
        layers, covered = len(layout.blocks), self.layers[-1][1]
        if covered > layers or not layers or (covered < layers and self.offload is None):
            raise ModelLoadError(f"layer ranges {self.layers} do not fit a model of {layers} layers. Cover each once")
        device_of: dict[str, Device] = dict.fromkeys(layout.blocks[covered:], self.offload or "disk")
        for device, (first, last) in zip(self.devices, self.layers, strict=True):
            device_of.update(dict.fromkeys(layout.blocks[first:last], device))
        first_device, last_device = self.devices[0], self.devices[-1]
        device_of[layout.embedding] = first_device
        if layout.head is not None:
            device_of[layout.head] = first_device if layout.tied else last_device
        behind = False
        for name in _outside(model, "", device_of):
            behind |= name == layout.blocks[-1]
            if name not in device_of:
                device_of[name] = last_device if behind and _has_weights(model, name) else first_device
        return device_of


def _outside(module: nn.Module, path: str, parts: Mapping[str, Device]) -> Iterator[str]:
    """Yield the fewest names that cover a module, in order. They are its parts, and the modules and tensors outside
    them.
    """
    if path in parts or not any(part.startswith(f"{path}." if path else "") for part in parts):
        yield path
        return
    prefix = f"{path}." if path else ""
    for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield prefix + name
    for name, child in module.named_children():
        yield from _outside(child, prefix + name, parts)


def _has_weights(model: nn.Module, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(parent), leaf)
    return not isinstance(found, nn.Module) or any(True for _ in found.parameters())
