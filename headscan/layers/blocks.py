"""The blocks of a decoder, with hooks on their inputs and on the outputs of their heads, and passes through a part.

The model's own forward runs unchanged, and blocks outside a range return their input. So embeddings, positions, masks,
the KV cache of the layers that run, the final norm and the head are the model's own, in every family. A check shows
whether passes that resume at a layer reproduce a whole pass.

Shapes: B sequences, N tokens, E width of a hidden state, H query heads, D width of a head's output, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from headscan.attention.hooks import output_hook, refuse_compiled
from headscan.errors import HeadIndexError, InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.models.forward_inputs import input_device, run_forward, wide_norm
from headscan.models.loaded_model import Block, FoundBlocks, LoadedModel
from headscan.models.model_facts import MODEL_ERRORS, raise_if_out_of_memory, typed_line
from headscan.text_tables import percent


@dataclass(frozen=True)
class Blocks:
    """The blocks of a decoder, one for each layer, and the attention of layers in which it can be replaced."""

    lm: LoadedModel
    path: str
    all: tuple[Block, ...]
    attention: Mapping[int, Block]

    def at(self, layer: int) -> Block:
        if not 0 <= layer < len(self.all):
            raise HeadIndexError(f"no layer {layer} in {self.lm.source} (limit {len(self.all) - 1}). Choose another")
        return self.all[layer]

    @contextmanager
    def keep_inputs(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the inputs (B, N, E) of these layers in each forward pass, without gradients and copies."""
        kept: dict[int, Tensor] = {}

        def keep(layer: int, hidden: Tensor, _: Cache | None) -> None:
            kept[layer] = hidden.detach()

        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(self.at(layer).watched(partial(keep, layer)))
            yield kept

    @contextmanager
    def keep_heads(self, layers: Container[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the outputs (B, N, H, D) of these layers' heads in each forward pass, as later hooks see them."""
        kept: dict[int, Tensor] = {}

        def keep(site: AttentionSite, outputs_BNHD: Tensor) -> None:
            if site.layer in layers:
                kept[site.layer] = outputs_BNHD.detach()

        with output_hook(self.lm, keep):
            yield kept

    def with_heads(self, layer: int, outputs_BNHD: Tensor) -> AbstractContextManager[None]:
        """Let the heads of a layer have these outputs: of its attention only the output projection runs, without a
        cache.
        """
        if layer not in self.attention:
            raise UnsupportedModelError(
                f"the attention of layer {layer} does not take and return hidden states. Run the whole layer"
            )
        projection = self.lm.module(self.lm.grid.site_of(layer).output_projection)
        heads = outputs_BNHD.flatten(-2)
        return self.attention[layer].replaced(lambda _: projection(heads))


def find_blocks(lm: LoadedModel) -> Blocks:
    """Find the blocks of a decoder by watching a short pass, or in `LoadedModel.blocks` if the modules are the same."""
    refuse_compiled(lm)
    if not lm.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{lm.source} is not a decoder, so its layers cannot run separately. Load a decoder"
        )
    path, modules = _block_list(lm)
    found = lm.blocks.get(path)
    if found is None or [block.module for block in found.all] != list(modules)[: len(found.all)]:
        found = lm.blocks[path] = _watched_blocks(lm, path, modules)
    return Blocks(lm, path, *found)


def _watched_blocks(lm: LoadedModel, path: str, modules: nn.ModuleList) -> FoundBlocks:
    """Return the blocks that run in a short pass; raise if they do not run in order, once each."""
    blocks: list[Block] = []
    order: list[int] = []
    attention: dict[int, Block] = {}

    def on_block(index: int, *call: Any) -> None:
        order.append(index)
        blocks.append(_block(f"{path}.{index}", *call))

    def on_attention(site: AttentionSite, *call: Any) -> None:
        with suppress(UnsupportedModelError):
            attention[site.layer] = _block(site.path, *call)

    with torch.no_grad(), ExitStack() as hooks:
        for index, module in enumerate(modules):
            hooks.callback(module.register_forward_hook(partial(on_block, index), with_kwargs=True).remove)
        for site in lm.grid.sites:
            hook = partial(on_attention, site)
            hooks.callback(lm.module(site.path).register_forward_hook(hook, with_kwargs=True).remove)
        run_forward(lm.model, {"input_ids": short_text(lm, 4)})
    # A list may end with other blocks, such as those that predict a further token.
    if order != list(range(len(order))) or len(order) <= lm.grid.sites[-1].layer:
        raise UnsupportedModelError(
            f"the blocks of {path} run in the order {str(order)[1:-1] or '(none)'}, not once each from first to last, "
            "so passes cannot resume at a layer. Run whole passes"
        )
    return FoundBlocks(tuple(blocks), attention)


def short_text(lm: LoadedModel, tokens: int) -> Tensor:
    """Return token ids (2, N) that are valid in every vocabulary, without the first ids, which may be padding."""
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
    """Return the block of a module, from one call of it; raise if the call does not map hidden states to others."""
    _, argument, *_ = inspect.signature(type(module).forward).parameters  # the first is the module itself
    block = Block(module, argument, len(out) - 1 if isinstance(out, tuple) else None)
    hidden_in = block.hidden(args, kwargs) if args or argument in kwargs else None
    hidden_out = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(hidden_in, Tensor) or not isinstance(hidden_out, Tensor) or hidden_in.shape != hidden_out.shape:
        raise UnsupportedModelError(
            f"{path} does not take and return hidden states first, so it cannot be skipped. Run whole passes"
        )
    return block


class RangePass:
    """The hidden states at both ends of a range of layers.

    Attributes:
        hidden_in: Input of the first layer in the next pass (B, N, E); None uses the output of the model's embedding.
            Set it again when the batch changes.
        hidden_out: Output of the last layer in the last pass (B, N, E); None if the range ends with the model.
    """

    def __init__(self, first: int, hidden_in: Tensor | None, check_cache: Callable[[Cache], None]) -> None:
        self.hidden_in = hidden_in
        self.hidden_out: Tensor | None = None
        self._first, self._check_cache = first, check_cache

    def replace_input(self, layer_input: Tensor, cache: Cache | None) -> Tensor | None:
        """Return the hidden states that replace the first layer's input; None keeps it."""
        if cache is not None:
            self._check_cache(cache)
        if self.hidden_in is None:
            if self._first > 0:
                raise InterventionError(
                    f"no hidden states for layer {self._first}: None. Pass the hidden states that left layer "
                    f"{self._first - 1}"
                )
            return None
        if self.hidden_in.shape != layer_input.shape:
            raise InterventionError(
                f"hidden states for layer {self._first} belong to another batch: {tuple(self.hidden_in.shape)} instead "
                f"of {tuple(layer_input.shape)}. Pass those of the same sequences"
            )
        return self.hidden_in.to(layer_input.device)

    def keep_output(self, next_input: Tensor, _: Cache | None) -> None:
        """Keep the input of the layer after the last one."""
        self.hidden_out = next_input.detach()


def running_range(
    blocks: Sequence[Block], first: int, last: int, hidden_in: Tensor | None = None
) -> AbstractContextManager[RangePass]:
    """Restrict forward passes to the blocks ``first`` to ``last - 1`` of a decoder; the pass's ``hidden_in`` may
    change.

    Call the model as for a whole pass, with the same token ids and without a KV cache. If the range does not end with
    the model, ignore the model's output.
    """

    def refuse(_: Cache) -> None:
        raise InterventionError(f"layers {first} to {last - 1} cannot use a KV cache. Call them with `use_cache=False`")

    return _running(blocks, first, last, hidden_in, refuse)


def resuming_at(blocks: Blocks, layer: int, hidden: Tensor) -> AbstractContextManager[RangePass]:
    """Resume forward passes at a layer, whose input is ``hidden``; the blocks below do not run.

    Call the model as for a whole pass, with the same token ids. A KV cache has to be filled by whole passes; a resumed
    pass adds to it from this layer on, so the cache cannot be used again. `cannot_resume` reports the layers at which a
    model cannot resume.
    """
    blocks.at(layer)
    first, *others = (site.layer for site in blocks.lm.grid.sites)
    # A model takes the number of past tokens from its first layer; positions and masks of all layers follow from it.
    attending = [first, *(other for other in others if other >= layer)]

    def check_past(cache: Cache) -> None:
        layer_caches = [cache.layers[index] for index in attending if index < len(cache)]
        # A layer that shares another layer's keys has no cache of its own.
        tokens = {int(each.get_seq_length()) for each in layer_caches if isinstance(each, CacheLayerMixin)}
        if len(tokens) > 1:
            raise InterventionError(
                f"the KV cache holds {min(tokens)} tokens in some layers and {max(tokens)} in others: cannot resume at "
                f"layer {layer}. Pass a cache filled by whole passes, once"
            )

    return _running(blocks.all, layer, len(blocks.all), hidden, check_past)


@contextmanager
def _running(
    blocks: Sequence[Block], first: int, last: int, hidden_in: Tensor | None, check_cache: Callable[[Cache], None]
) -> Iterator[RangePass]:
    range_pass = RangePass(first, hidden_in, check_cache)
    with ExitStack() as changes:
        for block in (*blocks[:first], *blocks[last:]):
            changes.enter_context(block.skipped())
        changes.enter_context(blocks[first].watched(range_pass.replace_input))
        if last < len(blocks):
            changes.enter_context(blocks[last].watched(range_pass.keep_output))
        yield range_pass


#: Tokens of the short text, and how many of them are read into a KV cache first.
_CHECKED_TOKENS, _CACHED_TOKENS = 8, 3


class WholePass:
    """The output of a whole pass, with a tolerance."""

    def __init__(self, run_pass: Callable[[], Tensor]) -> None:
        self.out = run_pass()
        # Kernels may not be deterministic: the tolerance covers the difference between two equal passes.
        noise = wide_norm(run_pass() - self.out)
        self._bound = 4 * (noise + torch.finfo(self.out.dtype).eps * wide_norm(self.out))

    def difference(self, run_pass: Callable[[], Tensor]) -> str | None:
        """Return how another pass fails or differs; None if it is equal."""
        try:
            error = wide_norm(run_pass() - self.out)
        except MODEL_ERRORS as problem:
            return failure(problem)
        if error <= self._bound:
            return None
        return f"differs by {percent(float(error / wide_norm(self.out)))} from a whole pass"


def failure(problem: Exception) -> str:
    """Return how a pass fails, from its exception; raise if memory ran out."""
    raise_if_out_of_memory(problem)
    return f"fails: {typed_line(problem)}"


@torch.no_grad()
def cannot_resume(
    blocks: Blocks, layers: Iterable[int] | None = None, *, behind_attention: bool = False
) -> dict[int, str]:
    """Return the layers at which passes cannot resume, with the reasons; None checks all layers.

    Blocks may pass on more than hidden states (keys and values that later layers share, for example). Short passes that
    resume at each layer are compared with whole ones, without a KV cache and with one: two passes a layer.
    ``behind_attention`` gives them the outputs of the layer's heads, too. Call it while no head is ablated.
    """
    checked = set(range(len(blocks.all)) if layers is None else layers)
    for layer in checked:
        blocks.at(layer)
    reasons: dict[int, str] = {}
    if not checked:
        return reasons
    for way, cached_tokens in (("without a KV cache", 0), ("with a KV cache", _CACHED_TOKENS)):
        try:
            differences = _differences(blocks, checked, cached_tokens, behind_attention)
        except MODEL_ERRORS as problem:  # of a whole pass
            differences = dict.fromkeys(checked, failure(problem))
        for layer, difference in differences.items():
            reasons.setdefault(layer, f"a pass {way} {difference}")
    return reasons


def _differences(blocks: Blocks, layers: set[int], cached_tokens: int, behind_attention: bool) -> dict[int, str]:
    """Return the layers at which a resumed pass differs, and how."""
    run_pass, text = _short_pass(blocks.lm, cached_tokens), short_text(blocks.lm, _CHECKED_TOKENS)
    with blocks.keep_inputs(layers) as kept, blocks.keep_heads(layers) as heads:
        whole = WholePass(lambda: run_pass(text))
    # Hidden state that blocks share now belongs to another text. The highest layer comes first, so that no lower
    # block writes it again.
    run_pass(text.flip(0))
    differences: dict[int, str] = {}
    for layer in sorted(layers, reverse=True):
        if behind_attention and not (layer in blocks.attention and layer in heads):
            differences[layer] = "cannot skip its attention"
            continue
        attention = blocks.with_heads(layer, heads[layer]) if behind_attention else nullcontext()
        with resuming_at(blocks, layer, kept[layer]), attention:
            difference = whole.difference(lambda: run_pass(text))
        if difference is not None:
            differences[layer] = difference
    return differences


def _short_pass(lm: LoadedModel, cached_tokens: int) -> Callable[[Tensor], Tensor]:
    """Return a pass over ids (B, N) that continues a KV cache; its logits are those after the cached tokens."""
    if not cached_tokens:
        return lambda ids: lm.model(input_ids=ids, use_cache=False).logits
    first = short_text(lm, _CHECKED_TOKENS)[:, :cached_tokens]
    first_cache = lm.model(input_ids=first, use_cache=True).past_key_values

    def run_pass(ids: Tensor) -> Tensor:
        rest, cache = ids[:, cached_tokens:], copy.deepcopy(first_cache)
        logits: Tensor = lm.model(input_ids=rest, past_key_values=cache, use_cache=True).logits
        return logits

    return run_pass
