"""Inspection of a model without its weights: heads, blocks, possible cuts.

Inspection watches forward passes, which need weights. They are random, and blocks with equal shapes share them: a model
of any depth takes the memory of its two ends and one block. Passes through the whole model and through ranges of layers
must give the same output.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.discovery import discover
from headscan.errors import UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.layers.blocks import find_blocks, short_text
from headscan.layers.layer_range_pass import WholePass, running_range
from headscan.models.decoder_block import Block
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.partial.lazy_model import LazyModel

#: Tokens of the short texts.
_TOKENS = 8


@dataclass(frozen=True)
class BlockForm:
    """A block by name, with the fields of `blocks.Block`."""

    path: str
    argument: str
    extras: int | None


@dataclass(frozen=True)
class Inspection:
    """The facts for running a range of a model's layers.

    Attributes:
        grid: All its heads.
        blocks: The blocks, one for each layer.
        outside: Names of the weights outside the blocks that every pass reads, such as norms and position tables.
        embedding: Names of the weights of the word embedding.
        ending: Names of the weights that turn the last hidden states into logits.
        embeds_everywhere: Later layers read the word embeddings in addition to their hidden states.
        uncuttable: Layers that cannot be the first of a range, with the reason.
    """

    grid: HeadGrid
    blocks: tuple[BlockForm, ...]
    outside: frozenset[str]
    embedding: frozenset[str]
    ending: frozenset[str]
    embeds_everywhere: bool
    uncuttable: dict[int, str]

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def blocks_of(self, model: PreTrainedModel) -> tuple[Block, ...]:
        """Return the blocks of a model of this architecture."""
        return tuple(Block(model.get_submodule(form.path), form.argument, form.extras) for form in self.blocks)

    def weights(self, lazy_model: LazyModel, first: int, last: int) -> tuple[str, ...]:
        """Return the names of the weights of a range of layers.

        The layers are ``first`` to ``last - 1``; the model's ends are included where they belong.
        """
        paths = tuple(f"{form.path}." for form in self.blocks[first:last])
        wanted: set[str] = set()
        if first == 0 or self.embeds_everywhere:
            wanted |= self.embedding
        if last == self.num_layers:
            wanted |= self.ending
        return tuple(
            name
            for name in lazy_model.names
            if any(alias in wanted or alias.startswith(paths) for alias in lazy_model.aliases(name))
        )

    def check(self, bounds: Sequence[int]) -> None:
        """Raise if the layers cannot be divided into these ranges.

        Args:
            bounds: The first layers of the ranges, then the number of layers: ``[0, 8, 16]``.

        Raises:
            UnsupportedModelError: They are out of order or out of range, or the model cannot be cut there.
        """
        if list(bounds) != sorted(set(bounds)) or len(bounds) < 2 or bounds[0] < 0 or bounds[-1] > self.num_layers:
            raise UnsupportedModelError(
                f"the layers cannot be divided at {', '.join(map(str, bounds))} (limit {self.num_layers}). Pass "
                "layers in ascending order"
            )
        for layer in bounds[:-1]:
            if layer in self.uncuttable:
                raise UnsupportedModelError(
                    f"the model cannot be cut below layer {layer}: {self.uncuttable[layer]}. Choose placement whole or "
                    "sharded"
                )


@torch.no_grad()
def inspect_model(lazy_model: LazyModel) -> Inspection:
    """Inspect a model with random weights, which are dropped afterwards.

    Raises:
        UnsupportedModelError: Its heads cannot be measured correctly, or it is not a decoder with a list of blocks.
    """
    model = lazy_model.model
    with _random_weights(lazy_model):
        grid = discover(model)
        blocks = find_blocks(LoadedModel(model, None, grid, lazy_model.source))
        forms = tuple(
            BlockForm(f"{blocks.path}.{layer}", block.argument, block.extras) for layer, block in enumerate(blocks.all)
        )
        ids = short_text(blocks.lm, _TOKENS)
        inner = {module for block in blocks.all for module in block.module.modules()}
        below = _ran(model, lambda: run(model, {"input_ids": ids}))
        above = _ran(model, lambda: model(input_ids=ids, use_cache=False)) - below
        names = {module: name for name, module in model.named_modules()}
        embedding = _weights_of(lazy_model, names, [model.get_input_embeddings()])
        outside = _weights_of(lazy_model, names, below - inner) - embedding
        ending = _weights_of(lazy_model, names, above - inner)
        # Other parts (a vision tower, for example) must not need weights in passes through a range either.
        kept = {*embedding, *outside, *(name for name in lazy_model.names if name.startswith(f"{blocks.path}."))}
        lazy_model.drop(name for name in lazy_model.names if not kept.intersection(lazy_model.aliases(name)))
        embeds_everywhere, uncuttable = _Cuts(lazy_model, blocks.all, embedding, ids).find()
    return Inspection(grid, forms, outside, embedding, ending, embeds_everywhere, uncuttable)


@contextmanager
def _random_weights(lazy_model: LazyModel) -> Iterator[None]:
    """Fill a model with random numbers, the same in every layer."""
    generator = torch.Generator(lazy_model.device).manual_seed(0)
    shared: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
    try:
        for name in lazy_model.names:
            own = lazy_model.tensor(name)
            key = (re.sub(r"\.\d+(?=\.)", "", name), own.shape, own.dtype)
            if key not in shared:
                value = torch.zeros(own.shape, dtype=own.dtype, device=lazy_model.device)
                if own.is_floating_point() and own.ndim < 2:
                    value.normal_(1.0, 0.1, generator=generator)
                elif own.is_floating_point():
                    value.normal_(0.0, own.shape[-1] ** -0.5, generator=generator)
                shared[key] = value if name in dict(lazy_model.model.named_buffers()) else nn.Parameter(value, False)
            lazy_model.assign(name, shared[key])
        yield
    finally:
        lazy_model.drop(lazy_model.names)


def _ran(model: PreTrainedModel, read: Callable[[], object]) -> set[nn.Module]:
    """Return the modules that run in a pass."""
    ran: set[nn.Module] = set()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lambda module, _: ran.add(module)).remove)
        read()
    return ran


def _weights_of(lazy_model: LazyModel, names: dict[nn.Module, str], modules: Collection[object]) -> frozenset[str]:
    """Return the names of the modules' own weights, without submodules."""
    paths = {names[module] for module in modules if isinstance(module, nn.Module)}
    aliases = (alias for name in lazy_model.names for alias in lazy_model.aliases(name))
    return frozenset(alias for alias in aliases if alias.rpartition(".")[0] in paths)


class _Cuts:
    """A comparison of passes through ranges of layers with a whole pass."""

    def __init__(self, lazy_model: LazyModel, blocks: Sequence[Block], embedding: Collection[str], ids: Tensor) -> None:
        self._lazy_model, self._blocks, self._embedding = lazy_model, blocks, embedding
        # State that a block hides for a higher one belongs to the second text when the higher one runs.
        self._texts = (ids, ids.flip(0))
        self._whole = WholePass(lambda: self._read(ids))

    def find(self) -> tuple[bool, dict[int, str]]:
        """Return whether later layers need the embeddings, and impossible cuts."""
        layers = range(1, len(self._blocks))
        for embeds in (False, True):
            if self._wrong([0, *layers, len(self._blocks)], embeds) is None:
                return embeds, {}
        found = []
        for embeds in (False, True):
            reasons = {layer: self._wrong([0, layer, len(self._blocks)], embeds) for layer in layers}
            found.append((embeds, {layer: reason for layer, reason in reasons.items() if reason is not None}))
        return min(found, key=lambda each: len(each[1]))

    def _wrong(self, bounds: Sequence[int], embeds: bool) -> str | None:
        """Return how passes through these ranges fail or differ, or None."""
        difference = self._whole.difference(lambda: self._in_ranges(bounds, embeds))
        return None if difference is None else f"a pass in ranges of layers {difference}"

    def _in_ranges(self, bounds: Sequence[int], embeds: bool) -> Tensor:
        """Return the first text's output after passes through each range.

        Both texts pass through each range.
        """
        hidden: list[Tensor | None] = [None, None]
        for first, last in pairwise(bounds):
            outs = []
            with self._embedding_kept(embeds or first == 0):
                for number, ids in enumerate(self._texts):
                    with running_range(self._blocks, first, last, hidden[number]) as range_pass:
                        outs.append(self._read(ids))
                    hidden[number] = range_pass.hidden_out
        return outs[0]

    def _read(self, ids: Tensor) -> Tensor:
        last: Tensor = run(self._lazy_model.model, {"input_ids": ids})[0]
        return last

    @contextmanager
    def _embedding_kept(self, kept: bool) -> Iterator[None]:
        """Blank the word embedding unless it is kept."""
        if kept:
            yield
            return
        before = {name: self._lazy_model.tensor(name) for name in self._embedding}
        for name in self._embedding:
            self._lazy_model.blank(name)
        try:
            yield
        finally:
            for name, tensor in before.items():
                self._lazy_model.assign(name, tensor)
