"""A loaded model with tokenizer and head grid, its parts and their devices, one block with hooks, and chosen logits.

Parts are found from the modules, so a model on the meta device is enough.

Shapes: B sequences, N tokens, M chosen positions, E width of a hidden state, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from headscan.errors import ModelLoadError, UnsupportedModelError, check_type
from headscan.grid import HeadGrid
from headscan.models.forward_inputs import input_device
from headscan.models.model_facts import RopeLengths, usable_positions
from headscan.models.token_batches import MemoryLimit


class StandIn(partial[Any]):
    """The forward of a module that headscan replaces for a while, see `Block.replaced`."""


#: Called with the input of a block and the KV cache; returns a replacement of the input, or None to keep it.
HiddenHook = Callable[[Tensor, Cache | None], Tensor | None]


@dataclass(frozen=True)
class Block:
    """One block, or its attention, which takes hidden states (B, N, E) and returns new ones.

    Attributes:
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

        with self.module.register_forward_pre_hook(hook, with_kwargs=True):
            yield

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
        own["forward"] = StandIn(forward)
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
        blocks: One a layer, the encoder's first; empty if the model has no list of blocks.
        head: None if the model computes no logits.
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
    """Find the parts of a model, with or without weights."""
    names = {module: name for name, module in model.named_modules()}
    words: Any = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = isinstance(head, nn.Module) and getattr(head, "weight", None) is words.weight
    blocks = tuple(name for path, size in _block_lists(model) for name in (f"{path}.{i}" for i in range(size)))
    return Layout(names[words], blocks, names.get(head) if isinstance(head, nn.Module) else None, tied)


def _block_lists(model: PreTrainedModel) -> list[tuple[str, int]]:
    """Return the lists of blocks with their numbers of layers. An encoder-decoder has two, all others one."""
    config = model.config.get_text_config()
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    sizes = {name: sum(p.numel() for p in blocks.parameters()) for name, blocks in lists.items()}
    if model.config.is_encoder_decoder:
        both = sorted(sizes, key=lambda name: -sizes[name])[:2]
        return [(name, len(lists[name])) for name in lists if name in both]
    layers = int(getattr(config, "num_hidden_layers", 0))
    # A list may end with other blocks, such as those that predict a further token.
    of_layers = [name for name, blocks in lists.items() if len(blocks) >= layers]
    if not of_layers:
        return []
    largest = max(of_layers, key=sizes.__getitem__)
    return [(largest, layers or len(lists[largest]))]  # configurations of remote code may name the number otherwise


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
        try:
            bounds = [(0, 0), *((int(first), int(last)) for first, last in self.layers)]
            devices = tuple(self.devices) if not isinstance(self.devices, str) else (self.devices,)
        except (TypeError, ValueError):
            raise ModelLoadError(
                f"no layer ranges on devices: {self.layers!r} on {self.devices!r}. Pass `devices=(0, 1)` and "
                "`layers=((0, 16), (16, 32))`"
            ) from None
        if self.offload not in (None, "cpu", "disk"):
            raise ModelLoadError(f"`offload={self.offload!r}` is unknown. Choose cpu or disk, or None")
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "layers", tuple(bounds[1:]))
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
    """Yield the fewest names that cover a module, in order: its parts, and the modules and tensors outside them."""
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
    part = getattr(model.get_submodule(parent), leaf)
    return not isinstance(part, nn.Module) or any(True for _ in part.parameters())


def attention_functions(model: PreTrainedModel) -> frozenset[tuple[str, str]]:
    """Return the attention implementations that the configurations inside a model name, with their functions. A model
    has its own function for ``eager``.
    """
    functions = AttentionInterface()
    names = {str(part.config._attn_implementation) for part in model.modules() if isinstance(part, PreTrainedModel)}
    found = {name: functions.get(name) for name in names}
    return frozenset(
        (name, f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', '')}") for name, f in found.items()
    )


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model whose heads can be measured.

    Attributes:
        model: The transformers model, in evaluation mode.
        tokenizer: Its tokenizer; None if the source has none.
        grid: Its heads.
        source: Its folder or hub name.
        revision: Commit on the hub; None for a folder.
        limits: By kind of work, the sizes that ran out of memory on this model's devices.
        blocks: By name of a list of blocks, the result of `blocks.find_blocks`.
        projection_factors: By name of an output projection, the checksum of its weight and its factor
            (`headscan.statistics.norm_statistics`).
        checks: By name and dtype, what short passes showed of the model, such as that a cached prefix can be continued.
        attention: Names and functions of the model's attention (`attention_functions`) when its heads were discovered.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    grid: HeadGrid
    source: str
    revision: str | None = None
    limits: defaultdict[str, MemoryLimit] = field(
        default_factory=lambda: defaultdict(MemoryLimit), compare=False, repr=False, kw_only=True
    )
    projection_factors: dict[str, tuple[float | None, Tensor]] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )

    blocks: dict[str, FoundBlocks] = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    checks: dict[tuple[str, str], bool] = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    attention: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False, repr=False, kw_only=True)

    #: True if a pass must be as wide as its ids, padding included.
    keeps_padding: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.attention:
            object.__setattr__(self, "attention", attention_functions(self.model))

    def __repr__(self) -> str:
        tokens = "" if self.max_tokens is None else f", {self.max_tokens:,} tokens"
        kind = f"{type(self.model).__name__}, {self.dtype} on {self.device}{tokens}"
        return f"LoadedModel({self.source}: {kind}; {self.grid})"

    @property
    def device(self) -> torch.device:
        """Device of token ids."""
        return input_device(self.model)

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype."""
        return str(self.model.dtype).removeprefix("torch.")

    @cached_property
    def max_tokens(self) -> int | None:
        """Largest number of tokens with positions; None without a limit."""
        return usable_positions(self.model)

    @cached_property
    def rope_lengths(self) -> RopeLengths:
        """The sequence lengths at which the rotary frequencies change."""
        return RopeLengths.of(self.model.config)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def decoder_start_id(self) -> int | None:
        """Id of the token with which the decoder of an encoder-decoder begins; None if the model names none."""
        configs = (self.model.config, self.model.generation_config)
        starts = [getattr(config, "decoder_start_token_id", None) for config in configs]
        return next((start for start in (*starts, self.model.config.pad_token_id) if start is not None), None)

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return bool(self.model.config.is_encoder_decoder)

    def at(self, kind: str) -> LoadedModel:
        """Return the same model with the grid of another site.

        Raises:
            HeadIndexError: The model has no such sites.
        """
        return replace(self, grid=self.grid.at(kind))

    def sink_tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens to which heads attend when they have nothing to read, bool, shaped like ``ids`` (B, N): the
        first token of a sequence (arXiv 2309.17453), and tokens that end one (arXiv 1905.09418).
        """
        known = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        ends = [] if known is None else known if isinstance(known, list) else [known]
        sinks = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
        sinks[:, 0] = True
        return sinks

    def module(self, path: str) -> nn.Module:
        """Return a module of the model by name."""
        return self.model.get_submodule(path)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; raise if the source has none."""
        if self.tokenizer is None:
            raise ModelLoadError(f"{self.source} has no tokenizer. Save one to this folder with save_pretrained")
        return self.tokenizer


def check_loaded(lm: object) -> None:
    """Raise ModelLoadError if an argument is not a loaded model, such as the model of transformers or its folder."""
    check_type("lm", lm, LoadedModel, "a model from `headscan.load`", ModelLoadError)


def logits_at(lm: LoadedModel, ids: Tensor, rows: list[int], columns: list[int], **kwargs: Any) -> Tensor:
    """Return logits (M, V) at the positions ``(rows[i], columns[i])`` of a batch of ids (B, N).

    An output head that is a module receives the hidden states of these positions only; otherwise logits are computed
    for whole columns, or for all positions.
    """
    head: Any = lm.model.get_output_embeddings()
    places = rows, columns
    gathered = False

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Replace the head's input (B, N, E) by its chosen hidden states (1, M, E)."""
        nonlocal gathered
        if gathered or not args or args[0].ndim != 3 or args[0].shape[:2] != ids.shape:
            return None  # a head with another call signature computes all logits
        gathered = True
        return (args[0][places][None], *args[1:])

    is_module = isinstance(head, nn.Module)
    # With logits_to_keep, layers that reuse keys of others see kept tokens only, but rules need whole sequences.
    borrows = getattr(lm.model.config.get_text_config(), "num_kv_shared_layers", 0)
    if not is_module and not borrows and "logits_to_keep" in inspect.signature(lm.model.forward).parameters:
        kept = sorted(set(columns))
        kwargs["logits_to_keep"] = torch.tensor(kept, device=lm.device)
        columns = [kept.index(column) for column in columns]
    logits: Tensor | None = None
    if "ForMultipleChoice" not in type(lm.model).__name__:  # it reads its input as the choices of one question
        with head.register_forward_pre_hook(gather) if is_module else nullcontext():
            logits = getattr(lm.model(input_ids=ids.to(lm.device), **kwargs), "logits", None)
    if logits is None or not (gathered or (logits.ndim == 3 and logits.shape[-1] >= _vocabulary(lm))):
        raise UnsupportedModelError(
            f"{lm.source} predicts no tokens: it was saved without an output head for them "
            f"({type(lm.model).__name__}). Measure its heads with a scan, or load a model with such a head"
        )
    return logits[0] if gathered else logits[rows, columns]


def _vocabulary(lm: LoadedModel) -> int:
    """Return the number of tokens that a model may predict, at least; the embedding may have further rows."""
    return min(lm.vocab_size, int(lm.model.config.get_text_config(decoder=True).vocab_size))
