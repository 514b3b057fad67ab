"""The blocks of a decoder, with hooks on their inputs and on the outputs of their heads.

The model's own forward runs unchanged, and skipped blocks return their input. So embeddings, positions, masks, the KV
cache of the layers that run, the final norm and the head are the model's own, in every family.

Shapes: B sequences, N tokens, E width of a hidden state, H query heads, D width of a head's output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from headscan.attention.hooks import output_hook, refuse_compiled
from headscan.errors import HeadIndexError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.models.decoder_block import Block, FoundBlocks
from headscan.models.forward_inputs import input_device, run
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class Blocks:
    """The blocks of a decoder, one for each layer.

    Attributes:
        lm: The model.
        path: Name of the list inside the model.
        all: The blocks, indexed by layer.
        attention: The attention of layers in which it can be replaced.
    """

    lm: LoadedModel
    path: str
    all: tuple[Block, ...]
    attention: Mapping[int, Block]

    def at(self, layer: int) -> Block:
        """Return the block of a layer.

        Raises:
            HeadIndexError: There is no such layer.
        """
        if not 0 <= layer < len(self.all):
            raise HeadIndexError(f"no layer {layer} in {self.lm.source} (limit {len(self.all) - 1}). Choose another")
        return self.all[layer]

    @contextmanager
    def keep_inputs(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the inputs of these layers in the last forward pass.

        They have no gradient and are not copied.

        Yields:
            Hidden states (B, N, E) by layer, filled by each pass.

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
    def keep_heads(self, layers: Container[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the outputs of these layers' heads in the last forward pass, as later hooks see them.

        Yields:
            Outputs (B, N, H, D) by layer, filled by each pass.
        """
        kept: dict[int, Tensor] = {}

        def keep(site: AttentionSite, heads_BNHD: Tensor) -> None:
            if site.layer in layers:
                kept[site.layer] = heads_BNHD.detach()

        with output_hook(self.lm, keep):
            yield kept

    def with_heads(self, layer: int, heads_BNHD: Tensor) -> AbstractContextManager[None]:
        """Let the heads of a layer have these outputs: of its attention, only the output projection runs.

        The layer adds nothing to a KV cache. `layer_range_pass.cannot_resume` reports the layers where this is wrong.

        Raises:
            UnsupportedModelError: The layer's attention cannot be replaced.
        """
        if layer not in self.attention:
            raise UnsupportedModelError(
                f"the attention of layer {layer} does not take and return hidden states. Run the whole layer"
            )
        projection = self.lm.module(self.lm.grid.site_of(layer).output_projection)
        heads = heads_BNHD.flatten(-2)
        return self.attention[layer].replaced(lambda _: projection(heads))


def find_blocks(lm: LoadedModel) -> Blocks:
    """Find the blocks of a decoder by watching one short forward pass.

    The result is kept in `LoadedModel.blocks`: later calls run no pass while the list holds the same modules.

    Raises:
        UnsupportedModelError: The model is compiled, is not a decoder, or its layers are not blocks that run once
            each, in order.
    """
    refuse_compiled(lm)
    if not lm.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{lm.source} is not a decoder, so its layers cannot run separately. Load a decoder"
        )
    path, modules = _block_list(lm)
    known = lm.blocks.get(path)
    if known is None or [block.module for block in known.all] != list(modules)[: len(known.all)]:
        known = lm.blocks[path] = _watched_blocks(lm, path, modules)
    return Blocks(lm, path, *known)


def _watched_blocks(lm: LoadedModel, path: str, modules: nn.ModuleList) -> FoundBlocks:
    ran: list[Block] = []
    order: list[int] = []
    attention: dict[int, Block] = {}
    with torch.no_grad(), ExitStack() as hooks:

        def watch(module: nn.Module, left: Callable[..., None]) -> None:
            hooks.callback(module.register_forward_hook(left, with_kwargs=True).remove)

        for index, module in enumerate(modules):

            def left(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, index: int = index
            ) -> None:
                order.append(index)
                ran.append(_block(f"{path}.{index}", module, args, kwargs, out))

            watch(module, left)
        for site in lm.grid.sites:

            def attended(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, site: AttentionSite = site
            ) -> None:
                with suppress(UnsupportedModelError):
                    attention[site.layer] = _block(site.path, module, args, kwargs, out)

            watch(lm.module(site.path), attended)
        run(lm.model, {"input_ids": short_text(lm, 4)})
    # A list may end with other blocks, such as those that predict a further token.
    if order != list(range(len(order))) or len(order) <= lm.grid.sites[-1].layer:
        raise UnsupportedModelError(
            f"the blocks of {path} run in the order {str(order)[1:-1] or '(none)'}, not once each from first to last, "
            "so passes cannot resume at a layer. Run whole passes"
        )
    return FoundBlocks(tuple(ran), attention)


def short_text(lm: LoadedModel, tokens: int) -> Tensor:
    """Return token ids (2, N) that are valid in every vocabulary.

    The first ids are omitted, because they may be padding.
    """
    ids = torch.arange(2 * tokens, device=input_device(lm.model)).view(2, -1)
    return (ids + 5) % lm.vocab_size


def _block_list(lm: LoadedModel) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks, each at the index of its layer."""
    for path, module in lm.model.named_modules():
        if isinstance(module, nn.ModuleList) and all(
            site.path.startswith(f"{path}.{site.layer}.") for site in lm.grid.sites
        ):
            return path, module
    raise UnsupportedModelError(
        f"{lm.source} has no list with one block per layer, so passes cannot resume at a layer. Run whole passes"
    )


def _block(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Block:
    """Return the block of a call.

    Raises:
        UnsupportedModelError: It does not take and return hidden states first.
    """
    _, argument, *_ = inspect.signature(type(module).forward).parameters  # the first is the module itself
    block = Block(module, argument, len(out) - 1 if isinstance(out, tuple) else None)
    given = block.hidden(args, kwargs) if args or argument in kwargs else None
    returned = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(given, Tensor) or not isinstance(returned, Tensor) or given.shape != returned.shape:
        raise UnsupportedModelError(
            f"{path} does not take and return hidden states first, so it cannot be skipped. Run whole passes"
        )
    return block
