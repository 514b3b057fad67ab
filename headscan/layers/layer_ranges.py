"""Stages: models that load one range of layers at a time, and the inspection that shows where a model can be cut.

    layers = headscan.layers.layer_ranges.open_layers(ModelSpec("path-or-hub-name"), "cpu")
    with layers.at(0, 16) as stage, stage.running_range() as range_pass:
        low = headscan.collect(stage.lm, ids, lengths)
    with layers.at(16, 32) as stage, stage.running_range(range_pass.hidden_out):
        high = headscan.collect(stage.lm, ids, lengths)

All measurements and ablations work unchanged on the heads of a stage. Inspection watches forward passes, which need
weights. They are random, and blocks with equal shapes share them: a model of any depth takes the memory of its two ends
and one block. Passes through the whole model and through ranges of layers must give the same output.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headscan.ablation.intervention import Intervention
from headscan.attention.discovery import discover
from headscan.errors import UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.layers.blocks import RangePass, WholePass, find_blocks, running_range, short_text
from headscan.layers.lazy_model import LazyModel, RawTensors
from headscan.model_spec import ModelSpec
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import Block, LoadedModel

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
    """The facts for running a range of a model's layers: all its heads, and its blocks, one for each layer.

    Attributes:
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
        return len(self.blocks)

    def weights(self, lazy_model: LazyModel, first: int, last: int) -> tuple[str, ...]:
        """Return the names of the weights of the layers ``first`` to ``last - 1`` and the model's ends with them."""
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
        """Raise if the layers cannot be divided at ``bounds``: the first layers of ranges, and the number of layers."""
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
    """Inspect a model with random weights, which are dropped afterwards."""
    model = lazy_model.model
    with _random_weights(lazy_model):
        grid = discover(model)
        blocks = find_blocks(LoadedModel(model, None, grid, lazy_model.source))
        forms = tuple(
            BlockForm(f"{blocks.path}.{layer}", block.argument, block.extras) for layer, block in enumerate(blocks.all)
        )
        ids = short_text(blocks.lm, _TOKENS)
        inner = {module for block in blocks.all for module in block.module.modules()}
        below = _ran(model, lambda: run_forward(model, {"input_ids": ids}))
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
        self._whole = WholePass(lambda: self._forward(ids))

    def find(self) -> tuple[bool, dict[int, str]]:
        """Return whether later layers need the embeddings, and impossible cuts."""
        layers = range(1, len(self._blocks))
        for embeds in (False, True):
            if self._wrong([0, *layers, len(self._blocks)], embeds) is None:
                return embeds, {}
        candidates = []
        for embeds in (False, True):
            reasons = {layer: self._wrong([0, layer, len(self._blocks)], embeds) for layer in layers}
            candidates.append((embeds, {layer: reason for layer, reason in reasons.items() if reason is not None}))
        return min(candidates, key=lambda candidate: len(candidate[1]))

    def _wrong(self, bounds: Sequence[int], embeds: bool) -> str | None:
        """Return how passes through these ranges fail or differ, or None."""
        difference = self._whole.difference(lambda: self._in_ranges(bounds, embeds))
        return None if difference is None else f"a pass in ranges of layers {difference}"

    def _in_ranges(self, bounds: Sequence[int], embeds: bool) -> Tensor:
        """Return the first text's output after passes through each range. Both texts pass through each range."""
        hidden: list[Tensor | None] = [None, None]
        for first, last in pairwise(bounds):
            outs = []
            with self._embedding_kept(embeds or first == 0):
                for number, ids in enumerate(self._texts):
                    with running_range(self._blocks, first, last, hidden[number]) as range_pass:
                        outs.append(self._forward(ids))
                    hidden[number] = range_pass.hidden_out
        return outs[0]

    def _forward(self, ids: Tensor) -> Tensor:
        last: Tensor = run_forward(self._lazy_model.model, {"input_ids": ids})[0]
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


@dataclass(frozen=True)
class StageModel(LoadedModel):
    """A model with the layers ``first`` to ``last - 1``; its grid has the shape of the whole model's."""

    first: int = 0
    last: int = 0
    is_last: bool = True
    #: Half of a batch may lack its longest sequence, but enters the range with hidden states as wide as the batch.
    keeps_padding: ClassVar[bool] = True


def gives_logits(lm: LoadedModel) -> bool:
    """Return True if passes return logits: those of a whole model, and those of its last range of layers."""
    return not isinstance(lm, StageModel) or lm.is_last


def ablation_here(lm: LoadedModel, ablation: Intervention) -> Intervention:
    """Return the part of an ablation in this model's layers."""
    if not isinstance(lm, StageModel):
        return ablation
    return ablation.within(lm.first, lm.last)


@dataclass(frozen=True)
class Stage:
    """A range of layers, ready to run inside `running_range`, with all blocks of the model."""

    lm: StageModel
    blocks: tuple[Block, ...]

    @property
    def first(self) -> int:
        return self.lm.first

    @property
    def last(self) -> int:
        """The layer after the last one."""
        return self.lm.last

    @property
    def is_last(self) -> bool:
        return self.lm.is_last

    def running_range(self, hidden: Tensor | None = None) -> AbstractContextManager[RangePass]:
        """Restrict passes to these layers; see `blocks.running_range`."""
        return running_range(self.blocks, self.first, self.last, hidden)


class Layers:
    """A model that loads its layers range by range; without a tokenizer if the source has none."""

    def __init__(
        self, lazy_model: LazyModel, inspection: Inspection, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.lazy_model, self.inspection, self.tokenizer = lazy_model, inspection, tokenizer
        self._blocks = tuple(
            Block(lazy_model.model.get_submodule(form.path), form.argument, form.extras) for form in inspection.blocks
        )
        outside = [name for name in lazy_model.names if inspection.outside.intersection(lazy_model.aliases(name))]
        lazy_model.put(outside, lazy_model.read(outside))
        self._outside = frozenset(outside)

    @property
    def num_layers(self) -> int:
        return self.inspection.num_layers

    def size(self, first: int, last: int) -> int:
        """Return the bytes of a range, including the model's ends in it."""
        return self.lazy_model.size(self._weight_names(first, last))

    @property
    def size_outside(self) -> int:
        """Bytes of the norms and tables outside the layers, which stay loaded."""
        return self.lazy_model.size(self._outside)

    @property
    def outline(self) -> LoadedModel:
        """The model with the grid of all heads, which cannot run."""
        self._fill_embedding()
        lazy_model = self.lazy_model
        return LoadedModel(lazy_model.model, self.tokenizer, self.inspection.grid, lazy_model.source, lazy_model.commit)

    def read(self, first: int, last: int) -> RawTensors:
        """Read a range's weights for `load`, possibly in another thread."""
        return self.lazy_model.read(self._weight_names(first, last))

    def load(self, first: int, last: int, raw: RawTensors | None = None) -> Stage:
        """Load a range of layers, from the result of `read`, which is consumed; None reads them now."""
        self.inspection.check([first, last])
        names = self._weight_names(first, last)
        self.lazy_model.put(names, self.lazy_model.read(names) if raw is None else raw)
        self._fill_embedding()
        is_last = last == self.num_layers
        grid = self.inspection.grid
        grid = replace(
            grid, sites=tuple(site for site in grid.sites if first <= site.layer < last), model_max_heads=grid.max_heads
        )
        source, commit = self.lazy_model.source, self.lazy_model.commit
        lm = StageModel(self.lazy_model.model, self.tokenizer, grid, source, commit, first, last, is_last)
        return Stage(lm, self._blocks)

    def drop(self, stage: Stage) -> None:
        self.lazy_model.drop(self._weight_names(stage.first, stage.last))

    @contextmanager
    def at(self, first: int, last: int, raw: RawTensors | None = None) -> Iterator[Stage]:
        """Load a range of layers, and drop it on exit."""
        stage = self.load(first, last, raw)
        try:
            yield stage
        finally:
            self.drop(stage)

    def _fill_embedding(self) -> None:
        """Replace a missing word embedding by zeros. The input of the range's first layer replaces its output."""
        for name in self.inspection.embedding:
            if self.lazy_model.tensor(name).is_meta:
                self.lazy_model.blank(name)

    def _weight_names(self, first: int, last: int) -> tuple[str, ...]:
        return tuple(
            name for name in self.inspection.weights(self.lazy_model, first, last) if name not in self._outside
        )


def open_layers(spec: ModelSpec, device: str = "auto") -> Layers:
    """Open a model to load its layers range by range; this takes the memory of its two ends and one layer. The device
    ``auto`` prefers a GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    lazy_model = LazyModel(spec, device)
    return Layers(lazy_model, inspect_model(lazy_model), spec.tokenizer())
