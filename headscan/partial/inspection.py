"""What a model is, found without reading one of its weights: its heads, its blocks, and where it can be cut in two.

All this is found by watching passes, so there have to be weights of some kind. They are random ones, and the blocks,
which differ in their numbers alone, share them: a model of any depth takes the memory of its two ends and one block. On
it, passes through the whole model and block by block have to end alike.

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
from headscan.layers.blocks import Block, find_blocks, short_text
from headscan.layers.layer_range_pass import running_range
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_means import wide_norm
from headscan.partial.lazy_model import LazyModel

#: Tokens of the texts that are read.
_TOKENS = 8


@dataclass(frozen=True)
class BlockForm:
    """How a block is called: its name inside the model, and as in `blocks.Block`."""

    path: str
    argument: str
    extras: int | None


@dataclass(frozen=True)
class Inspection:
    """What has to be known of a model to run some of its layers alone.

    Attributes:
        grid: Where all its heads are.
        blocks: The blocks, one for each layer.
        beside: Names of the weights outside the blocks that every pass reads, such as norms and tables of positions.
        embedding: Those of the word embedding.
        ending: Those that make logits of the last hidden states.
        embeds_everywhere: Later layers read the word embeddings, too, beside their hidden states.
        uncuttable: Layers that cannot be the first of a range, and why not.
    """

    grid: HeadGrid
    blocks: tuple[BlockForm, ...]
    beside: frozenset[str]
    embedding: frozenset[str]
    ending: frozenset[str]
    embeds_everywhere: bool
    uncuttable: dict[int, str]

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    def blocks_of(self, model: PreTrainedModel) -> tuple[Block, ...]:
        """The blocks in a model of this kind."""
        return tuple(Block(model.get_submodule(form.path), form.argument, form.extras) for form in self.blocks)

    def weights(self, lazy_model: LazyModel, first: int, last: int) -> tuple[str, ...]:
        """Names of the weights of the layers ``first`` to ``last - 1``, and of the ends of the model they reach."""
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
        """Refuse ranges that cannot be.

        Args:
            bounds: The first layers of the ranges, and how many layers there are: ``[0, 8, 16]``.

        Raises:
            UnsupportedModelError: They are not in order, or the model cannot be cut there.
        """
        if list(bounds) != sorted(set(bounds)) or len(bounds) < 2 or bounds[0] < 0 or bounds[-1] > self.num_layers:
            raise UnsupportedModelError(
                f"the layers cannot be divided at {', '.join(map(str, bounds))}: name layers from 0 to "
                f"{self.num_layers}, in rising order"
            )
        for layer in bounds[:-1]:
            if layer in self.uncuttable:
                raise UnsupportedModelError(
                    f"the model cannot be cut below layer {layer}: {self.uncuttable[layer]}; use --placement whole or "
                    "sharded"
                )


@torch.no_grad()
def inspect_model(lazy_model: LazyModel) -> Inspection:
    """Look at a model; the lazy_model is as empty afterwards as before.

    Raises:
        UnsupportedModelError: Its heads cannot be measured rightly, or it is no decoder that is a list of blocks.
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
        beside = _weights_of(lazy_model, names, below - inner) - embedding
        ending = _weights_of(lazy_model, names, above - inner)
        # Whatever else there is (the tower that sees images, say) has to do without weights from here on, too.
        kept = {*embedding, *beside, *(name for name in lazy_model.names if name.startswith(f"{blocks.path}."))}
        lazy_model.drop(name for name in lazy_model.names if not kept.intersection(lazy_model.aliases(name)))
        embeds_everywhere, uncuttable = _Cuts(lazy_model, blocks.all, embedding, ids).find()
    return Inspection(grid, forms, beside, embedding, ending, embeds_everywhere, uncuttable)


@contextmanager
def _random_weights(lazy_model: LazyModel) -> Iterator[None]:
    """Fill a lazy_model with random numbers, the same for weights whose names differ in the layer alone."""
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
    """The modules that run in a pass."""
    ran: set[nn.Module] = set()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lambda module, _: ran.add(module)).remove)
        read()
    return ran


def _weights_of(lazy_model: LazyModel, names: dict[nn.Module, str], modules: Collection[object]) -> frozenset[str]:
    """Names of the weights that modules own themselves, without those of the modules inside them."""
    paths = {names[module] for module in modules if isinstance(module, nn.Module)}
    aliases = (alias for name in lazy_model.names for alias in lazy_model.aliases(name))
    return frozenset(alias for alias in aliases if alias.rpartition(".")[0] in paths)


class _Cuts:
    """Tries whether passes through ranges of layers, one after another, end as a pass through all of them."""

    def __init__(self, lazy_model: LazyModel, blocks: Sequence[Block], embedding: Collection[str], ids: Tensor) -> None:
        self._lazy_model, self._blocks, self._embedding = lazy_model, blocks, embedding
        # What a block keeps in secret for a higher one is another text's when the higher one runs.
        self._texts = (ids, ids.flip(0))
        self._whole = self._read(ids)
        # A kernel may not give the same twice.
        noise = wide_norm(self._read(ids) - self._whole)
        self._bound = 4 * (noise + torch.finfo(self._whole.dtype).eps * wide_norm(self._whole))

    def find(self) -> tuple[bool, dict[int, str]]:
        """Whether later layers have to read the word embeddings, and where the model cannot be cut nevertheless."""
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
        """What goes wrong when the model is cut into these ranges; None: nothing."""
        hidden: list[Tensor | None] = [None, None]
        out = self._whole
        try:
            for first, last in pairwise(bounds):
                with self._embedding_kept(embeds or first == 0):
                    for number, ids in enumerate(self._texts):
                        with running_range(self._blocks, first, last, hidden[number]) as range_pass:
                            read = self._read(ids)
                        hidden[number] = range_pass.hidden_out
                        out = read if number == 0 else out
        except Exception as problem:
            line = (str(problem).strip().splitlines() or [""])[0]
            return f"a pass through its layers in parts breaks off: {type(problem).__name__}: {line}"
        error = wide_norm(out - self._whole)
        if error <= self._bound:
            return None
        return (
            "its blocks hand on more than hidden states (a pass in parts differs by "
            f"{float(error / wide_norm(self._whole)):.1%} from a whole one)"
        )

    def _read(self, ids: Tensor) -> Tensor:
        last: Tensor = run(self._lazy_model.model, {"input_ids": ids})[0]
        return last

    @contextmanager
    def _embedding_kept(self, kept: bool) -> Iterator[None]:
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
