"""The parts of a model from its embedding to its head, by name, and which device of several each goes to.

All of it is read off the modules, so a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from headscan.errors import ModelLoadError

#: A GPU's number, ``cpu`` or ``disk``, as accelerate names devices.
Device = int | str


@dataclass(frozen=True)
class Layout:
    """The parts of a model.

    Attributes:
        embedding: Name of the module that embeds tokens.
        blocks: Names of the blocks, one for each layer, the encoder's first; none where no list of them is found.
        head: Name of the module that makes logits; None where there is none.
        tied: The head's weight is the embedding's.
    """

    embedding: str
    blocks: tuple[str, ...]
    head: str | None
    tied: bool

    def part_of(self, parameter: str) -> int | Literal["embedding", "head", "rest"]:
        """Where a parameter belongs, by its name: the index of its block, or one of the other parts."""
        for index, block in enumerate(self.blocks):
            if parameter.startswith(f"{block}."):
                return index
        if parameter.startswith(f"{self.embedding}."):
            return "embedding"
        return "head" if self.head is not None and parameter.startswith(f"{self.head}.") else "rest"


def find_layout(model: PreTrainedModel) -> Layout:
    """Find the parts of a model, without weights or with them."""
    names = {module: name for name, module in model.named_modules()}
    words: Any = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = isinstance(head, nn.Module) and getattr(head, "weight", None) is words.weight
    blocks = tuple(name for path, size in _block_lists(model) for name in (f"{path}.{i}" for i in range(size)))
    return Layout(names[words], blocks, names.get(head) if isinstance(head, nn.Module) else None, tied)


def _block_lists(model: PreTrainedModel) -> list[tuple[str, int]]:
    """The lists of blocks, with how many of their members are layers: of an encoder-decoder two, of others one."""
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
    # A list may go on with blocks of other use, such as those that predict a further token.
    of_layers = [name for name, blocks in found.items() if layers and len(blocks) >= layers]
    return [(max(of_layers, key=sizes.__getitem__), layers)] if of_layers else []


@dataclass(frozen=True)
class Sharding:
    """How one copy of a model lies over several devices.

    Attributes:
        devices: GPU numbers, or ``cpu``: the ones that compute, in order of the layers.
        layers: For each of them the first layer it has and the one after its last.
        offload: Where the layers beyond go, ``cpu`` or ``disk``, to be brought to the first device when they run; None:
            there are none.

    Raises:
        ModelLoadError: The ranges are not one a device, or do not follow each other from layer 0.
    """

    devices: tuple[Device, ...]
    layers: tuple[tuple[int, int], ...]
    offload: Literal["cpu", "disk"] | None = None

    def __post_init__(self) -> None:
        bounds = [(0, 0), *self.layers]
        if len(self.devices) != len(self.layers) or any(a[1] != b[0] or b[0] > b[1] for a, b in pairwise(bounds)):
            raise ModelLoadError(
                f"layer ranges {self.layers} on devices {self.devices}: give one range a device, from layer 0 on, "
                "without gaps"
            )

    def device_map(self, model: PreTrainedModel) -> dict[str, Device]:
        """Accelerate's device map: the device of every part of a model, blocks never split.

        What runs before the blocks is on the first device; what comes after them, and the head, on the last, unless
        the head's weight is the embedding's.

        Raises:
            ModelLoadError: The model's blocks are not found, or there are more or fewer of them.
        """
        layout = find_layout(model)
        layers, covered = len(layout.blocks), self.layers[-1][1]
        if covered > layers or not layers or (covered < layers and self.offload is None):
            raise ModelLoadError(f"layer ranges {self.layers} do not fit a model of {layers} layers: name each of them")
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
    """The fewest names that cover a module in order: the parts themselves, and whatever lies beside them."""
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
