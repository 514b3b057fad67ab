"""The blocks of a decoder, one for each layer, and forward passes that begin at one of them.

No forward of a model is rewritten: it runs as it is, and the blocks that are left out hand on what they are given. So
embeddings, positions, masks, the KV cache of the layers that run, the final norm and the head are the model's own,
whatever its family.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from headscan.attention.hooks import refuse_compiled
from headscan.errors import HeadIndexError, InterventionError, UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.models.forward_inputs import input_device, run
from headscan.models.loaded_model import LoadedModel

#: Shown the hidden states that enter a block, and the KV cache; returns others to take their place, or None.
HiddenHook = Callable[[Tensor, Cache | None], Tensor | None]


@dataclass(frozen=True)
class Block:
    """One block: it takes hidden states (B, N, E), and whatever else, and returns them changed.

    Attributes:
        module: What the model calls.
        argument: Name of its first argument, the hidden states.
        extras: How many values it returns beside them; None: it returns them as they are, not in a tuple.
    """

    module: nn.Module
    argument: str
    extras: int | None

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hidden states among the arguments of a call."""
        return kwargs[self.argument] if self.argument in kwargs else args[0]

    @contextmanager
    def watched(self, hidden_hook: HiddenHook) -> Iterator[None]:
        """Call a hook with the hidden states that enter; it may replace them."""

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

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Hand on what enters.

        The module stays in its place, with all that the model's own loop may read of it. Accelerate, whose forward of
        offloaded modules sits in the same attribute, loads nothing for it.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = self.hidden(args, kwargs)
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


@dataclass(frozen=True)
class Blocks:
    """The blocks of a decoder, one for each layer.

    Attributes:
        lm: The model.
        path: Name of their list inside the model.
        all: The blocks; a layer's index is its block's.
    """

    lm: LoadedModel
    path: str
    all: tuple[Block, ...]

    def at(self, layer: int) -> Block:
        """The block of a layer.

        Raises:
            HeadIndexError: There is no such layer.
        """
        if not 0 <= layer < len(self.all):
            raise HeadIndexError(f"layer {layer} does not exist: {self.lm.source} has layers 0 to {len(self.all) - 1}")
        return self.all[layer]

    @contextmanager
    def keep_inputs(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Keep what enters these layers in the last forward pass, without gradient, and not copied.

        Yields:
            Hidden states (B, N, E) by layer, there after a pass.

        Raises:
            HeadIndexError: There is no such layer.
        """
        kept: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer in layers:

                def keep(hidden: Tensor, _: Cache | None, layer: int = layer) -> None:
                    kept[layer] = hidden.detach()

                hooks.enter_context(self.at(layer).watched(keep))
            yield kept

    @contextmanager
    def resuming_at(self, layer: int, hidden: Tensor) -> Iterator[ResumePoint]:
        """Let forward passes begin at a layer: the blocks below it do not run, and ``hidden`` enters it.

        A pass is called as a whole one is, with the same token ids. One that goes on from a KV cache needs it filled
        by whole passes, and adds to it from this layer on alone, so that no pass can go on from there. Not every model
        can do all this: `resume_check.cannot_resume` tells.

        Args:
            layer: The first block that runs.
            hidden: What enters it (B, N, E), as `keep_inputs` keeps it.

        Yields:
            The resume_point; its ``hidden`` may be changed from pass to pass.

        Raises:
            HeadIndexError: There is no such layer.
            InterventionError: In a pass: ``hidden`` is of another batch, or the cache is not as it has to be.
        """
        block, resume_point = self.at(layer), ResumePoint(layer, hidden, self.lm.grid)
        with ExitStack() as changes:
            for below in self.all[:layer]:
                changes.enter_context(below.skipped())
            changes.enter_context(block.watched(resume_point.replace))
            yield resume_point


class ResumePoint:
    """Where forward passes begin.

    Attributes:
        hidden: The hidden states that enter in the next pass (B, N, E); set them again when the batch changes.
    """

    def __init__(self, layer: int, hidden: Tensor, grid: HeadGrid) -> None:
        self.hidden = hidden
        self._layer = layer
        first, *others = (site.layer for site in grid.sites)
        self._attending = [first, *(other for other in others if other >= layer)]

    def replace(self, own: Tensor, cache: Cache | None) -> Tensor:
        """The hidden states that enter, in the place of the model's own.

        Raises:
            InterventionError: They are of another batch, or the cache was not filled by whole passes.
        """
        if self.hidden.shape != own.shape:
            raise InterventionError(
                f"hidden states {tuple(self.hidden.shape)} cannot enter layer {self._layer} in the place of "
                f"{tuple(own.shape)}: give those of the same sequences"
            )
        if cache is not None:
            self._check_past(cache)
        return self.hidden.to(own.device)

    def _check_past(self, cache: Cache) -> None:
        """A model asks its first layer how many tokens came before; positions and masks of all layers follow."""
        memories = [cache.layers[layer] for layer in self._attending if layer < len(cache)]
        # A layer that borrows another's keys has no memory of its own.
        past = {int(memory.get_seq_length()) for memory in memories if isinstance(memory, CacheLayerMixin)}
        if len(past) > 1:
            raise InterventionError(
                f"the KV cache holds {min(past)} tokens in some layers and {max(past)} in others: a pass that enters "
                f"at layer {self._layer} goes on from a cache that whole passes have filled, and can do so once"
            )


def find_blocks(lm: LoadedModel) -> Blocks:
    """Find the blocks of a decoder by watching one short forward pass.

    Raises:
        UnsupportedModelError: The model is compiled or no decoder alone, or its layers are not blocks that run once
            each, in their order.
    """
    refuse_compiled(lm)
    if not lm.grid.predicts_next_token:
        raise UnsupportedModelError(f"{lm.source} is no decoder alone: its layers cannot run apart from each other")
    path, modules = _block_list(lm)
    ran: list[Block] = []
    order: list[int] = []
    with torch.no_grad(), ExitStack() as hooks:
        for index, module in enumerate(modules):

            def left(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, index: int = index
            ) -> None:
                order.append(index)
                ran.append(_block(f"{path}.{index}", module, args, kwargs, out))

            hooks.callback(module.register_forward_hook(left, with_kwargs=True).remove)
        run(lm.model, {"input_ids": short_text(lm, 4)})
    # A list may go on with blocks of other use, such as those that predict a further token.
    if order != list(range(len(order))) or len(order) <= lm.grid.sites[-1].layer:
        raise UnsupportedModelError(
            f"the blocks of {path} run in the order {str(order)[1:-1] or 'of none'}, not once each from the first to "
            "the last: a pass cannot begin in between"
        )
    return Blocks(lm, path, tuple(ran))


def short_text(lm: LoadedModel, tokens: int) -> Tensor:
    """Token ids (2, N) that every model knows, past the first ones, among which padding is."""
    ids = torch.arange(2 * tokens, device=input_device(lm.model)).view(2, -1)
    return (ids + 5) % lm.vocab_size


def _block_list(lm: LoadedModel) -> tuple[str, nn.ModuleList]:
    """The list that has every attention of the grid in the member with its layer's index."""
    for path, module in lm.model.named_modules():
        if isinstance(module, nn.ModuleList) and all(
            site.path.startswith(f"{path}.{site.layer}.") for site in lm.grid.sites
        ):
            return path, module
    raise UnsupportedModelError(f"{lm.source} has no list of blocks, one for each layer: a pass cannot begin at one")


def _block(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Block:
    """A block as its call shows it.

    Raises:
        UnsupportedModelError: It does not take and return hidden states in a way that is known.
    """
    _, argument, *_ = inspect.signature(type(module).forward).parameters  # the first is the module itself
    block = Block(module, argument, len(out) - 1 if isinstance(out, tuple) else None)
    given = block.hidden(args, kwargs) if args or argument in kwargs else None
    returned = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(given, Tensor) or not isinstance(returned, Tensor) or given.shape != returned.shape:
        raise UnsupportedModelError(
            f"{path} does not take hidden states first and return them first: it cannot be skipped"
        )
    return block
